"""Softmax with sinks over a window of raw keys and compressed entries, in one Triton kernel each way.

Scores come in a banded layout: for the query at t the first SPAN are those of the raw keys from the beginning of the block
of BLOCK tokens that lies two blocks before t's own, the rest those of the compressed entries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WINDOW = 64, 128
SPAN = BLOCK + WINDOW


@triton.jit
def _visible(row, s, heads, length, ratio, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    t = (row // heads) % length
    i = t % BLOCK
    raw = (s > i) & (s <= i + WINDOW) & (t - i - WINDOW + s >= 0)
    return tl.where(s < BLOCK + WINDOW, raw, (s - BLOCK - WINDOW) < (t + 1) // ratio)


@triton.jit
def _forward(
    scores,
    sinks,
    out,
    totals,
    scale,
    width,
    heads,
    length,
    ratio,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    s = tl.arange(0, SIZE)
    inside = s < width
    at = row.to(tl.int64) * width + s
    seen = inside & _visible(row, s, heads, length, ratio, BLOCK, WINDOW)
    x = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32) * scale
    x = tl.where(seen, x, -1e30)
    sink = tl.load(sinks + row % heads)
    most = tl.maximum(tl.max(x, 0), sink)
    p = tl.where(seen, tl.exp(x - most), 0.0)
    total = tl.sum(p, 0) + tl.exp(sink - most)
    tl.store(out + at, p / total, mask=inside)
    tl.store(totals + row, tl.exp(sink - most) / total)


@triton.jit
def _backward(out, grad, totals, result, sink_grads, scale, width, SIZE: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, SIZE)
    inside = s < width
    at = row.to(tl.int64) * width + s
    p = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(p * g, 0)
    tl.store(result + at, p * (g - dot) * scale, mask=inside)
    tl.store(sink_grads + row, -tl.load(totals + row) * dot)


class WindowSoftmax(torch.autograd.Function):
    """scores [B, T, A, width] and float32 sinks [A] to probabilities; `ratio` tokens a compressed entry."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sinks: Tensor, scale: float, ratio: int) -> Tensor:
        scores = scores.contiguous()
        _, length, heads, width = scores.shape
        rows = scores.numel() // width
        out, totals = torch.empty_like(scores), torch.empty(rows, device=scores.device)
        size = triton.next_power_of_2(width)
        _forward[(rows,)](
            scores,
            sinks,
            out,
            totals,
            scale,
            width,
            heads,
            length,
            max(ratio, 1),
            BLOCK=BLOCK,
            WINDOW=WINDOW,
            SIZE=size,
            num_warps=2,
        )
        ctx.save_for_backward(out, totals)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        out, totals = ctx.saved_tensors
        grad, width = grads[0].contiguous(), out.shape[-1]
        result, sink_grads = torch.empty_like(out), torch.empty_like(totals)
        rows, size = totals.numel(), triton.next_power_of_2(width)
        _backward[(rows,)](out, grad, totals, result, sink_grads, ctx.scale, width, SIZE=size, num_warps=2)
        return result, sink_grads.view(-1, out.shape[2]).sum(0), None, None


def plain(scores: Tensor, sinks: Tensor, scale: float, ratio: int) -> Tensor:
    """The same in torch."""
    _, length, _, width = scores.shape
    t = torch.arange(length, device=scores.device)[:, None]
    s = torch.arange(width, device=scores.device)[None]
    i = t % BLOCK
    raw = (s > i) & (s <= i + WINDOW) & (t - i - WINDOW + s >= 0)
    seen = torch.where(s < SPAN, raw, s - SPAN < (t + 1) // max(ratio, 1))
    wide = (scores.float() * scale).masked_fill(~seen[:, None], -1e30)
    total = torch.logaddexp(torch.logsumexp(wide, -1, keepdim=True), sinks[:, None])
    return torch.exp(wide - total).to(scores.dtype)
