"""Qwen3.5 in torch, for training: gated delta net in chunks, gated attention, the MTP head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from layers import (
    Weights,
    attend,
    fused_any,
    looked_up,
    repeated,
    rms,
    rms_one,
    rope_table,
    rotate_halves,
    swiglu,
)
from torch import Tensor

EMBED = HEAD = "model.embed_tokens.weight"
MTP = True
CHUNK, SMALL = 64, 16


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden = c["hidden_size"]
    found: dict[str, tuple[int, ...]] = {EMBED: (c["vocab_size"], hidden)}
    for n, kind in enumerate(c["layer_types"]):
        found |= _layer(c, f"model.layers.{n}.", kind == "full_attention")
    found |= {"model.norm.weight": (hidden,), "mtp.fc.weight": (hidden, 2 * hidden)}
    found |= {
        f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    return found | _layer(c, "mtp.layers.0.", True)


def _layer(c: dict[str, Any], at: str, full: bool) -> dict[str, tuple[int, ...]]:
    hidden, inter, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    conv, heads = (
        2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values,
        c["linear_num_value_heads"],
    )
    mixer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if not full:
        mixer = {
            "linear_attn.in_proj_qkv.weight": (conv, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (conv, 1, c["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (c["linear_value_head_dim"],),
            "linear_attn.out_proj.weight": (hidden, values),
        }
    return {
        at + name: shape
        for name, shape in {
            "input_layernorm.weight": (hidden,),
            **mixer,
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "mlp.down_proj.weight": (hidden, inter),
        }.items()
    }


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms that multiply by 1 + w are zero, decays spread from slow to fast."""
    if name.endswith("A_log"):
        return torch.linspace(0.0, 2.0, shape[0])
    if name.endswith("dt_bias"):
        return torch.full(shape, -4.0)
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1 or name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        taps = torch.randn(shape, generator=generator) * 0.2
        taps[:, :, -1] += 1
        return taps
    std = 0.02 if name == EMBED else shape[1] ** -0.5
    return torch.randn(shape, generator=generator) * std


