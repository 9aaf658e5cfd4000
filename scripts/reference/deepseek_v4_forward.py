"""DeepSeek-V4's forward pass in float32 with torch, from tensors by their published names: what
deepseek_v4.py compares with. Whole sequences, no cache, no rounding but, if asked for, that of the published
run-time quantisation. Needs torch, which no distribution of this project does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
QUERIES = 256
"""Queries that attention and the indexer take at a time."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def meant(
    weights: Mapping[str, Tensor], name: str, device: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of a tensor of the checkpoint: packed weights times their scales, exactly (also in bf16)."""
    tensor = weights[name].to(device)
    scale = weights.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
    if scale is None:
        return tensor if tensor.dtype == torch.int64 else tensor.to(dtype)
    scale = scale.to(device).to(dtype)
    if tensor.dtype == torch.int8:
        table = torch.tensor(FP4_VALUES, dtype=dtype, device=device)
        codes = tensor.view(torch.uint8)
        values = table[torch.stack([codes & 15, codes >> 4], -1).int()].reshape(tensor.shape[0], -1, 32)
        return (values * scale[..., None]).flatten(1)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return tensor.to(dtype) * wide[: tensor.shape[0], : tensor.shape[1]]


def power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2(x))."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def q8(x: Tensor, block: int = 128) -> Tensor:
    """Rounded to e4m3, `block` numbers with one scale."""
    parts = x.unflatten(-1, (-1, block))
    scale = power_of_two(parts.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    return ((parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(-2)


def q4(x: Tensor) -> Tensor:
    """Rounded to E2M1, of two equally near ones to the even code, 32 numbers with one scale."""
    parts = x.unflatten(-1, (-1, 32))
    scale = power_of_two(parts.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)
    size = (parts / scale).abs().clamp_max(6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.copysign((size / step).round() * step, parts) * scale).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """The normalised Walsh-Hadamard transform of the last axis."""
    size, half = x.shape[-1], 1
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x * size**-0.5


def frequencies(c: Mapping[str, Any], compressed: bool, device: str) -> Tensor:
    """The frequencies of the rotated pairs, float32. Layers with compressed entries have those of YaRN."""
    dim = c["qk_rope_head_dim"]
    theta = c["compress_rope_theta"] if compressed else c["rope_theta"]
    plain = 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if not compressed:
        return plain
    yarn = c["rope_scaling"]
    original = yarn["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn["beta_fast"])), 0)
    high = min(math.ceil(channel(yarn["beta_slow"])), dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / width).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def rotated(x: Tensor, positions: Tensor, freq: Tensor, sign: int = 1) -> Tensor:
    """x [T, ..., d] with its last channels rotated in pairs."""
    angle = positions.float()[:, None] * freq
    shape = (len(positions), *(1,) * (x.ndim - 2), len(freq))
    cos, sin = angle.cos().view(shape), sign * angle.sin().view(shape)
    even, odd = x[..., -2 * len(freq) :: 2], x[..., 1 - 2 * len(freq) :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., : -2 * len(freq)], turned], -1)


class Forward:
    """The model of a config and its tensors. `quantized`: with the published rounding of activations. stores: what
    activations are rounded to wherever an engine keeps them in memory. `chosen`: the experts of each layer since
    `runs` began, int64 [tokens, chosen]."""

    def __init__(
        self,
        c: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        device: str,
        quantized: bool,
        stores: torch.dtype = torch.float32,
    ) -> None:
        self.c, self.weights, self.device, self.quantized, self.stores = c, weights, device, quantized, stores
        self.freq = {compressed: frequencies(c, compressed, device) for compressed in (False, True)}
        self.chosen: list[Tensor] = []

    def weight(self, name: str) -> Tensor:
        return meant(self.weights, name, self.device)

    def kept(self, x: Tensor) -> Tensor:
        """Activations after a stay in memory."""
        return x.to(self.stores).float()

    def rounded(self, x: Tensor) -> Tensor:
        """The input of a product with packed weights."""
        return q8(x) if self.quantized else x

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(name + ".weight").T

    def norm(self, x: Tensor, name: str | None = None) -> Tensor:
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return unit if name is None else unit * self.weight(name + ".weight")

    def runs(
        self, sequences: Sequence[Sequence[int]], last: int
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """The results at the last positions of each sequence, on the host: logits [last, V], and each layer's experts
        [last, chosen]."""
        ids = torch.tensor([i for sequence in sequences for i in sequence], device=self.device)
        lengths = [len(sequence) for sequence in sequences]
        self.chosen.clear()
        streams = self.weight("embed.weight")[ids][:, None].repeat(1, self.c["hc_mult"], 1)
        for n in range(self.c["num_hidden_layers"]):
            streams = self.layer(n, streams, ids, lengths)
        ends = [torch.arange(end - last, end) for end in torch.tensor(lengths).cumsum(0).tolist()]
        at = torch.cat(ends).to(self.device)
        logits = self.product(self.norm(self.head(streams[at]), "norm"), "head")
        experts = (layer[at].cpu().split(last) for layer in self.chosen)
        yield from zip(logits.cpu().split(last), zip(*experts, strict=True), strict=True)

    def layer(self, n: int, streams: Tensor, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Streams of all sequences, one after the other, through one layer."""
        at = f"layers.{n}."
        x, post, comb = self.pre(streams, at + "hc_attn")
        x = self.kept(self.norm(x, at + "attn_norm"))
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        parts = [self.attention(n, x[s : s + t]) for s, t in zip(starts, lengths, strict=True)]
        streams = self.kept(self.post(streams, self.kept(torch.cat(parts)), post, comb))
        x, post, comb = self.pre(streams, at + "hc_ffn")
        y = self.mixture(n, self.kept(self.norm(x, at + "ffn_norm")), ids)
        return self.post(streams, self.kept(y), post, comb)

    def layers(self, tokens: Sequence[int], last: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each layer alone. Yields its input bf16 [T, n, D], which is what the layer before made; its output at the
        last positions, float32 [last, n, D]; and the same output by a run that stores activations in bf16."""
        ids = torch.tensor(tokens, device=self.device)
        stored = Forward(self.c, self.weights, self.device, self.quantized, torch.bfloat16)
        streams = self.weight("embed.weight")[ids][:, None].repeat(1, self.c["hc_mult"], 1)
        for n in range(self.c["num_hidden_layers"]):
            given = streams.to(torch.bfloat16)
            streams = self.layer(n, given.float(), ids, [len(ids)])
            yield given, streams[-last:], stored.layer(n, given.float(), ids, [len(ids)])[-last:]

    # Hyper-connections

    def numbers(self, streams: Tensor, fn: str) -> Tensor:
        return self.norm(streams.flatten(1)) @ self.weight(fn).T

    def pre(self, streams: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        scale, base = self.weight(at + "_scale"), self.weight(at + "_base")
        m = self.numbers(streams, at + "_fn") * scale.repeat_interleave(
            torch.tensor([n, n, n * n], device=self.device)
        )
        pre, post, comb = (m + base).split([n, n, n * n], -1)
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return ((pre.sigmoid() + eps)[..., None] * streams).sum(1), 2 * post.sigmoid(), comb

    def post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams

    def head(self, streams: Tensor) -> Tensor:
        m = self.numbers(streams, "hc_head_fn") * self.weight("hc_head_scale") + self.weight("hc_head_base")
        return ((m.sigmoid() + self.c["hc_eps"])[..., None] * streams).sum(1)

    # Attention

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """The attention of one sequence."""
        c, at, ratio = self.c, f"layers.{layer}.attn.", self.c["compress_ratios"][layer]
        heads, dim, rope = c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"]
        freq, positions = self.freq[ratio > 0], torch.arange(len(x), device=self.device)
        packed = self.rounded(x)
        qr = self.kept(self.norm(self.kept(self.product(packed, at + "wq_a")), at + "q_norm"))
        q = self.kept(self.product(self.rounded(qr), at + "wq_b"))
        q = rotated(self.norm(q.unflatten(-1, (heads, dim))), positions, freq)
        kv = self.norm(self.kept(self.product(packed, at + "wkv")), at + "kv_norm")
        kv = self.kept(rotated(kv, positions, freq))
        entries, chosen = kv[:0], None
        if ratio:
            entries = self.compressed(x, at + "compressor.", ratio, dim)
        if ratio == 4:
            chosen = self.indexed(x, qr, at + "indexer.", positions)
        if self.quantized:
            kv, entries = (torch.cat([q8(k[:, :-rope], 64), k[:, -rope:]], -1) for k in (kv, entries))
        sinks = self.weight(at + "attn_sink")
        parts = [
            self.attend(q[s : s + QUERIES], kv, entries, chosen, positions[s : s + QUERIES], ratio, sinks)
            for s in range(0, len(x), QUERIES)
        ]
        o = self.kept(rotated(torch.cat(parts), positions, freq, -1))
        grouped = o.flatten(1).unflatten(-1, (c["o_groups"], -1))
        wo_a = self.weight(at + "wo_a.weight").unflatten(0, (c["o_groups"], -1))
        u = torch.einsum("tgk,grk->tgr", grouped, wo_a).flatten(1)
        return self.product(self.rounded(self.kept(u)), at + "wo_b")

    def attend(
        self, q: Tensor, kv: Tensor, entries: Tensor, chosen: Tensor | None, positions: Tensor, ratio: int,
        sinks: Tensor,
    ) -> Tensor:  # fmt: skip
        """o [queries, heads, dim] of some queries over the window, the entries and the sink."""
        low = max(0, int(positions[0]) - self.c["sliding_window"] + 1)
        keys = torch.cat([kv[low : int(positions[-1]) + 1], entries])
        raw = low + torch.arange(len(keys) - len(entries), device=self.device)
        age = positions[:, None] - raw
        seen = (age >= 0) & (age < self.c["sliding_window"])
        if ratio:
            finished = torch.arange(len(entries), device=self.device) < ((positions + 1) // ratio)[:, None]
            seen = torch.cat([seen, finished if chosen is None else chosen[positions] & finished], 1)
        score = torch.einsum("thd,kd->htk", q, keys) * self.c["head_dim"] ** -0.5
        score = score.masked_fill(~seen, -math.inf)
        sink = sinks[:, None, None].expand(-1, len(q), 1)
        share = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        return torch.einsum("htk,kd->thd", share, keys)

    def compressed(self, x: Tensor, at: str, ratio: int, dim: int) -> Tensor:
        """Entries [windows, dim] of one sequence, rotated."""
        windows = len(x) // ratio
        a = self.product(x[: windows * ratio], at + "wkv").unflatten(0, (windows, ratio))
        z = self.product(x[: windows * ratio], at + "wgate").unflatten(0, (windows, ratio)) + self.weight(
            at + "ape"
        )
        if ratio == 4:  # the first half of the columns belongs to the next window
            a, z = (torch.cat([self.moved(t[..., :dim], rest), t[..., dim:]], 1)
                    for t, rest in ((a, 0.0), (z, -math.inf)))  # fmt: skip
        entries = self.norm((z.softmax(1) * a).sum(1), at + "norm")
        return self.kept(rotated(entries, torch.arange(windows, device=self.device) * ratio, self.freq[True]))

    @staticmethod
    def moved(t: Tensor, rest: float) -> Tensor:
        """Windows one later; the first is `rest`."""
        return torch.cat([torch.full_like(t[:1], rest), t[:-1]]) if len(t) else t

    def indexed(self, x: Tensor, qr: Tensor, at: str, positions: Tensor) -> Tensor:
        """bool [T, entries]: what the indexer chooses."""
        heads, dim = self.c["index_n_heads"], self.c["index_head_dim"]
        q = self.kept(self.product(self.rounded(qr), at + "wq_b")).unflatten(-1, (heads, dim))
        q = self.kept(rotated(q, positions, self.freq[True]))
        k = self.compressed(x, at + "compressor.", 4, dim)
        if self.quantized:
            q, k = q4(hadamard(q)), q4(hadamard(k))
        share = self.product(x, at + "weights_proj") * (dim**-0.5 * heads**-0.5)
        most = min(self.c["index_topk"], len(k))
        chosen = torch.zeros(len(x), len(k), dtype=torch.bool, device=self.device)
        for s in range(0, len(x) if most else 0, QUERIES):
            part = slice(s, s + QUERIES)
            score = torch.einsum("th,thk->tk", share[part], torch.einsum("thd,kd->thk", q[part], k).relu())
            visible = (positions[part] + 1) // 4
            score = score.masked_fill(torch.arange(len(k), device=self.device) >= visible[:, None], -math.inf)
            chosen[part].scatter_(1, score.topk(most, 1).indices, True)
        return chosen

    # Experts

    def mixture(self, layer: int, x: Tensor, ids: Tensor) -> Tensor:
        c, at = self.c, f"layers.{layer}.ffn."
        count = c["num_experts_per_tok"]
        score = torch.nn.functional.softplus(self.product(x, at + "gate")).sqrt()
        if layer < c["num_hash_layers"]:
            chosen = self.weight(at + "gate.tid2eid")[ids]
        else:
            chosen = (score + self.weight(at + "gate.bias")).topk(count, -1).indices
        self.chosen.append(chosen)
        share = score.gather(1, chosen)
        share = share / share.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        packed = self.rounded(x)
        total = self.mlp(packed, at + "shared_experts.", None)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            y = self.mlp(packed[token], at + f"experts.{expert}.", share[token, choice])
            total.index_add_(0, token, y)
        return total

    def mlp(self, x: Tensor, at: str, share: Tensor | None) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate = self.product(x, at + "w1").clamp(max=limit)
        hidden = torch.nn.functional.silu(gate) * self.product(x, at + "w3").clamp(-limit, limit)
        if share is not None:
            hidden = hidden * share[:, None]
        return self.product(self.rounded(self.kept(hidden)), at + "w2")
