"""config.json of DeepSeek-V3 and Kimi-K2: the published sizes, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openinfer.recipes.deepseek_v3 import RECIPE
from openinfer.recipes.deepseek_v3.config import Config
from openinfer.recipes.deepseek_v3.published import config_json
from openinfer.recipes.deepseek_v3.weights import Weights
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.recipes.engine.limits import decide
from openinfer.tensor import Arena, Device, bfloat16

V3, KIMI = config_json("DeepSeek-V3"), config_json("Kimi-K2")


def test_published_settings() -> None:
    v3, kimi = Config.parse(V3), Config.parse(KIMI)
    mscale = 0.1 * math.log(40) + 1
    assert v3.scale == pytest.approx(192**-0.5 * mscale**2)
    assert (v3.rope_scale, v3.max_positions, v3.latent_size, v3.mtp) == (1.0, 163840, 576, True)
    assert (v3.groups, v3.top_groups, v3.experts.count, v3.dense_layers) == (8, 4, 256, 3)
    assert kimi.scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    assert (kimi.groups, kimi.experts.count, kimi.dense_layers, kimi.mtp) == (1, 384, 1, False)
    assert (kimi.max_positions, kimi.routed_scaling_factor, kimi.eos_token_ids) == (131072, 2.827, (163585,))
    plain = Config.parse({**V3, "rope_scaling": None})
    assert plain.scale == 192**-0.5


@pytest.mark.parametrize(("raw", "billions"), [(V3, 671), (KIMI, 1026)], ids=["V3", "Kimi-K2"])
def test_published_sizes_have_their_parameters(raw: dict[str, Any], billions: int) -> None:
    weights = Weights.allocate(Config.parse(raw), Arena(Device("null"), None), bfloat16)
    expected = weights.places.expected()
    count = sum(math.prod(shape) for name, (shape, _) in expected.items() if not name.endswith("_scale_inv"))
    assert round(count / 1e9) == billions
    shape, dtypes = expected["model.layers.60.self_attn.kv_b_proj.weight"]
    heads = raw["num_attention_heads"]
    assert shape == (heads * 256, 512)
    assert [one.name for one in dtypes] == ["float8_e4m3fn"]
    assert expected["model.layers.60.self_attn.kv_b_proj.weight_scale_inv"][0] == (heads * 2, 4)
    assert expected["model.layers.60.mlp.gate.e_score_correction_bias"][0] == (raw["n_routed_experts"],)
    assert "model.layers.0.mlp.gate_proj.weight" in expected


def test_a_token_takes_1152_bytes_a_layer() -> None:
    options = RECIPE.options(device="cpu", dtype="bfloat16", max_model_len=4096)
    for ranks in (1, 8):  # each rank has all latents
        blueprint = RECIPE.blueprint(Source(V3), options, ranks=ranks)
        (group,) = blueprint.groups(decide(options, Device("cpu"), blueprint))
        assert group.block_bytes == 61 * 16 * 2 * 576


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'; this recipe runs 'deepseek_v3' and 'kimi_k2'"),
        ({"index_topk": 2048}, "index_topk is 2048; every published model has None"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; latents are of all heads"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"n_group": 7}, "num_experts_per_tok is 8, of 256 n_routed_experts in topk_group 4 of n_group 7"),
        ({"topk_group": 9}, "topk_group 9 of n_group 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"v_head_dim": 120}, "v_head_dim is 120; it must be a multiple of 16"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"rope_scaling": {**V3["rope_scaling"], "type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {**V3["rope_scaling"], "odd": 1}}, "no key 'odd'"),
        ({"rope_scaling": {**V3["rope_scaling"], "mscale": None}}, "mscale and mscale_all_dim must be given together"),
        ({"quantization_config": {**V3["quantization_config"], "scale_fmt": "fp4"}}, "scale_fmt is 'fp4'"),
        ({"quantization_config": {**V3["quantization_config"], "weight_block_size": [64, 64]}}, "weight_block_size"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        Config.parse({**V3, **change})
    assert complaint in str(refused.value)


def test_ranks_share_heads_and_experts() -> None:
    for ranks in (1, 2, 4, 8, 16):
        assert Config.parse(V3).of_rank(ranks - 1, ranks).part.of(128) == 128 // ranks
    with pytest.raises(UnsupportedModel, match="num_attention_heads is 128; 3 ranks cannot share it"):
        Config.parse(V3).of_rank(0, 3)
    with pytest.raises(UnsupportedModel, match="intermediate_size is 18432; 32 ranks cannot share it in"):
        Config.parse({**V3, "vocab_size": 131072}).of_rank(0, 32)  # blocks of FP8


def test_a_packing_of_keys_and_values_that_is_not_run_is_named() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    config = Config.parse({**V3, "quantization_config": packed, "num_hidden_layers": 3})
    with pytest.raises(UnsupportedModel, match=r"kv_b_proj is FP8.*; it may be plain, or FP8 in blocks of"):
        Weights.allocate(config, Arena(Device("null"), None), bfloat16)
