"""config.json of Qwen3.5: the published sizes to the last parameter, both spellings, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from openinfer.kernels import Target
from openinfer.kernels.attention.kv_cache import FP8_CACHE, CacheForm, KvLayout
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.recipes.engine.startup import kernel_specs
from openinfer.recipes.qwen3_5 import RECIPE
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.published import SIZES, config_json
from openinfer.recipes.qwen3_5.states import States
from openinfer.recipes.qwen3_5.weights import Format, Weights
from openinfer.tensor import Arena, Device, bfloat16, float8_e4m3fn

PUBLISHED = {  # parameters of the text model; bytes of keys and values a token, and of states a sequence
    "0.8B": (752_393_024, 12_288, 18.9e6 + 0.66e6),
    "2B": (1_881_825_088, 12_288, 18.9e6 + 0.66e6),
    "4B": (4_205_751_296, 32_768, 50.3e6 + 1.18e6),
    "9B": (8_953_803_264, 32_768, 50.3e6 + 1.18e6),
    "27B": (26_895_998_464, 65_536, 151e6 + 2.95e6),
    "35B-A3B": (34_660_610_688, 20_480, 62.9e6 + 1.47e6),
    "122B-A10B": (122_111_526_912, 24_576, 151e6 + 2.65e6),
    "397B-A17B": (396_346_350_336, 30_720, 189e6 + 3.32e6),
    "Qwen3-Next-80B-A3B": (79_674_391_296, 24_576, 75.5e6 + 1.77e6),
}


def weights_of(config: Config) -> Weights:
    weights = Weights.allocate(config, Arena(Device("null"), None), bfloat16, Format.published(config))
    weights.places.complete()
    return weights


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_have_their_parameters(size: str) -> None:
    config = Config.parse(config_json(size))
    weights = weights_of(config)
    names = [*weights.places.loads, *weights.places.conversions]
    count = sum(math.prod(place.dst.shape) for place in names)
    parameters, cache, states = PUBLISHED[size]
    assert count == parameters
    heads = config.num_full, config.num_kv_heads, 1, config.head_dim
    assert KvLayout(*heads, CacheForm(bfloat16)).page_bytes == cache
    assert KvLayout(*heads, FP8_CACHE).page_bytes == cache // 2 + 2 * config.num_full * config.num_kv_heads
    ring_row = config.num_linear * config.conv_size * 2  # ours has four, the published state three
    assert config.state_bytes(2) - ring_row == pytest.approx(states, rel=0.005)
    assert (weights.lm_head is weights.embed) == SIZES[size][-1]
    assert weights.mtp is None


def test_the_mtp_head_takes_no_memory_unless_it_is_asked_for() -> None:
    config = Config.parse(config_json("4B"), None)
    without, with_mtp = (Arena(Device("null"), None) for _ in range(2))
    Weights.allocate(config, without, bfloat16, Format.published(config))
    weights = Weights.allocate(config, with_mtp, bfloat16, replace(Format.published(config), mtp=True))
    assert weights.mtp is not None
    assert with_mtp.used - without.used > 200 << 20


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("size", of_the_day(list(SIZES), 2))
def test_published_sizes_have_a_plan_on_a_gpu(size: str, fp8: bool) -> None:
    source, target = Source(config_json(size, fp8=fp8)), Target(90, 132, cublas=True, gpu="NVIDIA H200")
    specs = kernel_specs(RECIPE, source, RECIPE.options(max_num_seqs=32), target)
    modules = {spec.module for spec in specs}
    assert any(module.startswith("openinfer.recipes.qwen3_5.device") for module in modules)
    assert len(specs) > 30


@pytest.mark.parametrize("size", ["4B", "35B-A3B"])
def test_block_scaled_checkpoints_keep_their_weights_in_one_byte(size: str) -> None:
    plain = weights_of(Config.parse(config_json(size)))
    small = weights_of(Config.parse(config_json(size, fp8=True)))
    kept = {load.name for load in small.places.loads if load.dst.dtype != float8_e4m3fn}
    assert "model.language_model.layers.0.linear_attn.in_proj_a.weight" in kept
    assert "model.language_model.layers.3.self_attn.q_proj.weight" not in kept
    sizes = [
        sum(
            load.dst.nbytes for load in w.places.loads if "embed" not in load.name and "head" not in load.name
        )
        for w in (plain, small)
    ]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)
    scales = [place for place in small.places.conversions if place.names[0].endswith("_scale_inv")]
    assert len(scales) == sum(load.dst.dtype == float8_e4m3fn for load in small.places.loads)
    widths = {math.ceil(load.dst.shape[-1] / 128) for load in small.places.loads}
    assert {place.dst.shape[-1] for place in scales} <= widths


def test_flat_and_nested_configs_are_the_same_model() -> None:
    nested = config_json("4B")
    flat = {**nested["text_config"], "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    a, b = Config.parse(nested), Config.parse(flat)
    assert (a.full, a.hidden_size, a.tie_word_embeddings) == (b.full, b.hidden_size, b.tie_word_embeddings)
    assert weights_of(a).places.loads[0].name == "model.language_model.embed_tokens.weight"
    assert weights_of(b).places.loads[0].name == "model.embed_tokens.weight"
    assert a.full[:4] == (False, False, False, True)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\]"),
        ({"text": {"hidden_size": 0}}, "hidden_size is 0"),
        ({"text": {"layer_types": ["linear_attention"] * 3}}, "layer_types is a list of 3; it must name"),
        ({"text": {"layer_types": ["linear_attention"] * 32}}, "the 32 layers must be of both kinds"),
        (
            {"text": {"full_attention_interval": 1}},
            "full_attention_interval is 1; the 32 layers must be of both",
        ),
        (
            {"text": {"mamba_ssm_dtype": "float16"}},
            "is 'float16'; states are kept in 'float32' or 'bfloat16'",
        ),
        ({"text": {"output_gate_type": "sigmoid"}}, "output_gate_type is 'sigmoid'"),
        ({"text": {"linear_num_value_heads": 24}}, "linear_num_value_heads 24"),
        ({"text": {"rope_parameters": {"rope_type": "dynamic"}}}, "'dynamic'"),
        ({"text": {"mtp_num_hidden_layers": 2}}, "mtp_num_hidden_layers"),
        ({"text": {"mlp_only_layers": [1]}}, "mlp_only_layers"),
        ({"text": {"mtp_use_dedicated_embeddings": True}}, "mtp_use_dedicated_embeddings"),
    ],
)
def test_what_is_refused(change: dict[str, Any], names: str) -> None:
    raw = config_json("4B")
    raw["text_config"] |= change.pop("text", {})
    with pytest.raises(UnsupportedModel, match=names):
        Config.parse({**raw, **change})


def test_projections_that_do_not_go_together_are_refused() -> None:
    config = Config.parse(config_json("4B", fp8=True))
    published = Format.published(config)
    some = frozenset({"model.language_model.layers.3.self_attn.q_proj"})
    assert published.packing is not None
    mixed = replace(published, packing=published.packing._replace(modules=some))
    with pytest.raises(UnsupportedModel, match=r"q_proj.*some are FP8 and some are not"):
        Weights.allocate(config, Arena(Device("null"), None), bfloat16, mixed)


def test_boundaries_of_snapshots() -> None:
    kept = States(512, 2000)
    assert kept.snapshots(0, 2000, 2000) == [64, 128, 256, 512, 1024, 1536, 1984]
    assert kept.snapshots(512, 1024, 2000) == [1024]
    assert kept.snapshots(0, 64, 64) == []  # a hit leaves one token to compute
    assert kept.snapshots(0, 65, 65) == [64]
    assert kept.snapshots(1984, 2000, 2000) == []
    for prompt in range(1, 1300, 37):
        for start in range(0, prompt, 101):
            found = kept.snapshots(start, prompt, prompt)
            assert len(found) <= States(512, prompt - start).max_snapshots
            assert all(n % 64 == 0 and start < n < prompt for n in found)
