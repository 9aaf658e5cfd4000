"""The settings of rotary embedding: every key of every place is honoured, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.recipes.deepseek_v4.config import Config as DeepseekV4
from openinfer.recipes.deepseek_v4.published import config_json as deepseek_v4_json
from openinfer.recipes.eagle3 import Head
from openinfer.recipes.engine import Source, UnsupportedModel, startup
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config as Qwen3
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.recipes.qwen3_5.config import Config as Qwen35
from openinfer.recipes.qwen3_5.published import config_json as qwen3_5_json
from openinfer.tensor import Device

PLAIN = {**RECIPE.small, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
BARE = {key: value for key, value in PLAIN.items() if key != "rope_theta"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def yarn(
    *, dim: int = 128, theta: float = 1e6, factor: float = 4.0, original: int = 32768,
    fast: float = 32, slow: float = 1, truncate: bool = True,
) -> Any:  # fmt: skip
    """Frequencies of YaRN in float64, written anew from its definition."""
    low, high = (dim * math.log(original / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    return plain * (1 - ramp) + plain / factor * ramp


def scale_of(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1


PLACES = {
    "rope_scaling": PLAIN | {"rope_scaling": YARN},
    "rope_parameters": BARE | {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "the base in rope_scaling": BARE | {"rope_scaling": YARN | {"rope_theta": 1e6}},
    "the old name of the type": PLAIN | {"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}},
    "both names of the type": PLAIN | {"rope_scaling": {**YARN, "type": "yarn"}},
    "plain beside rope_scaling": BARE
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
    "plain in rope_scaling": BARE
    | {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "default"}},
    "the base twice": PLAIN | {"rope_parameters": YARN | {"rope_theta": 1000000}},
    "by layer type": PLAIN | {"rope_parameters": {"full_attention": YARN}},
    "the original length beside it": PLAIN
    | {"original_max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4}},
    "values of null": PLAIN | {"rope_scaling": YARN | {"attention_factor": None, "beta_fast": None, "mscale": None}},
}  # fmt: skip


@pytest.mark.parametrize("config", PLACES.values(), ids=list(PLACES))
def test_settings_are_found_wherever_they_stand(config: dict[str, Any]) -> None:
    made = Qwen3.parse(config)
    np.testing.assert_allclose(made.inv_freq, yarn(), rtol=1e-5)
    assert made.rope_scale == pytest.approx(scale_of(4))
    assert (made.max_position_embeddings, made.max_positions) == (40960, 131072)


@pytest.mark.parametrize(
    ("keys", "frequencies", "scale"),
    [
        ({}, {}, scale_of(4)),
        ({"factor": 2}, {"factor": 2.0}, scale_of(2)),
        ({"factor": 0.5}, {"factor": 0.5}, 1.0),
        ({"factor": None}, {"factor": 1.25}, scale_of(1.25)),  # 40,960 of 32,768
        ({"beta_fast": 16, "beta_slow": 2}, {"fast": 16, "slow": 2}, scale_of(4)),
        ({"truncate": False}, {"truncate": False}, scale_of(4)),
        ({"attention_factor": 1.0}, {}, 1.0),
        ({"attention_factor": 0.7, "mscale": 1.0, "mscale_all_dim": 0.5}, {}, 0.7),
        ({"attn_factor": 0.8782488562869419}, {}, 1.0),  # of DeepSeek-R1-0528-Qwen3-8B
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, {}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, {}, scale_of(4) / scale_of(4, 0.5)),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "factor": 0.5}, {"factor": 0.5}, 1.0),
        ({"mscale": 0, "mscale_all_dim": 0}, {}, scale_of(4)),
    ],
)
def test_each_key_of_yarn_counts(keys: dict[str, Any], frequencies: dict[str, Any], scale: float) -> None:
    made = Qwen3.parse(PLAIN | {"rope_scaling": YARN | keys})
    np.testing.assert_allclose(made.inv_freq, yarn(**frequencies), rtol=1e-5)
    assert made.rope_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (PLAIN | {"rope_scaling": YARN | {"extrapolation_factor": 1.0}}, "no key 'extrapolation_factor'"),
        (PLAIN | {"rope_scaling": YARN | {"long_factor": [1.0]}}, "no key 'long_factor'"),
        (PLAIN | {"rope_scaling": {"factor": 4.0}}, "rope type 'default' of this recipe has no key 'factor'"),
        (PLAIN | {"rope_scaling": YARN | {"mscale": 1.0}}, "mscale and mscale_all_dim must be given together"),
        (PLAIN | {"rope_scaling": YARN | {"mscale": -1, "mscale_all_dim": 1}}, "mscale is -1"),
        (PLAIN | {"rope_scaling": YARN | {"attn_factor": 1, "attention_factor": 1}}, "attn_factor is 1"),
        (PLAIN | {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast is 1"),
        (PLAIN | {"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0"),
        (PLAIN | {"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings is None"),
        (PLAIN | {"rope_scaling": YARN | {"type": "llama3"}}, "rope_scaling has 'type' 'llama3', and"),
        (PLAIN | {"rope_scaling": YARN | {"rope_theta": 1e4}}, "'rope_theta' 10000.0, and config.json has 1000000"),
        (PLAIN | {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2}}, "'factor' 4.0, and rope_param"),
        (PLAIN | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        (PLAIN | {"rope_parameters": {"sliding_attention": YARN}}, "this model has full_attention"),
        (PLAIN | {"rope_scaling": {"mrope_section": [1, 1, 1]}}, "no key 'mrope_section'"),
        (PLAIN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it rotates 64 of 128"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        Qwen3.parse(config)


def test_settings_by_layer_type_must_agree() -> None:
    mixed = PLAIN | {
        "num_hidden_layers": 2, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]
    }  # fmt: skip
    alike = {"full_attention": YARN, "sliding_attention": YARN}
    np.testing.assert_allclose(Qwen3.parse(mixed | {"rope_parameters": alike}).inv_freq, yarn(), rtol=1e-5)
    with pytest.raises(UnsupportedModel, match="differs by layer type"):
        Qwen3.parse(mixed | {"rope_parameters": alike | {"sliding_attention": {"rope_type": "default"}}})


def test_yarn_turns_the_rotated_part_of_qwen3_5() -> None:
    text = qwen3_5_json("4B")
    assert text["text_config"]["head_dim"] == 256
    changed = {"factor": 4.0, "original_max_position_embeddings": 262144}
    streams = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    for rope in (
        {
            "rope_parameters": text["text_config"]["rope_parameters"]
            | streams
            | changed
            | {"rope_type": "yarn"}
        },
        {"rope_scaling": changed | {"type": "yarn"}},
    ):
        made = Qwen35.parse({**text, "text_config": text["text_config"] | rope})
        np.testing.assert_allclose(made.inv_freq, yarn(dim=64, theta=1e7, original=262144), rtol=1e-5)
        assert made.rope_scale == pytest.approx(1.1386, abs=1e-4)
        assert (made.max_position_embeddings, made.max_positions) == (262144, 1048576)
    with pytest.raises(UnsupportedModel, match="rope_scaling is an object of 3; it belongs into text_config"):
        Qwen35.parse({**text, "rope_scaling": changed | {"type": "yarn"}})


def test_deepseek_v4_has_no_factor_on_cosines() -> None:
    raw = deepseek_v4_json("Flash")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        with pytest.raises(UnsupportedModel, match=f"no key '{key}'"):
            DeepseekV4.parse({**raw, "rope_scaling": raw["rope_scaling"] | {key: 1.0}})
    with pytest.raises(UnsupportedModel, match="no key 'main'"):
        DeepseekV4.parse({**raw, "rope_parameters": {"main": 1}})


def test_a_head_that_drafts_rotates_as_its_config_says(tmp_path: Path) -> None:
    target = Qwen3.parse(PLAIN)
    head = {key: PLAIN[key] for key in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim")}
    head |= {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 16}
    head["eagle_aux_hidden_state_layer_ids"] = [0, 1, 1]
    for rope in ({"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e6}}):
        (tmp_path / "config.json").write_text(json.dumps(head | rope))
        made = Head.read(tmp_path, target).rope
        np.testing.assert_allclose(made.inv_freq, yarn(), rtol=1e-5)
        assert made.rope_scale == pytest.approx(scale_of(4))


def test_a_flag_asks_for_the_longer_sequences_of_yarn() -> None:
    source = Source(PLAIN | {"rope_scaling": YARN})

    def length(**flags: Any) -> int:
        options = RECIPE.options(**flags)
        return decide(options, Device("cpu"), RECIPE.blueprint(source, options)).max_model_len

    assert (length(), length(max_model_len=131072)) == (40960, 131072)
    with pytest.raises(SetupError, match="this model has positions for 2 to 131072 tokens"):
        length(max_model_len=131073)


@pytest.mark.parametrize("recipe", [RECIPE, QWEN3_5], ids=["qwen3", "qwen3_5"])
def test_the_table_of_an_engine_has_frequencies_and_factor(recipe: Any, tmp_path: Path) -> None:
    yarn_ = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    changed = {**recipe.small, "head_dim": 64, "rope_parameters": yarn_ | {"partial_rotary_factor": 1.0}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    sizes = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    engine = startup.build(recipe, tmp_path, device="cpu", load_format="dummy", **sizes).engine
    try:
        angles = np.arange(64)[:, None] * yarn(dim=64, theta=1e4, original=2048)
        wanted = np.stack([np.cos(angles), np.sin(angles)], 1) * scale_of(4)
        np.testing.assert_allclose(engine.runner.model.cos_sin.numpy(), wanted, atol=2e-5)
    finally:
        engine.close()
