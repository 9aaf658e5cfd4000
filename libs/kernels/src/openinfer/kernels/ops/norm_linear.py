"""norm_linear: RMS norm into a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from openinfer.kernels.formats.codes import Coding, coded, dequantized
from openinfer.kernels.linear.adapted_products import adapted_product
from openinfer.kernels.linear.products import normed_product
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.contract import FLOATS, expect, expect_coding, expect_norm, expect_weight, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, matmul_nt, normed
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32


def _contract(
    *,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    scales: Tensor | None = None,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    **lora: Unpack[Lora],
) -> None:
    """out = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [N, H] of one float dtype; out [T, N] of that dtype, or float32 (logits: not
    rounded). The norm is computed in float32, rounded, multiplied by its weight and rounded; a norm_weight of float32
    multiplies before the one rounding. The product accumulates in float32 and is rounded once. H and N are multiples
    of 16. With `scales` the weight is float8_e4m3fn or INT4 (contract.expect_weight). Without norm_weight and
    eps, x is normalised already.

    coding: how the normalised x is quantised to e4m3 before the product (formats.coded; not at all if None). x_scale:
    float32 [1], the scale for "tensor". See contract.expect_coding. lora: adapters of the product of the normalised x,
    before it is quantised (low_rank.Lora).
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect_norm(norm_weight, eps, hidden, x.dtype)
    expect_weight("weight", weight, scales, (-1, hidden), x.dtype, rows=True)
    expect_coding(coding, x_scale, weight, scales)
    expect("out", out, (tokens, weight.shape[0]), x.dtype, float32)
    require(
        hidden % 16 == 0 and weight.shape[0] % 16 == 0,
        f"weight is {weight.shape}; sizes must be multiples of 16",
    )
    expect_lora(x, weight.shape[0], **lora)
    require(not lora or out.dtype == x.dtype, f"out is {out.dtype.name}; with adapters it is {x.dtype.name}")


def _reference(
    *,
    out: Array,
    x: Array,
    weight: Array,
    norm_weight: Array | None = None,
    eps: float | None = None,
    scales: Array | None = None,
    coding: Coding | None = None,
    x_scale: Array | None = None,
    **lora: Any,
) -> None:
    h = normed(x, norm_weight, eps)
    y = matmul_nt(coded(h, coding, x_scale), dequantized(weight, scales))
    if lora:
        y[:, : sum(lora["lora_parts"])] += lora_sums(h, **lora)
    out[:] = y


def _launches(
    target: Target,
    *,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    scales: Tensor | None = None,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    **lora: Unpack[Lora],
) -> Iterator[Command]:
    op = "norm_linear" if out.dtype == x.dtype else "logits"
    if lora:
        own = Norm.of(norm_weight, eps)
        yield from adapted_product(
            target, op, out, x, weight, scales, lora, normed=own, coding=coding, x_scale=x_scale
        )
        return
    yield from normed_product(
        target, op, out, x, norm_weight, eps, weight, scales, coding=coding, x_scale=x_scale
    )


def _cost(
    workload: Workload,
    *,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    scales: Tensor | None = None,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    **lora: Unpack[Lora],
) -> Cost:
    n, h = weight.shape[0], x.shape[1]
    tokens = workload.tokens if out.dtype == x.dtype else workload.rows
    weights = sum(t.nbytes for t in (weight, norm_weight, scales) if t is not None)
    numbers = n * h + lora_numbers(**lora)
    weights += lora_numbers(**lora) * x.itemsize
    return Cost(weights + tokens * (h * x.itemsize + n * out.itemsize), 2 * tokens * numbers)


norm_linear = Op("norm_linear", _contract, reference=_reference, launches=_launches, cost=_cost)
