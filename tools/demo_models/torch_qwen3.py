"""Qwen3 in torch, for training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from layers import Weights, attend, looked_up, rms, rope_table, rotate_halves, swiglu
from torch import Tensor

EMBED, HEAD, MTP = "model.embed_tokens.weight", "model.embed_tokens.weight", False


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden, inter, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {EMBED: (c["vocab_size"], hidden)}
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        found |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.q_norm.weight": (dim,),
            at + "self_attn.k_norm.weight": (dim,),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
        }
    return found | {"model.norm.weight": (hidden,)}


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms are one; what adds to the residual stream begins at zero."""
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros(shape)
    std = 0.02 if name == EMBED else shape[1] ** -0.5
    return torch.randn(shape, generator=generator) * std


def hidden_states(w: Weights, c: dict[str, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Normed states [B, T, H] for ids [B, T], twice: this family has no other states for MTP."""
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    inverse = c["rope_theta"] ** -(torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim)
    cos, sin = rope_table(inverse, ids)
    x = looked_up(w["lookup"], ids, w[HEAD].dtype)
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        h = rms(x, w[at + "input_layernorm.weight"], eps)
        q, k, v = (F.linear(h, w[at + f"self_attn.{p}_proj.weight"]).unflatten(-1, (-1, dim)) for p in "qkv")
        q = rotate_halves(rms(q, w[at + "self_attn.q_norm.weight"], eps), cos, sin)
        k = rotate_halves(rms(k, w[at + "self_attn.k_norm.weight"], eps), cos, sin)
        x = x + F.linear(attend(q, k, v), w[at + "self_attn.o_proj.weight"])
        h = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(h, w[at + f"mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        x = x + F.linear(swiglu(gate, up), w[at + "mlp.down_proj.weight"])
    x = rms(x, w["model.norm.weight"], eps)
    return x, x
