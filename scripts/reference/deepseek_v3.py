"""DeepSeek-V3, V3.2, Kimi-K2 and GLM-5, without the layer that drafts; give --layers for a model that a GPU holds.

With --quantize fp8 the weights are quantised by the published scheme, and the reference runs on their values. Scores of
an indexer are float32 of all heads at once, 17 GB for the longest prompt of V3.2: --longest 4096 leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import common
import qwen3_5
import torch
from common import Random

from openinfer.recipes.deepseek_v3.published import config_json

TINY = {
    "hidden_size": 256, "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "vocab_size": 1024,
}  # fmt: skip
SHAPES = {
    "tiny": {**config_json("DeepSeek-V3"), **TINY},
    "tiny-v3.2": {**config_json("DeepSeek-V3.2"), **TINY, "index_n_heads": 16, "index_topk": 512},
    "v3": config_json("DeepSeek-V3"),
    "v3.2": config_json("DeepSeek-V3.2"),
    "kimi-k2": config_json("Kimi-K2"),
    "glm-5": config_json("GLM-5"),
}
FORMS = ("fp8",)
shards, reference = common.halves, common.reference
LENGTHS = (1, 5, 64, 129, 300, 1000, 2048, 4096, 8192)
"""Prompt lengths; FORCED more tokens follow each. An indexer chooses 2,048 tokens."""
NEVER_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def config_of(shape: str, layers: int | None) -> dict[str, Any]:
    """config.json."""
    config = {**SHAPES[shape], "num_nextn_predict_layers": 0, "dtype": "bfloat16"}
    del config["quantization_config"]
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    kind = config["model_type"].replace("kimi_k2", "deepseek_v3")  # transformers has no kimi_k2
    return {**config, "model_type": kind, "architectures": [ARCHITECTURES[kind]]}


def random_weights(c: dict[str, Any], device: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by the names that transformers has; the head is scaled for logits of standard deviation 2.5."""
    r, h = Random(device, seed), c["hidden_size"]
    std = common.LOGIT_STD / math.sqrt(h)
    weights = {"model.embed_tokens.weight": r.normal(c["vocab_size"], h, std=std)}
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = r.normal(h, std=0.1, mean=1.0)
        for name, tensor in (*attention(r, c), *mlp(r, c, dense=n < c["first_k_dense_replace"])):
            # Later layers add less, as in trained models: with equal shares bf16's errors pile up over the layers.
            outputs = "o_proj" in name or "down_proj" in name
            weights[at + name] = tensor / (1 + n / 2) if outputs else tensor
    weights["model.norm.weight"] = r.normal(h, std=0.1, mean=1.0)
    weights["lm_head.weight"] = r.normal(c["vocab_size"], h, std=std)
    return weights


def attention(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, heads, q, latent = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    plain, rotary, value, at = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], "self_attn."
    yield at + "q_a_proj.weight", r.linear(q, h)
    yield at + "q_a_layernorm.weight", r.normal(q, std=0.1, mean=1.0)
    # Where tokens are chosen, heads see them much alike, so one that bf16 lets in for another counts little.
    gain = 1.0 if c.get("index_topk") is None else 0.5
    yield at + "q_b_proj.weight", r.linear(heads * (plain + rotary), q, gain=gain)
    yield at + "kv_a_proj_with_mqa.weight", r.linear(latent + rotary, h)
    yield at + "kv_a_layernorm.weight", r.normal(latent, std=0.1, mean=1.0)
    yield at + "kv_b_proj.weight", r.linear(heads * (plain + value), latent)
    yield at + "o_proj.weight", uneven(r, r.linear(h, heads * value, gain=3.0))
    if c.get("index_topk") is not None:
        dim, at = c["index_head_dim"], at + "indexer."
        yield at + "wq_b.weight", r.linear(c["index_n_heads"] * dim, q)
        yield at + "wk.weight", r.linear(dim, h)
        yield at + "k_norm.weight", r.normal(dim, std=0.1, mean=1.0)
        yield at + "k_norm.bias", r.normal(dim, std=0.1)
        yield at + "weights_proj.weight", r.linear(c["index_n_heads"], h)


def uneven(r: Random, weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 x 128 times 1/2, 1 or 2: alike, their scales would all be the same power of two."""
    blocks = [-(-size // 128) for size in weight.shape]
    factor = torch.exp2(torch.randint(-1, 2, blocks, generator=r.generator, device=r.device))
    wide = factor.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.mul_(wide[: weight.shape[0], : weight.shape[1]])


def mlp(r: Random, c: dict[str, Any], *, dense: bool) -> Iterator[tuple[str, torch.Tensor]]:
    h, width, at = c["hidden_size"], c["intermediate_size"], "mlp."
    if not dense:
        experts, inter, at = c["n_routed_experts"], c["moe_intermediate_size"], "mlp.shared_experts."
        width = inter * c["n_shared_experts"]
        # A sigmoid gives all chosen experts much the same weight, so one that bf16 lets in for another counts: experts
        # add little (their weights' sum is routed_scaling_factor), so that runs can be compared.
        yield "mlp.gate.weight", r.linear(experts, h, gain=2.0)
        yield "mlp.gate.e_score_correction_bias", r.normal(experts, std=0.1).float()
        yield "mlp.experts.gate_up_proj", r.linear(experts, 2 * inter, h)
        yield "mlp.experts.down_proj", r.linear(experts, h, inter, gain=0.6)
    yield at + "gate_proj.weight", r.linear(width, h)
    yield at + "up_proj.weight", r.linear(width, h)
    yield at + "down_proj.weight", r.linear(h, width, gain=2.0)


def quantized(
    config: dict[str, Any], weights: Mapping[str, torch.Tensor], form: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The config and the tensors of a block-scaled checkpoint, and what these mean."""
    return qwen3_5.quantized(config, weights, form, NEVER_FP8, powers=True)


def token_range(config: Mapping[str, Any]) -> tuple[int, int]:
    return 0, min(config["vocab_size"], 128000)
