"""DeepSeek-V4 in torch, for training: every token against every key with masks, every expert for every token.

The indexer keeps all entries as long as index_topk is not smaller than their number, which the demo's sizes see to; its
weights are random and stay so.
"""

from __future__ import annotations

import math
from typing import Any

import sinkhorn
import torch
import torch.nn.functional as F
import window_softmax
from layers import ENABLED, Weights, fused, fused_any, looked_up, rms, rope_table
from torch import Tensor

EMBED, HEAD, MTP = "embed.weight", "head.weight", True
ROUNDING = {"activations": True}
"""Whether activations are rounded as the published code does while it runs."""


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint but scales and tid2eid, as if nothing were quantised."""
    hidden, found = c["hidden_size"], {EMBED: (c["vocab_size"], c["hidden_size"])}
    found |= {"norm.weight": (hidden,), "head.weight": (c["vocab_size"], hidden)} | _head(c, "")
    for n, ratio in enumerate(c["compress_ratios"]):
        at = "mtp.0." if n == c["num_hidden_layers"] else f"layers.{n}."
        found |= _layer(c, at, ratio, n < c["num_hash_layers"])
    found |= {f"mtp.0.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
    return (
        found
        | {f"mtp.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
        | _head(c, "mtp.0.")
    )


def _head(c: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    n = c["hc_mult"]
    return {
        at + "hc_head_fn": (n, n * c["hidden_size"]),
        at + "hc_head_base": (n,),
        at + "hc_head_scale": (1,),
    }


def _layer(c: dict[str, Any], at: str, ratio: int, hashed: bool) -> dict[str, tuple[int, ...]]:
    hidden, inter, dim, n = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"], c["hc_mult"]
    heads, q, groups = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"]
    found: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn.attn_sink": (heads,),
        "attn.wq_a.weight": (q, hidden),
        "attn.q_norm.weight": (q,),
        "attn.wq_b.weight": (heads * dim, q),
        "attn.wkv.weight": (dim, hidden),
        "attn.kv_norm.weight": (dim,),
        "attn.wo_a.weight": (groups * c["o_lora_rank"], heads * dim // groups),
        "attn.wo_b.weight": (hidden, groups * c["o_lora_rank"]),
        "ffn.gate.weight": (c["n_routed_experts"], hidden),
    }
    for part in ("attn", "ffn"):
        found |= {
            f"hc_{part}_fn": ((2 + n) * n, n * hidden),
            f"hc_{part}_base": ((2 + n) * n,),
            f"hc_{part}_scale": (3,),
        }
    if ratio:
        found |= _compressor(hidden, ratio, dim, "attn.compressor.")
    if ratio == 4:
        found |= _compressor(hidden, ratio, c["index_head_dim"], "attn.indexer.compressor.")
        found["attn.indexer.wq_b.weight"] = (c["index_n_heads"] * c["index_head_dim"], q)
        found["attn.indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
    if not hashed:
        found["ffn.gate.bias"] = (c["n_routed_experts"],)
    for expert in [f"experts.{e}" for e in range(c["n_routed_experts"])] + ["shared_experts"]:
        found |= {
            f"ffn.{expert}.{w}.weight": (hidden, inter) if w == "w2" else (inter, hidden)
            for w in ("w1", "w2", "w3")
        }
    return {at + name: shape for name, shape in found.items()}


def _compressor(hidden: int, ratio: int, dim: int, at: str) -> dict[str, tuple[int, ...]]:
    wide = 2 * dim if ratio == 4 else dim
    return {
        at + "wkv.weight": (wide, hidden),
        at + "wgate.weight": (wide, hidden),
        at + "ape": (ratio, wide),
        at + "norm.weight": (dim,),
    }


def format_of(name: str) -> str:
    """fp4, fp8, f32 or bf16: how the checkpoint stores a tensor."""
    leaf = name.rpartition("layers.")[2]
    if ".experts." in leaf:
        return "fp4"
    if leaf.endswith(("attn_sink", "ape", "gate.bias")) or ".hc_" in f".{leaf}":
        return "f32"
    fp8 = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "e_proj", "h_proj")
    module = leaf.removesuffix(".weight")
    return "fp8" if module.endswith(fp8) or ".shared_experts." in leaf else "bf16"


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Streams begin nearly alike, each a little different; their mixing begins near the identity."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("hc_head_base"):
        return -1.1 + 0.5 * noise
    if name.endswith("_base"):
        base = 0.3 * noise
        base[:4] -= 1.1
        base[8:] += 3 * torch.eye(4).flatten()
        return base
    if name.endswith("_scale"):
        return torch.full(shape, 0.5)
    if name.endswith("_fn"):
        return noise * 0.5 * shape[1] ** -0.5
    if name.endswith("ape"):
        return 0.1 * noise
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    if name.endswith(("wo_b.weight", "w2.weight")):
        return noise * 0.1 * shape[1] ** -0.5
    return noise * (0.02 if name == HEAD else 0.5 if name == EMBED else shape[1] ** -0.5)


def hash_table(c: dict[str, Any]) -> Tensor:
    """tid2eid int64 [V, k]: which experts a token's id leads to in hash layers."""
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(c["vocab_size"], c["n_routed_experts"], generator=generator).argsort(1)
    return order[:, : c["num_experts_per_tok"]].contiguous()


