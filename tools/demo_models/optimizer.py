"""Muon for matrices, Adam for the rest; every state and the learning rate are tensors, so that a graph can replay it."""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTUM, BETAS, DECAY, EPS = 0.95, (0.9, 0.98), 0.03, 1e-8
RATE_MATRICES, RATE_OTHERS = 4e-3, 3e-3
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that pushes singular values towards one."""


class Optimizer:
    """One step for all parameters. shares: of the learning rate, for each of others. `rate`: a scalar tensor, the share
    of the peak learning rates at this step."""

    def __init__(
        self, matrices: list[Tensor], others: list[Tensor], shares: list[float], rate: Tensor
    ) -> None:
        self._rate = rate
        self._others, self._shares = others, shares
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self._groups = [
            (group, torch.zeros(len(group), *shape, device=rate.device)) for shape, group in groups.items()
        ]
        self._first = [torch.zeros_like(p) for p in others]
        self._second = [torch.zeros_like(p) for p in others]
        self._powers = torch.ones(2, device=rate.device)
        self._betas = torch.tensor(BETAS, device=rate.device)

    @torch.no_grad()
    def step(self) -> None:
        """Update from the gradients, which are not changed."""
        for group, momentum in self._groups:
            grads = torch.stack([_grad(p) for p in group])
            momentum.lerp_(grads, 1 - MOMENTUM)
            update = orthogonal(grads.lerp(momentum, MOMENTUM))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5 * RATE_MATRICES
            torch._foreach_mul_(group, 1 - self._rate * (RATE_MATRICES * DECAY))
            torch._foreach_sub_(group, list((update * (self._rate * scale)).unbind()))
        self._adam()

    def _adam(self) -> None:
        grads = [_grad(p) for p in self._others]
        self._powers.mul_(self._betas)
        torch._foreach_lerp_(self._first, grads, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, grads, grads, 1 - BETAS[1])
        scale = torch.sqrt(1 - self._powers[1])
        under = torch._foreach_sqrt(self._second)
        torch._foreach_add_(under, EPS)
        update = torch._foreach_div(self._first, under)
        torch._foreach_mul_(update, self._rate * RATE_OTHERS * scale / (1 - self._powers[0]))
        torch._foreach_mul_(update, self._shares)
        torch._foreach_sub_(self._others, update)


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def orthogonal(g: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of [N, rows, columns], roughly, by five steps in bfloat16."""
    a, b, c = COEFFICIENTS
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(5):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x.transpose(-1, -2) if tall else x).float()
