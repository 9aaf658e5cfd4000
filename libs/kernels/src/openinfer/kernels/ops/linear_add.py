"""linear_add: a linear layer added onto the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.contract import FLOATS, expect, require
from openinfer.kernels.launch import Command
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.products import product
from openinfer.kernels.reference import Array, f32, matmul_nt, rounded
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor


def _contract(*, x: Tensor, h: Tensor, weight: Tensor) -> None:
    """x += h @ weight^T, in place.

    x [T, H], h [T, K], weight [H, K] of one float dtype. The product accumulates in float32; the published models round
    it before the addition, an implementation may round once after it. H and K are multiples of 16.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect("h", h, (tokens, -1), x.dtype)
    expect("weight", weight, (hidden, h.shape[1]), x.dtype)
    require(
        hidden % 16 == 0 and h.shape[1] % 16 == 0, f"weight is {weight.shape}; sizes must be multiples of 16"
    )


def _reference(*, x: Array, h: Array, weight: Array) -> None:
    x[:] = f32(x) + rounded(matmul_nt(h, weight), x.dtype)


def _launches(target: Target, *, x: Tensor, h: Tensor, weight: Tensor) -> Iterator[Command]:
    yield from product(target, "linear_add", x, h, weight, add=True)


def _cost(workload: Workload, *, x: Tensor, h: Tensor, weight: Tensor) -> Cost:
    n, k = weight.shape
    return Cost(weight.nbytes + workload.tokens * (k + 2 * n) * x.itemsize, 2 * workload.tokens * n * k)


linear_add = Op("linear_add", _contract, reference=_reference, launches=_launches, cost=_cost)
