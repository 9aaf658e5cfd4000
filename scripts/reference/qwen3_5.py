"""Qwen3.5's text model: a flat config, two shards and an index.

With --quantize fp8 the weights are quantised by the published scheme: e4m3, and a BF16 scale for each block of
128 x 128. The reference then runs on the values of these weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import common
import torch
from common import Random

from openinfer.recipes.qwen3_5.published import SIZES

SHAPES = {
    "tiny": (256, 4, 4, 2, 32, 384, True),
    "tiny-moe": (256, 4, 4, 2, 32, (16, 4, 128), False),
    **{name.lower(): sizes for name, sizes in SIZES.items()},
}
FORMS = ("fp8",)
shards, reference = common.halves, common.reference
LENGTHS = (1, 5, 64, 129, 300, 1000, 2048, 8192)
"""Prompt lengths; FORCED more tokens follow each."""
NEVER_FP8 = (
    "embed_tokens",
    "lm_head",
    "norm",
    "conv1d",
    "A_log",
    "dt_bias",
    "in_proj_a",
    "in_proj_b",
    "mlp.gate.",
)
NEVER_FP8 += ("shared_expert_gate",)
OUTPUTS = ("o_proj", "out_proj", "down_proj")
"""The projections whose outputs are added to the residual stream."""


def config_of(shape: str, layers: int | None) -> dict[str, Any]:
    """config.json of the text model."""
    hidden, num_layers, heads, kv_heads, value_heads, mlp, tied = SHAPES[shape]
    tiny = shape.startswith("tiny")
    num_layers = layers or num_layers
    raw = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 1024 if tiny else 248320,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": tied,
        "eos_token_id": 2 if tiny else 248046,
        "dtype": "bfloat16",
    }
    if isinstance(mlp, int):
        return raw | {"intermediate_size": mlp}
    experts, chosen, width = mlp
    return raw | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


def random_weights(c: dict[str, Any], device: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by published name, in the published dtypes; the head is scaled for logits of standard deviation 2.5."""
    r, h = Random(device, seed), c["hidden_size"]
    head_std = common.LOGIT_STD / math.sqrt(h)
    weights = {"model.embed_tokens.weight": r.normal(c["vocab_size"], h, std=head_std)}
    for n, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{n}."
        weights[at + "input_layernorm.weight"] = r.normal(h, std=0.1)  # applied as 1 + w
        weights[at + "post_attention_layernorm.weight"] = r.normal(h, std=0.1)
        mixer = attention(r, c) if kind == "full_attention" else delta_net(r, c)
        for name, tensor in (*mixer, *mlp(r, c)):
            # Later layers add less, as in trained models: with equal shares bf16's errors pile up over the layers.
            weights[at + name] = tensor / (1 + n / 2) if any(part in name for part in OUTPUTS) else tensor
    weights["model.norm.weight"] = r.normal(h, std=0.1)
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = r.normal(c["vocab_size"], h, std=head_std)
    return weights


