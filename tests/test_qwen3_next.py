"""Qwen3-Next is the model of Qwen3.5's mixtures in another spelling: weights that mean the same give the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import next_form
import numpy as np
import pytest
from golden_rows import last_logits
from int4_packers import FORMATS
from next_form import as_next
from test_lora import weights_of

from openinfer.cli import main, recipes
from openinfer.frontend.chat import default_formats
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import SetupError, UnsupportedModel
from openinfer.recipes.engine.testing import write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.recipes.qwen3_5 import RECIPE
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.published import config_json
from openinfer.tensor import CheckpointError, bfloat16, float32

MOE = Path(__file__).parent / "goldens" / "qwen3_5-moe-tiny"
SMALL = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1, "eos_token_id": 511,
}  # fmt: skip
RAW = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": SMALL}
NEXT = config_json("Qwen3-Next-80B-A3B")


@pytest.fixture
def same(golden_of: Any, tmp_path: Path) -> Any:
    """The golden mixture of Qwen3.5, and its folder as a Qwen3-Next."""
    return golden_of(MOE.name), as_next(MOE, tmp_path / "next")


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_logits_are_those_of_qwen3_5_bit_for_bit(same: Any, place: Any, dtype: Any, monkeypatch: Any) -> None:
    golden, folder = same
    ours, theirs = (place(RECIPE, path, [65, 5], dtype=dtype) for path in (folder, MOE))
    for index in range(3):
        prompt = golden.prompt(index)
        np.testing.assert_array_equal(last_logits(ours, prompt), last_logits(theirs, prompt))
    # Negative control: one section of all heads after the other, as Qwen3.5 has them.
    monkeypatch.setattr(next_form, "by_key_head", lambda parts, heads: np.concatenate(parts))
    wrong = place(RECIPE, as_next(MOE, folder.with_name("wrong")), [65, 5], dtype=dtype)
    assert np.abs(last_logits(wrong, prompt) - last_logits(ours, prompt)).max() > 0.1


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_give_the_goldens_tokens(same: Any, session: Any, ranks: int) -> None:
    golden, folder = same
    run = session(folder, tensor_parallel_size=ranks, max_num_batched_tokens=50)
    asked = [run.submit(golden.prompt(index), 16, ignore_eos=True) for index in range(4)]
    run.finish()
    for index, request in enumerate(asked):
        assert run.outcomes[request].tokens == golden.greedy(index)[:16]


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("form", of_the_day(["plain", "FP8", "W4A16_ASYM", "AWQ"]))
def test_packed_weights_give_the_same_tokens(form: str, session: Any, tmp_path: Path) -> None:
    """Scales and zero points are by rows or by blocks of rows, and are gathered as the rows are. On 4 ranks pairs share
    a key head."""
    packed = {"plain": None, "FP8": FP8, **{name: kind[2] for name, kind in FORMATS.items()}}[form]
    source = write_random_checkpoint(RECIPE, tmp_path / "source", RAW | {"quantization_config": packed})
    found = []
    for folder in (source, as_next(source, tmp_path / "next")):
        for ranks in (1, 4 if form == "plain" else 2):
            run = session(folder, tensor_parallel_size=ranks, max_model_len=256)
            one = run.submit(range(5, 75), 12, ignore_eos=True, logprobs=0)
            run.finish()
            found.append((run.outcomes[one].tokens, run.outcomes[one].logprobs))
    assert found[:2] == found[2:]


def with_mtp(folder: Path) -> Path:
    """The golden mixture with an MTP head, which is made of its last layer."""
    tensors = weights_of(MOE)
    last = "model.language_model.layers.1."
    head = {
        name.replace(last, "mtp.layers.0."): one for name, one in tensors.items() if name.startswith(last)
    }
    hidden = tensors["lm_head.weight"].shape[1]
    head["mtp.fc.weight"] = np.eye(hidden, 2 * hidden).astype(bfloat16)
    head |= {f"mtp.{name}.weight": tensors["model.language_model.norm.weight"]
             for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip
    raw = json.loads((MOE / "config.json").read_text())
    raw["text_config"]["mtp_num_hidden_layers"] = 1
    shutil.copytree(MOE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(raw))
    write_tensors(folder / "model.safetensors", tensors | head)
    return folder


def test_the_mtp_head_is_the_one_in_the_file(same: Any, session: Any, tmp_path: Path) -> None:
    golden, folder = same
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    for path in (folder, as_next(MOE, tmp_path / "lost", num_nextn_predict_layers=1)):
        with pytest.raises(SetupError, match="this checkpoint has no MTP head"):
            session(path, speculative_config=drafts)
    source, accepted = with_mtp(tmp_path / "source"), []
    for path in (source, as_next(source, tmp_path / "drafts")):
        run = session(path, speculative_config=drafts)
        asked = [run.submit(golden.prompt(index), 16, ignore_eos=True) for index in range(3)]
        run.finish()
        assert [run.outcomes[one].tokens for one in asked] == [
            golden.greedy(index)[:16] for index in range(3)
        ]
        accepted.append(run.engine.stats().accepted_by_position)
    assert accepted[0] == accepted[1] != []
    ignored = as_next(source, tmp_path / "ignored", num_nextn_predict_layers=0)
    assert session(ignored).engine.runner.model.weights.mtp is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is a list of 1"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"num_experts": None}, "num_local_experts is None"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok is 513; there are 512 experts"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ({"full_attention_interval": None}, "full_attention_interval is None"),
        (
            {"layer_types": ["full_attention"] * 48},
            "layer_types is a list of 48; the 48 layers must be of both kinds",
        ),
        ({"full_attention_interval": 49}, "full_attention_interval is 49"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype is 'float16'"),
        ({"rope_parameters": None}, "rope_theta is None"),
        ({"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"rope_scaling": {"mrope_section": [11, 11, 10]}}, "no key 'mrope_section'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' 0.25, and config.json has 0.5"),
    ],
)
def test_what_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        Config.parse(NEXT | change)


FLAT = {key: value for key, value in NEXT.items() if key != "rope_parameters"} | {"rope_theta": 1e7}
YARN = {"factor": 4.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, 1.1386),
        ({"attention_factor": 1.5}, 1.5),
        ({"attn_factor": 2.0}, 2 * 1.1386),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)),
        ({"truncate": False}, 1.1386),
    ],
)
def test_yarn_turns_the_rotated_part(keys: dict[str, Any], scale: float) -> None:
    old = Config.parse(FLAT | {"rope_scaling": YARN | keys | {"type": "yarn"}})
    new = Config.parse(
        NEXT | {"rope_parameters": NEXT["rope_parameters"] | YARN | keys | {"rope_type": "yarn"}}
    )
    plain = Config.parse(FLAT | {"rope_scaling": None})
    assert old.rope_scale == new.rope_scale == pytest.approx(scale, abs=1e-4)
    assert old.max_positions == 4 * 262144
    i = np.arange(32)
    low, high = (64 * np.log(262144 / (2 * np.pi * turns)) / (2 * np.log(1e7)) for turns in (32, 1))
    if keys.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    ramp = np.clip((i - low) / (high - low), 0, 1)
    np.testing.assert_allclose(old.inv_freq, plain.inv_freq * (1 - ramp * 3 / 4), rtol=1e-5)
    np.testing.assert_array_equal(old.inv_freq, new.inv_freq)
    np.testing.assert_allclose(plain.inv_freq, 1e7 ** (-i / 32), rtol=1e-5)


def test_a_file_that_says_something_else_is_named(same: Any, session: Any, tmp_path: Path) -> None:
    _, folder = same
    for changes, words in (
        (
            {"linear_num_value_heads": 2},
            r"in_proj_qkvz\.weight in .* is \[1536, 64\], must be \[1024, 64\]",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "missing: model.layers.0.self_attn"),
    ):
        path = as_next(MOE, tmp_path / f"changed-{len(words)}", **changes)
        with pytest.raises(CheckpointError, match=words):
            session(path)
    (folder / "config.json").write_text((MOE / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"missing: .*in_proj_qkv\.weight"):
        session(folder)


def test_calls_and_names(same: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Instruct and Thinking write calls in JSON, Coder-Next in XML, as their templates say."""
    assert default_formats("qwen3_next") == ("hermes", "qwen3")
    template = "{% if tools %}<tool_call>\n<function=f>{% endif %}"
    assert default_formats("qwen3_next", (template,)) == ("qwen3_xml", "qwen3")
    for name in (
        "Qwen/Qwen3-Next-80B-A3B-Thinking",
        "qwen3-coder-next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
    ):
        recipe, config = recipes.published(name)
        assert (recipe.name, config["model_type"]) == ("qwen3_5", "qwen3_next")
        assert ("quantization_config" in config) == name.endswith("FP8")
    for name, model_type in (("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe"), ("Qwen3.8-27B-FP8", "qwen3_5")):
        assert recipes.published(name)[1]["model_type"] == model_type
    assert main(["check", str(same[1])]) == 0
    said = capsys.readouterr().out
    assert "qwen3_5, for model_type 'qwen3_next'" in said
    assert "it loads" in said
