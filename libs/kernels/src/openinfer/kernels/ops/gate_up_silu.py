"""gate_up_silu: RMS norm into the two halves of a gated MLP, and their product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from openinfer.kernels.formats.codes import SCALE_BLOCK, Coding, coded, halves, of_rows
from openinfer.kernels.formats.int4 import is_int4
from openinfer.kernels.linear.adapted_products import adapted_product
from openinfer.kernels.linear.products import normed_product
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.contract import FLOATS, expect, expect_coding, expect_norm, expect_weight, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, matmul_nt, normed, rounded, silu
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor


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
    """out = silu(g) * u with [g, u] = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [2 I, H] (the gate's rows, then the up projection's), out [T, I], of one float
    dtype; norm_weight may also be float32 (as in norm_linear). g and u are rounded as outputs of a linear layer,
    silu(g) is rounded, and the product is rounded. H and I are multiples of 16. With `scales` the weight is
    float8_e4m3fn, each half with blocks of its own (contract.expect_weight, parts=2), or INT4. coding and
    x_scale: how the normalised x is quantised, as in norm_linear. Without norm_weight and eps, x is normalised already.

    lora: adapters of the product of the normalised x, before it is quantised, two parts (low_rank.Lora). With scales of
    blocks, I is then a multiple of 128.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect_norm(norm_weight, eps, hidden, x.dtype)
    expect("out", out, (tokens, -1), x.dtype)
    expect_weight("weight", weight, scales, (2 * out.shape[1], hidden), x.dtype, parts=2, rows=True)
    expect_coding(coding, x_scale, weight, scales)
    require(
        hidden % 16 == 0 and out.shape[1] % 16 == 0,
        f"weight is {weight.shape}; sizes must be multiples of 16",
    )
    expect_lora(x, weight.shape[0], **lora)
    if lora:
        require(lora["lora_parts"] == out.shape[1:] * 2, f"two parts of {out.shape[1]} columns are possible")
        require(
            scales is None or out.shape[1] % SCALE_BLOCK == 0 or of_rows(weight, scales) or is_int4(scales),
            f"weight is {weight.shape} in float8; adapters are possible where each half is of whole blocks",
        )


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
    both = [matmul_nt(coded(h, coding, x_scale), half) for half in halves(weight, scales)]
    if lora:
        sums = np.split(lora_sums(h, **lora), 2, axis=1)
        both = [half + more for half, more in zip(both, sums, strict=True)]
    gate, up = (rounded(half, x.dtype) for half in both)
    out[:] = rounded(silu(gate), x.dtype) * up


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
    if lora:
        own = Norm.of(norm_weight, eps)
        yield from adapted_product(
            target,
            "gate_up_silu",
            out,
            x,
            weight,
            scales,
            lora,
            normed=own,
            coding=coding,
            x_scale=x_scale,
            gated=True,
        )
        return
    yield from normed_product(
        target,
        "gate_up_silu",
        out,
        x,
        norm_weight,
        eps,
        weight,
        scales,
        gated=True,
        coding=coding,
        x_scale=x_scale,
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
    tokens = workload.tokens
    weights = sum(t.nbytes for t in (weight, norm_weight, scales) if t is not None)
    weights += lora_numbers(**lora) * x.itemsize
    numbers = n * h + lora_numbers(**lora)
    return Cost(weights + tokens * (h + n // 2) * x.itemsize, 2 * tokens * numbers)


gate_up_silu = Op("gate_up_silu", _contract, reference=_reference, launches=_launches, cost=_cost)
