"""Qwen3: a checkpoint in bf16, two shards and an index.

With --quantize nvfp4 or int8 the layers' weights are quantised as compressed-tensors does: FP4 with an e4m3 scale for
each 16 values and a scale of the tensor, or INT8 with a scale a row. Rows are made to differ in size first, as trained
ones do, or the scales of other rows would do as well. The reference runs on the values of these weights, and rounds no
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
import numpy as np
import torch
from transformers.integrations import sdpa_attention

from openinfer.recipes.qwen3.published import SIZES

SHAPES = {"tiny": (256, 4, 4, 384, True)} | {name.lower(): sizes for name, sizes in SIZES.items()}
FORMS = ("nvfp4", "int8")
shards = common.halves
LENGTHS = (1, 5, 64, 129, 300, 1000, 2048, 4200)
"""Prompt lengths; FORCED more tokens follow each."""
LONG_LENGTHS = (16384, 40960 - common.FORCED)


def config_of(shape: str, layers: int | None) -> dict[str, Any]:
    """config.json."""
    hidden, num_layers, heads, intermediate, tied = SHAPES[shape]
    tiny = shape == "tiny"
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1024 if tiny else 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers or num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if tiny else 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 2 if tiny else 151645,
        "dtype": "bfloat16",
    }


def token_range(config: Mapping[str, Any]) -> tuple[int, int]:
    return 0, min(config["vocab_size"], 151000)


def random_weights(c: Mapping[str, Any], device: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by published name. Norm weights vary around 1; the head is scaled for logits of LOGIT_STD."""
    r, h, i, d = common.Random(device, seed), c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    head_std = common.LOGIT_STD / h**0.5

    def norm(size: int) -> torch.Tensor:
        return r.normal(size, std=0.1, mean=1.0)

    weights = {"model.embed_tokens.weight": r.normal(c["vocab_size"], h, std=head_std)}
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        weights |= {
            at + "input_layernorm.weight": norm(h),
            at + "self_attn.q_proj.weight": r.linear(q, h),
            at + "self_attn.k_proj.weight": r.linear(kv, h),
            at + "self_attn.v_proj.weight": r.linear(kv, h),
            at + "self_attn.q_norm.weight": norm(d),
            at + "self_attn.k_norm.weight": norm(d),
            at + "self_attn.o_proj.weight": r.linear(h, q, gain=2.0),
            at + "post_attention_layernorm.weight": norm(h),
            at + "mlp.gate_proj.weight": r.linear(i, h),
            at + "mlp.up_proj.weight": r.linear(i, h),
            at + "mlp.down_proj.weight": r.linear(h, i, gain=2.0),
        }
    weights["model.norm.weight"] = norm(h)
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = r.normal(c["vocab_size"], h, std=head_std)
    return weights


def quantized(
    config: dict[str, Any], weights: Mapping[str, torch.Tensor], form: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The config and the tensors of a packed checkpoint, and what these mean, in float32."""
    small, same = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in weights.items():
        if not name.endswith("proj.weight"):
            small[name] = same[name] = weight
            continue
        sizes = 2.0 ** (torch.arange(len(weight), device=weight.device) % 3 - 1)
        sizes /= sizes.square().mean().sqrt()
        parts, same[name] = (nvfp4 if form == "nvfp4" else int8)(weight.float() * sizes[:, None])
        small |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    of = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    of = of if form == "nvfp4" else {"num_bits": 8, "type": "int", "strategy": "channel"}
    spelled = "nvfp4-pack-quantized" if form == "nvfp4" else "int-quantized"
    group = {"targets": ["Linear"], "format": spelled, "weights": {**of, "symmetric": True, "dynamic": False}}
    scheme = {"quant_method": "compressed-tensors", "format": spelled, "config_groups": {"group_0": group}}
    return {**config, "quantization_config": {**scheme, "ignore": ["lm_head"]}}, small, same


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of an NVFP4 weight [N, K], and its values."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    blocks = weight.unflatten(1, (-1, 16))
    whole = 448 * 6 / weight.abs().amax()
    scales = (blocks.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    unit = (scales.float() / whole)[..., None]
    codes = torch.bucketize((blocks / unit).abs(), (sizes[1:] + sizes[:-1]) / 2)
    values = (sizes[codes] * blocks.sign() * unit).flatten(1)
    codes = (codes + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole[None]}, values


def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of an INT8 weight [N, K], and its values."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def reference(
    config: Mapping[str, Any], weights: dict[str, torch.Tensor], sequences: Sequence[list[int]], device: str,
    note: Callable[[str], None],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of reference.npz for these weights."""
    # With heads repeated there is a float32 kernel that does not write a 40,960 x 40,960 matrix of scores.
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    return common.reference(config, weights, sequences, device, note)