def hidden_states(w: Weights, c: dict[str, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Normed states [B, T, H] for ids [B, T], twice: the MTP head starts from the same."""
    x = looked_up(w["lookup"], ids, w[HEAD].dtype)
    rope = _rope(c, ids)
    for n, kind in enumerate(c["layer_types"]):
        x = _run(w, c, f"model.layers.{n}.", x, rope, kind == "full_attention")
    x = rms_one(x, w["model.norm.weight"], c["rms_norm_eps"])
    return x, x


def mtp_states(w: Weights, c: dict[str, Any], states: Tensor, following: Tensor) -> Tensor:
    """States of the MTP head [B, T, H] from the normed states and the ids that follow them."""
    eps = c["rms_norm_eps"]
    embedded = rms_one(
        looked_up(w["lookup"], following, w[HEAD].dtype), w["mtp.pre_fc_norm_embedding.weight"], eps
    )
    both = torch.cat([embedded, rms_one(states, w["mtp.pre_fc_norm_hidden.weight"], eps)], -1)
    x = _run(w, c, "mtp.layers.0.", F.linear(both, w["mtp.fc.weight"]), _rope(c, following), True)
    return rms_one(x, w["mtp.norm.weight"], eps)


def _rope(c: dict[str, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    rope = c["rope_parameters"]
    dim = int(c["head_dim"] * rope["partial_rotary_factor"])
    inverse = rope["rope_theta"] ** -(torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim)
    return rope_table(inverse, ids)


def _run(
    w: Weights, c: dict[str, Any], at: str, x: Tensor, rope: tuple[Tensor, Tensor], full: bool
) -> Tensor:
    eps = c["rms_norm_eps"]
    h = rms_one(x, w[at + "input_layernorm.weight"], eps)
    x = x + (
        _attention(w, c, at + "self_attn.", h, rope) if full else _delta_net(w, c, at + "linear_attn.", h)
    )
    h = rms_one(x, w[at + "post_attention_layernorm.weight"], eps)
    gate, up = (F.linear(h, w[at + f"mlp.{p}_proj.weight"]) for p in ("gate", "up"))
    return x + F.linear(swiglu(gate, up), w[at + "mlp.down_proj.weight"])


def _attention(w: Weights, c: dict[str, Any], at: str, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    q, gate = F.linear(h, w[at + "q_proj.weight"]).unflatten(-1, (-1, 2, dim)).unbind(-2)
    k, v = (F.linear(h, w[at + f"{p}_proj.weight"]).unflatten(-1, (-1, dim)) for p in "kv")
    q = rotate_halves(rms_one(q, w[at + "q_norm.weight"], eps), *rope)
    k = rotate_halves(rms_one(k, w[at + "k_norm.weight"], eps), *rope)
    return F.linear(_gated(attend(q, k, v), gate.flatten(2)), w[at + "o_proj.weight"])


@fused_any
def _gated(out: Tensor, gate: Tensor) -> Tensor:
    return out * torch.sigmoid(gate)


@fused_any
def _convolved(m: Tensor, taps: Tensor) -> Tensor:
    """silu of the causal convolution [B, T, C] with taps [C, 1, K]."""
    kernel, length = taps.shape[-1], m.shape[1]
    padded = F.pad(m, (0, 0, kernel - 1, 0)).float()
    total = sum(padded[:, tap : tap + length] * taps[:, 0, tap].float() for tap in range(kernel))
    return F.silu(total).to(m.dtype)


@fused_any
def _unit(x: Tensor) -> Tensor:
    y = x.float()
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)


@fused_any
def _decays(a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return -torch.exp(a_log) * F.softplus(a.float() + bias), torch.sigmoid(b.float())


def _delta_net(w: Weights, c: dict[str, Any], at: str, h: Tensor) -> Tensor:
    key_heads, heads, dim = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"]
    mixed = _convolved(F.linear(h, w[at + "in_proj_qkv.weight"]), w[at + "conv1d.weight"])
    q, k, v = mixed.split([key_heads * dim, key_heads * dim, heads * c["linear_value_head_dim"]], -1)
    q, k = (repeated(_unit(x.unflatten(-1, (-1, dim))), heads // key_heads) for x in (q, k))
    z, b, a = (F.linear(h, w[at + f"in_proj_{p}.weight"]) for p in "zba")
    g, beta = _decays(a, b, w[at + "A_log"], w[at + "dt_bias"])
    o = delta_rule(q * dim**-0.5, k, v.unflatten(-1, (heads, -1)).float(), g, beta).to(h.dtype)
    y = swiglu(z, rms(o, w[at + "norm.weight"], c["rms_norm_eps"]).flatten(2))
    return F.linear(y, w[at + "out_proj.weight"])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule of [B, T, heads, dim] float32 from an empty state, in chunks; T a multiple of CHUNK."""
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, heads, N, C, dim]
    g, beta = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    scaled = k * beta[..., None]
    inverse = _unit_lower_inverse((scaled @ k.transpose(-1, -2) * decay).tril(-1))
    u, wide = inverse @ (v * beta[..., None]), inverse @ (scaled * total.exp()[..., None])
    within = q @ k.transpose(-1, -2) * decay
    read, last = q * total.exp()[..., None], total[..., -1:]
    write = (k * (last - total).exp()[..., None]).transpose(-1, -2)
    kept = last.exp()[..., None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)
    out = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - wide[:, :, n] @ state
        out.append(read[:, :, n] @ state + within[:, :, n] @ new)
        state = kept[:, :, n] * state + write[:, :, n] @ new
    return torch.cat(out, 2).transpose(1, 2)


def _unit_lower_inverse(m: Tensor) -> Tensor:
    """(I + m)^-1 for strictly lower triangular m [..., CHUNK, CHUNK]: small blocks by their finite series, then pairs of
    blocks joined. (The series of a large block would cancel catastrophically.)"""
    count = CHUNK // SMALL
    blocks = m.unflatten(-1, (count, SMALL)).unflatten(-3, (count, SMALL))
    power = torch.stack([blocks[..., n, :, n, :] for n in range(count)], -3)
    eye = torch.eye(SMALL, device=m.device)
    inverse = eye - power
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (eye + power)
    size = SMALL
    while size < CHUNK:
        one, two = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = torch.stack(
            [m[..., at + size : at + 2 * size, at : at + size] for at in range(0, CHUNK, 2 * size)], -3
        )
        joined = -two @ below @ one
        top = torch.cat([one, torch.zeros_like(one)], -1)
        inverse = torch.cat([top, torch.cat([joined, two], -1)], -2)
        size *= 2
    return inverse[..., 0, :, :]
