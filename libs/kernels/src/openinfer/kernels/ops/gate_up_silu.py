"""gate_up_silu: RMS norm into the two halves of a gated MLP, and their product."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.contract import FLOATS, expect, expect_weight, require
from openinfer.kernels.formats import halves
from openinfer.kernels.launch import Command
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.products import normed_product
from openinfer.kernels.reference import Array, matmul_nt, rms_norm, rounded, silu
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, float32


def _contract(
    *, out: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, scales: Tensor | None = None
) -> None:
    """out = silu(g) * u with [g, u] = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [2 I, H] (the gate's rows, then the up projection's), out [T, I], of one float
    dtype; norm_weight may also be float32 (as in norm_linear). g and u are rounded as outputs of a linear layer,
    silu(g) is rounded, and the product is rounded. H and I are multiples of 16. With `scales` the weight is
    float8_e4m3fn, each half with blocks of its own (contract.expect_weight, parts=2); x is not quantised.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect("norm_weight", norm_weight, (hidden,), x.dtype, float32)
    expect("out", out, (tokens, -1), x.dtype)
    expect_weight("weight", weight, scales, (2 * out.shape[1], hidden), x.dtype, parts=2)
    require(
        hidden % 16 == 0 and out.shape[1] % 16 == 0,
        f"weight is {weight.shape}; sizes must be multiples of 16",
    )
    require(eps > 0, f"eps is {eps}; it must be positive")


def _reference(
    *, out: Array, x: Array, norm_weight: Array, weight: Array, eps: float, scales: Array | None = None
) -> None:
    normed = rms_norm(x, norm_weight, eps)
    gate, up = (rounded(matmul_nt(normed, half), x.dtype) for half in halves(weight, scales))
    out[:] = rounded(silu(gate), x.dtype) * up


def _launches(
    target: Target,
    *,
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> Iterator[Command]:
    yield from normed_product(target, "gate_up_silu", out, x, norm_weight, eps, weight, scales, gated=True)


def _cost(
    workload: Workload,
    *,
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> Cost:
    n, h = weight.shape
    tokens = workload.tokens
    weights = weight.nbytes + norm_weight.nbytes + (scales.nbytes if scales else 0)
    return Cost(weights + tokens * (h + n // 2) * x.itemsize, 2 * tokens * n * h)


gate_up_silu = Op("gate_up_silu", _contract, reference=_reference, launches=_launches, cost=_cost)