def attention(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, d, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    yield "self_attn.q_proj.weight", r.linear(2 * heads * d, h)
    yield "self_attn.k_proj.weight", r.linear(kv * d, h)
    yield "self_attn.v_proj.weight", r.linear(kv * d, h)
    # Applied as 1 + w: scores with a standard deviation of 2, so that what is attended to matters, as it does in
    # trained models. With 1, attention over random tokens is nearly their mean, and hardly notices what is missing.
    yield "self_attn.q_norm.weight", r.normal(d, std=0.1, mean=1.0)
    yield "self_attn.k_norm.weight", r.normal(d, std=0.1)
    yield "self_attn.o_proj.weight", r.linear(h, heads * d, gain=4.0)


def delta_net(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, heads, taps = c["hidden_size"], c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    value = heads * c["linear_value_head_dim"]
    conv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + value
    yield "linear_attn.in_proj_qkv.weight", r.linear(conv, h)
    yield "linear_attn.in_proj_z.weight", r.linear(value, h)
    yield "linear_attn.in_proj_b.weight", r.linear(heads, h, gain=1.5)
    yield "linear_attn.in_proj_a.weight", r.linear(heads, h, gain=1.5)
    yield "linear_attn.conv1d.weight", r.normal(conv, 1, taps, std=0.6)
    # float32 in checkpoints; transformers rounds to bf16 when it loads as bf16, so they are bf16 numbers.
    yield "linear_attn.A_log", r.uniform(heads, math.log(0.3), math.log(6.0)).float()
    yield "linear_attn.dt_bias", r.uniform(heads, -5.0, -1.0)
    yield "linear_attn.norm.weight", r.normal(c["linear_value_head_dim"], std=0.2, mean=1.0).float()
    yield "linear_attn.out_proj.weight", r.linear(h, value, gain=1.6)


def mlp(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, width = c["hidden_size"], c.get("intermediate_size", c.get("shared_expert_intermediate_size"))
    at = "mlp."
    if "num_experts" in c:
        experts, inter, at = c["num_experts"], c["moe_intermediate_size"], "mlp.shared_expert."
        # Decided routers: an expert that bf16 lets in for another has a small weight, so that runs can be compared.
        yield "mlp.gate.weight", r.linear(experts, h, gain=6.0)
        yield "mlp.experts.gate_up_proj", r.linear(experts, 2 * inter, h)
        yield "mlp.experts.down_proj", r.linear(experts, h, inter, gain=2.0)
        yield "mlp.shared_expert_gate.weight", r.linear(1, h)
    yield at + "gate_proj.weight", r.linear(width, h)
    yield at + "up_proj.weight", r.linear(width, h)
    yield at + "down_proj.weight", r.linear(h, width, gain=2.0)


def quantize(weight: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as e4m3 values and BF16 scales, one for each block of 128 x 128; powers: of two."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    scales = (torch.exp2(scales.log2().ceil()) if powers else scales).to(torch.bfloat16)
    values = (blocks / scales.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous(), scales


def meant(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of a weight after quantize(), in float32: bf16 holds them where scales are powers of two."""
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def quantized(
    config: dict[str, Any], weights: Mapping[str, torch.Tensor], form: str, never: Sequence[str] = NEVER_FP8,
    powers: bool = False,
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """The config and the tensors of a block-scaled checkpoint, on the host, and what these mean. never: parts of names
    that stay. powers: scales are powers of two, as in later DeepSeeks, so that bf16 holds what they mean, and `weights`
    come to mean it: a GPU has no memory for both."""
    small, same = {}, {}
    for name, tensor in weights.items():
        if any(part in name for part in never):
            small[name] = same[name] = tensor
            continue
        parts = (
            experts_apart(name, tensor) if ".experts." in name else [(name.removesuffix(".weight"), tensor)]
        )
        same[name] = tensor if powers else torch.empty_like(tensor, dtype=torch.float32)
        views = experts_apart(name, same[name]) if ".experts." in name else [(name, same[name])]
        for (module, weight), (_, to) in zip(parts, views, strict=True):
            values, scales = quantize(weight, powers)
            small[module + ".weight"], small[module + ".weight_scale_inv"] = values.cpu(), scales.cpu()
            to.copy_(meant(values, scales))
    scheme = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        **({"scale_fmt": "ue8m0"} if powers else {}),
    }
    return {**config, "quantization_config": scheme}, small, same


def experts_apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    at, kind = name.rsplit(".", 1)
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            yield f"{at}.{expert}.down_proj", weight
        else:
            yield from zip(
                (f"{at}.{expert}.gate_proj", f"{at}.{expert}.up_proj"), weight.chunk(2), strict=True
            )


def token_range(config: Mapping[str, Any]) -> tuple[int, int]:
    return 0, min(config["vocab_size"], 248000)
