"""config.json of DeepSeek-V3, Kimi-K2 and GLM-5: the published sizes, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v3 import RECIPE
from openinfer.recipes.deepseek_v3.config import Config, Indexing
from openinfer.recipes.deepseek_v3.published import config_json
from openinfer.recipes.deepseek_v3.weights import Weights, index_order
from openinfer.recipes.engine import Source, UnsupportedModel
from openinfer.recipes.engine.limits import decide
from openinfer.tensor import Arena, Device, bfloat16

V3, KIMI, V32 = (config_json(name) for name in ("DeepSeek-V3", "Kimi-K2", "DeepSeek-V3.2"))
GLM, GLM_FP8, NEXT_GLM = (config_json(name) for name in ("GLM-5", "GLM-5-FP8", "GLM-5.2-FP8"))


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


def test_published_choices_of_tokens() -> None:
    v32, glm, after = (Config.parse(raw) for raw in (V32, GLM, NEXT_GLM))
    assert v32.index == Indexing(64, 128, 2048, False, (True,) * 61)
    assert glm.index == Indexing(32, 128, 2048, True, (True,) * 78)
    assert (glm.scale, glm.rope_scale, glm.max_positions, glm.rms_norm_eps) == (256**-0.5, 1.0, 202752, 1e-5)
    assert (glm.groups, glm.dense_layers, glm.mtp, glm.eos_token_ids[0]) == (1, 3, True, 154820)
    assert after.index is not None
    full = [n for n, one in enumerate(after.index.layers) if one]
    assert full == [0, 1, *range(2, 78, 4)]
    assert after.index.chooses(78)  # the layer that drafts
    types = ["full" if n in full else "shared" for n in range(78)]
    for same in ({"indexer_types": types}, {"index_topk_pattern": "".join(one[0].upper() for one in types)}):
        assert Config.parse({**GLM, **same}).index == after.index
    newer = {
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    more = {
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "layer_types": ["indexed_attention"] * 78,
        "head_dim": 192,
    }
    again = Config.parse({**GLM, **newer, **more, "qk_head_dim": 256})
    assert (again.inv_freq == glm.inv_freq).all()


@pytest.mark.parametrize("pairs", [True, False])
def test_the_order_of_an_indexers_rows_changes_no_score(pairs: bool) -> None:
    """Pairs of V3.2 are of both halves, those of GLM-5 are (2i, 2i + 1); ours are the last numbers of a head."""
    rng, dim, rotary = np.random.default_rng(0), 32, 16
    q, k = rng.standard_normal((2, dim))
    turn = np.exp(1j * rng.uniform(0, 6, (2, rotary // 2)))

    def rotated(x: Any, n: int, first: Any, second: Any) -> Any:
        out, both = x.copy(), (x[first] + 1j * x[second]) * turn[n]
        out[first], out[second] = both.real, both.imag
        return out

    half = np.arange(rotary // 2)
    published = (2 * half, 2 * half + 1) if pairs else (half, half + rotary // 2)
    ours = (dim - rotary + 2 * half, dim - rotary + 2 * half + 1)
    order = index_order(Indexing(1, dim, 1, pairs, (True,)), rotary)
    assert sorted(order) == list(range(dim))
    want = rotated(q, 0, *published) @ rotated(k, 1, *published)
    assert rotated(q[order], 0, *ours) @ rotated(k[order], 1, *ours) == pytest.approx(want)
    assert abs(rotated(q, 0, *ours) @ rotated(k, 1, *ours) - want) > 0.1


def test_the_rows_of_an_indexer_come_in_blocks_of_scales() -> None:
    """FP8 codes and plain numbers change their places; scales stay, and a head over two blocks is refused."""
    for raw in (V32, GLM_FP8):
        weights = Weights.allocate(
            Config.parse({**raw, "num_hidden_layers": 4}), Arena(Device("null"), None), bfloat16
        )
        expected = weights.places.expected()
        heads, at = raw["index_n_heads"], "model.layers.3.self_attn.indexer."
        assert expected[at + "wq_b.weight"][0] == (heads * 128, raw["q_lora_rank"])
        assert [one.name for one in expected[at + "wk.weight"][1]] == ["float8_e4m3fn"]
        assert expected[at + "wk.weight_scale_inv"][0] == (1, raw["hidden_size"] // 128)
        assert expected[at + "k_norm.bias"][0] == (128,)
        assert "float32" in [one.name for one in expected[at + "weights_proj.weight"][1]]
    with pytest.raises(UnsupportedModel, match=r"indexer.wq_b: its scales are of parts of heads of 256 rows"):
        Weights.allocate(Config.parse({**V32, "index_head_dim": 256}), Arena(Device("null"), None), bfloat16)


@pytest.mark.parametrize(
    ("raw", "billions"),
    of_the_day([(V3, 671), (GLM, 744), (GLM_FP8, 744), (V32, 672), (KIMI, 1026), (NEXT_GLM, 743)], 2),
    ids=["V3", "GLM-5", "GLM-5-FP8", "V3.2", "Kimi-K2", "GLM-5.2"],
)  # fmt: skip
def test_published_sizes_have_their_parameters(raw: dict[str, Any], billions: int) -> None:
    weights = Weights.allocate(Config.parse(raw), Arena(Device("null"), None), bfloat16)
    expected = weights.places.expected()
    count = sum(math.prod(shape) for name, (shape, _) in expected.items() if not name.endswith("_scale_inv"))
    assert round(count / 1e9) == billions
    shape, dtypes = expected["model.layers.60.self_attn.kv_b_proj.weight"]
    heads = raw["num_attention_heads"]
    assert shape == (heads * (raw["qk_nope_head_dim"] + raw["v_head_dim"]), 512)
    packed = raw["quantization_config"] is not None
    assert ("float8_e4m3fn" in [one.name for one in dtypes]) == packed
    if packed:
        assert expected["model.layers.60.self_attn.kv_b_proj.weight_scale_inv"][0] == (shape[0] // 128, 4)
    assert expected["model.layers.60.mlp.gate.e_score_correction_bias"][0] == (raw["n_routed_experts"],)
    assert "model.layers.0.mlp.gate_proj.weight" in expected


def test_a_token_takes_1152_bytes_a_layer() -> None:
    options = RECIPE.options(device="cpu", dtype="bfloat16", max_model_len=4096)
    for ranks in (1, 8):  # each rank has all latents
        blueprint = RECIPE.blueprint(Source(V3), options, ranks=ranks)
        (group,) = blueprint.groups(decide(options, Device("cpu"), blueprint))
        assert group.block_bytes == 61 * 16 * 2 * 576
    for raw, layers, choosing in ((V32, 61, 61), (NEXT_GLM, 78, 21)):  # and the keys of indexers
        blueprint = RECIPE.blueprint(Source(raw), options)
        (group,) = blueprint.groups(decide(options, Device("cpu"), blueprint))
        assert group.block_bytes == 16 * 2 * (layers * 576 + choosing * 128)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2'; this recipe runs 'deepseek_v3' and 'kimi_k2'"),
        ({"index_topk": 2048}, "index_topk is 2048; every published model of this type has None"),
        ({"model_type": "deepseek_v32"}, "index_n_heads is None"),
        ({**V32, "index_topk": 0}, "index_topk is 0"),
        ({**V32, "index_head_dim": 96}, "index_head_dim is 96; it must be a power of two"),
        ({**V32, "index_head_dim": 32}, "index_head_dim is 32; it must be a power of two from 32 and qk_rope_head_dim"),
        ({**V32, "layer_types": ["full_attention"] * 61}, "layer_types is a list of 61; it must name indexed_"),
        ({**GLM, "index_topk_pattern": "S" + "F" * 77}, "the first layer shares the choice of the layer before"),
        ({**GLM, "index_topk_pattern": "F" * 77}, "index_topk_pattern is a list of 77"),
        ({**GLM, "indexer_types": ["half"] * 78}, "indexer_types is a list of 78; it must name full or shared"),
        ({**GLM, "mlp_layer_types": ["sparse"] * 78}, "first_k_dense_replace says that the first 3 are dense"),
        ({**GLM, "qk_head_dim": 192}, "qk_head_dim is 192"),
        ({**GLM, "rope_interleave": False}, "rope_interleave is False"),
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
