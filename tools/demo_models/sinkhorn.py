"""Sinkhorn normalisation of many 4 x 4 matrices, forwards and backwards, each in one Triton kernel.

Twenty rounds of small operations would otherwise be most of a training step's launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def _forward(logits, out, sums, count, eps, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    at = n[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    inside = n[:, None, None] < count
    line = n[:, None] * 4 + i[None, :]
    inside_line = n[:, None] < count
    c = tl.load(logits + at, mask=inside, other=0.0)
    c = tl.exp(c - tl.expand_dims(tl.max(c, 2), 2))
    c = c / tl.expand_dims(tl.sum(c, 2), 2) + eps
    for r in range(2 * ROUNDS - 1):
        if r % 2 == 0:
            s = tl.sum(c, 1) + eps
            c = c / tl.expand_dims(s, 1)
        else:
            s = tl.sum(c, 2) + eps
            c = c / tl.expand_dims(s, 2)
        tl.store(sums + r * count * 4 + line, s, mask=inside_line)
    tl.store(out + at, c, mask=inside)


@triton.jit
def _backward(out, sums, grad, result, count, eps, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    at = n[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    inside = n[:, None, None] < count
    line = n[:, None] * 4 + i[None, :]
    inside_line = n[:, None] < count
    c = tl.load(out + at, mask=inside, other=0.25)
    g = tl.load(grad + at, mask=inside, other=0.0)
    for back in range(2 * ROUNDS - 1):  # undo the last division first: c' = c / s, so c = c' * s
        r = 2 * ROUNDS - 2 - back
        s = tl.load(sums + r * count * 4 + line, mask=inside_line, other=1.0)
        if r % 2 == 0:
            g = (g - tl.expand_dims(tl.sum(g * c, 1), 1)) / tl.expand_dims(s, 1)
            c = c * tl.expand_dims(s, 1)
        else:
            g = (g - tl.expand_dims(tl.sum(g * c, 2), 2)) / tl.expand_dims(s, 2)
            c = c * tl.expand_dims(s, 2)
    p = c - eps  # the softmax
    tl.store(result + at, p * (g - tl.expand_dims(tl.sum(g * p, 2), 2)), mask=inside)


class Sinkhorn(torch.autograd.Function):
    """float32 logits [N, 4, 4] to nearly doubly stochastic matrices."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, rounds: int) -> Tensor:
        logits = logits.contiguous()
        count = logits.shape[0]
        out = torch.empty_like(logits)
        sums = torch.empty(2 * rounds - 1, count, 4, device=logits.device)
        _forward[(triton.cdiv(count, BLOCK),)](logits, out, sums, count, eps, ROUNDS=rounds, BLOCK=BLOCK)
        ctx.save_for_backward(out, sums)
        ctx.eps, ctx.rounds = eps, rounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        out, sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        result, count = torch.empty_like(out), out.shape[0]
        _backward[(triton.cdiv(count, BLOCK),)](
            out, sums, grad, result, count, ctx.eps, ROUNDS=ctx.rounds, BLOCK=BLOCK
        )
        return result, None, None


def plain(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """The same in torch."""
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c