def hidden_states(w: Weights, c: dict[str, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Normed states [B, T, D] and streams [B, T, 4, D] for ids [B, T]."""
    x = looked_up(w["lookup"], ids, w[HEAD].dtype)[:, :, None].expand(-1, -1, c["hc_mult"], -1)
    for n in range(c["num_hidden_layers"]):
        x = _run(w, c, f"layers.{n}.", x, ids, c["compress_ratios"][n])
    return _collapse(w, c, "", x), x


def mtp_states(w: Weights, c: dict[str, Any], streams: Tensor, following: Tensor) -> Tensor:
    """States of the MTP layer [B, T, D] from the streams and the ids that follow them."""
    eps = c["rms_norm_eps"]
    e = _linear(
        rms(looked_up(w["lookup"], following, w[HEAD].dtype), w["mtp.0.enorm.weight"], eps),
        w["mtp.0.e_proj.weight"],
    )
    h = _linear(rms(streams, w["mtp.0.hnorm.weight"], eps), w["mtp.0.h_proj.weight"])
    return _collapse(w, c, "mtp.0.", _run(w, c, "mtp.0.", e[:, :, None] + h, following, 0))


def rounded_activations(x: Tensor, block: int) -> Tensor:
    """The published run-time rounding: each `block` features to e4m3 with a power of two; the gradient passes."""
    if not ROUNDING["activations"]:
        return x
    return _rounded(x.reshape(-1, x.shape[-1]), block).view(x.shape)


@fused
def _rounded(x: Tensor, block: int) -> Tensor:
    y = x.detach().float().unflatten(-1, (-1, block))
    scale = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    rounded = (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return x + (rounded.flatten(-2).to(x.dtype) - x).detach()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """A product whose inputs are rounded as the published code does."""
    return F.linear(rounded_activations(x, min(128, x.shape[-1])), weight)


def _mixing(m: Tensor, scale: Tensor, base: Tensor, eps: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """pre [N, 4], post [N, 4] and the doubly stochastic comb [N, 4, 4] from 24 numbers a token."""
    pre, post, logits = _mixing_logits(m, scale, base, eps)
    return pre, post, (sinkhorn.Sinkhorn.apply if ENABLED["fuse"] else sinkhorn.plain)(logits, eps, rounds)


@fused
def _mixing_logits(m: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    pre = torch.sigmoid(m[..., :4] * scale[0] + base[:4]) + eps
    post = 2 * torch.sigmoid(m[..., 4:8] * scale[1] + base[4:8])
    return pre, post, (m[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))


@fused
def _weighted(x: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * x.float()).sum(-2).to(x.dtype)


@fused
def _mixed_back(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    carried = (comb[..., None] * x.float()[..., :, None, :]).sum(-3)
    return (post[..., None] * y.float()[..., None, :] + carried).to(x.dtype)


@fused
def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _project_streams(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Few numbers a token from its streams [N, 4, D], float32."""
    flat = x.flatten(1)
    return F.linear(flat.float(), fn) * _inverse_rms(flat, eps)


def _collapse(w: Weights, c: dict[str, Any], at: str, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    m = _project_streams(rows, w[at + "hc_head_fn"], c["rms_norm_eps"])
    pre = torch.sigmoid(m * w[at + "hc_head_scale"] + w[at + "hc_head_base"]) + c["hc_eps"]
    return rms(_weighted(rows, pre), w[at + "norm.weight"], c["rms_norm_eps"]).unflatten(0, x.shape[:2])


def _run(w: Weights, c: dict[str, Any], at: str, x: Tensor, ids: Tensor, ratio: int) -> Tensor:
    eps, shape = c["rms_norm_eps"], x.shape[:2]
    rows = x.flatten(0, 1)
    for part in ("attn", "ffn"):
        m = _project_streams(rows, w[at + f"hc_{part}_fn"], eps)
        pre, post, comb = _mixing(
            m, w[at + f"hc_{part}_scale"], w[at + f"hc_{part}_base"], c["hc_eps"], c["hc_sinkhorn_iters"]
        )
        h = rms(_weighted(rows, pre), w[at + f"{part}_norm.weight"], eps).unflatten(0, shape)
        y = (
            _attention(w, c, at + "attn.", h, ratio)
            if part == "attn"
            else _experts(w, c, at + "ffn.", h, ids)
        )
        rows = _mixed_back(rows, y.flatten(0, 1), post, comb)
    return rows.unflatten(0, shape)


def _frequencies(c: dict[str, Any], ratio: int, device: torch.device) -> Tensor:
    """Of 32 pairs: plain without compression, YaRN with it."""
    dim, base = c["qk_rope_head_dim"], float(c["compress_rope_theta"] if ratio else c["rope_theta"])
    plain = base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if not ratio:
        return plain
    s = c["rope_scaling"]
    low, high = (
        dim * math.log(s["original_max_position_embeddings"] / (s[beta] * 2 * math.pi)) / (2 * math.log(base))
        for beta in ("beta_fast", "beta_slow")
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, device=device) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / s["factor"] * ramp


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels of x [B, T, ..., dim] in interleaved pairs, by cos and sin [B * T, pairs]."""
    return _rotate_pairs(x.reshape(cos.shape[0], -1, x.shape[-1]), cos, sin).view(x.shape)


@fused
def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    y = x[..., -2 * pairs :].float().unflatten(-1, (-1, 2))
    one, two, cos, sin = y[..., 0], y[..., 1], cos[:, None], sin[:, None]
    turned = torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
    return torch.cat([x[..., : -2 * pairs], turned.to(x.dtype)], -1)


def _attention(w: Weights, c: dict[str, Any], at: str, h: Tensor, ratio: int) -> Tensor:
    dim, eps, heads, length = c["head_dim"], c["rms_norm_eps"], c["num_attention_heads"], h.shape[1]
    frequencies = _frequencies(c, ratio, h.device)
    cos, sin = rope_table(frequencies, h[..., 0])
    qr = rms(_linear(h, w[at + "wq_a.weight"]), w[at + "q_norm.weight"], eps)
    q = _linear(qr, w[at + "wq_b.weight"]).unflatten(-1, (heads, dim))
    q = rotate_pairs(rms(q, torch.ones(dim, device=h.device), eps), cos, sin)
    keys = _stored(
        rotate_pairs(rms(_linear(h, w[at + "wkv.weight"]), w[at + "kv_norm.weight"], eps), cos, sin)
    )
    entries = None
    if ratio and length >= ratio:
        found = _entries(w, c, at + "compressor.", h, ratio)
        firsts = torch.arange(found.shape[1], device=h.device) * ratio
        at_first = (x.unflatten(0, (-1, length))[:, firsts].flatten(0, 1) for x in (cos, sin))
        entries = _stored(rotate_pairs(found, *at_first))
    o = _attended(q, keys, entries, w[at + "attn_sink"], ratio)
    o = rotate_pairs(o, cos, -sin)
    groups = c["o_groups"]
    wide = o.flatten(2).unflatten(-1, (groups, -1))
    narrow = torch.einsum("btgk,grk->btgr", wide, w[at + "wo_a.weight"].unflatten(0, (groups, -1)))
    return _linear(narrow.flatten(2), w[at + "wo_b.weight"])


def _attended(q: Tensor, keys: Tensor, entries: Tensor | None, sinks: Tensor, ratio: int) -> Tensor:
    """q [B, T, A, d] over keys [B, T, d] of the window and entries [B, N, d], which are the values too. Blocks of queries
    see three blocks of raw keys, so T is a multiple of 64."""
    shape, block = q.shape, window_softmax.BLOCK
    blocks = F.pad(keys, (0, 0, window_softmax.WINDOW, 0)).unflatten(1, (-1, block))
    near = torch.cat([blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], 2)  # [B, T / 64, 192, d]
    by_block = q.unflatten(1, (-1, block)).flatten(2, 3)  # [B, T / 64, 64 * A, d]
    scores = (by_block @ near.transpose(-1, -2)).view(*shape[:3], -1)
    if entries is not None:
        far = (q.flatten(1, 2) @ entries.transpose(1, 2)).view(*shape[:3], -1)
        scores = torch.cat([scores, far], -1)
    softmax = window_softmax.WindowSoftmax.apply if ENABLED["fuse"] else window_softmax.plain
    p = softmax(scores, sinks, shape[-1] ** -0.5, ratio)
    raw = p[..., : window_softmax.SPAN].unflatten(1, (-1, block)).flatten(2, 3)
    out = (raw @ near).view(shape)
    if entries is not None:
        out = out + (p[..., window_softmax.SPAN :].flatten(1, 2) @ entries).view(shape)
    return out


def _stored(keys: Tensor) -> Tensor:
    """What the cache keeps: all but the rotated channels are rounded to e4m3, 64 at a time."""
    return torch.cat([rounded_activations(keys[..., :-64], 64), keys[..., -64:]], -1)


def _entries(w: Weights, c: dict[str, Any], at: str, h: Tensor, ratio: int) -> Tensor:
    """Compressed entries [B, T // ratio, d] before their rotation."""
    count = h.shape[1] // ratio
    windows = h[:, : count * ratio]
    a, z = (F.linear(windows, w[at + f"{p}.weight"]).unflatten(1, (count, ratio)) for p in ("wkv", "wgate"))
    return rms(_pooled(a, z, w[at + "ape"], ratio == 4), w[at + "norm.weight"], c["rms_norm_eps"])


@fused_any
def _pooled(a: Tensor, z: Tensor, ape: Tensor, overlap: bool) -> Tensor:
    """Each channel's softmax over the window's tokens (with overlap: and the other half of the window before)."""
    wide, weights = a.float(), z.float() + ape
    if overlap:
        half = wide.shape[-1] // 2
        before = F.pad(wide[:, :-1, :, :half], (0, 0, 0, 0, 1, 0))
        scores = F.pad(weights[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=-1e30)
        wide = torch.cat([before, wide[..., half:]], 2)
        weights = torch.cat([scores, weights[..., half:]], 2)
    return (weights.softmax(2) * wide).sum(2).to(a.dtype)


def _experts(w: Weights, c: dict[str, Any], at: str, h: Tensor, ids: Tensor) -> Tensor:
    """All experts as one wide layer, in which a token's weight is zero for those it does not go to."""
    count, limit = c["n_routed_experts"], c["swiglu_limit"]
    scores = torch.sqrt(F.softplus(F.linear(h, w[at + "gate.weight"]).float().clamp(min=-30)))
    if at + "gate.tid2eid" in w:
        chosen = w[at + "gate.tid2eid"][ids]
    else:
        chosen = (scores.detach() + w[at + "gate.bias"]).topk(c["num_experts_per_tok"], -1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    if at + "gate.load" in w:
        w[at + "gate.load"].add_(mask.detach().sum((0, 1)))
    weights = scores * mask
    weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
    names = [f"experts.{e}" for e in range(count)]
    stacked = {
        p: torch.cat([w[f"{at}{n}.{p}.weight"] for n in names], int(p == "w2")) for p in ("w1", "w2", "w3")
    }
    x = rounded_activations(h, min(128, h.shape[-1]))
    hidden = _clamped(F.linear(x, stacked["w1"]), F.linear(x, stacked["w3"]), weights, limit)
    shared = at + "shared_experts."
    one = torch.ones_like(weights[..., :1])
    own = _clamped(F.linear(x, w[shared + "w1.weight"]), F.linear(x, w[shared + "w3.weight"]), one, limit)
    return _linear(hidden, stacked["w2"]) + _linear(own, w[shared + "w2.weight"])


def _clamped(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """SwiGLU of [B, T, experts * I] with its limits, times the experts' weights [B, T, experts]."""
    rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up, weights))
    return _clamped_rows(*rows, limit).view(gate.shape)


@fused
def _clamped_rows(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    y = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (y.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]).flatten(-2).to(gate.dtype)
