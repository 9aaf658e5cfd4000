"""linear_add: a linear layer added onto the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from openinfer.kernels.formats.codes import Coding, coded, dequantized
from openinfer.kernels.formats.int4 import group_words
from openinfer.kernels.linear.adapted_products import adapted_product
from openinfer.kernels.linear.products import product
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import norm
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_coding, expect_normed, expect_weight, require
from openinfer.kernels.op.launch import Collective, Command, Scratch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, rounded
from openinfer.kernels.op.reference import normed as normed_of
from openinfer.kernels.op.target import Target
from openinfer.kernels.ranks.communicator import Communicator, sum_over
from openinfer.kernels.ranks.exchange import Normed, sum_of_ranks
from openinfer.tensor import Tensor, bfloat16, float32


def _contract(
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    normed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> None:
    """x += h @ weight^T, in place. With several ranks, h and weight are a rank's part of K, and x gets the sum of all.

    x [T, H], h [T, K], weight [H, K] of one float dtype. The product accumulates in float32; the published models round
    it before the addition, an implementation may round once after it. H and K are multiples of 16. With `scales` the
    weight is float8_e4m3fn or INT4 (contract.expect_weight). coding and x_scale: how h is quantised, as in
    norm_linear. A rank's product is rounded before the sum.

    lora: adapters of the product, one part (low_rank.Lora); of several ranks, a rank's part of them.

    normed [T, H] gets rms_norm(x; norm_weight, eps) of the new x, as norm_linear normalises. With several ranks it can
    be part of the sum's kernel.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect("h", h, (tokens, -1), x.dtype)
    expect_weight("weight", weight, scales, (hidden, h.shape[1]), x.dtype, rows=True)
    expect_coding(coding, x_scale, weight, scales)
    require(
        hidden % 16 == 0 and h.shape[1] % 16 == 0, f"weight is {weight.shape}; sizes must be multiples of 16"
    )
    expect_lora(h, hidden, **lora)
    require(not lora or lora["lora_parts"] == (hidden,), f"one part of {hidden} columns is possible")
    expect_normed(normed, norm_weight, eps, x)


def _reference(
    *,
    x: Array,
    h: Array,
    weight: Array,
    scales: Array | None = None,
    ranks: int = 1,
    coding: Coding | None = None,
    x_scale: Array | None = None,
    normed: Array | None = None,
    norm_weight: Array | None = None,
    eps: float | None = None,
    communicator: Communicator | None = None,
    **lora: Any,
) -> None:
    y = matmul_nt(coded(h, coding, x_scale), dequantized(weight, scales))
    if lora:
        y += lora_sums(h, **lora)
    x[:] = f32(x) + sum_over(communicator, rounded(y, x.dtype))
    if normed is not None:
        normed[:] = normed_of(x, norm_weight, eps)


def _launches(
    target: Target,
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    normed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> Iterator[Command]:
    own = Normed.of(normed, norm_weight, eps)
    y = x if ranks == 1 else Scratch(x.shape, x.dtype)
    if lora:
        yield from adapted_product(
            target, "linear_add", y, h, weight, scales, lora, add=ranks == 1, coding=coding, x_scale=x_scale
        )
    else:
        yield from product(
            target, "linear_add", y, h, weight, scales, add=ranks == 1, coding=coding, x_scale=x_scale
        )
    if isinstance(y, Scratch):
        yield from sum_of_ranks(target, x, y, ranks, normed=own)
    elif own is not None:
        yield norm(own.out, x, own.weight, own.eps)


def _cost(
    workload: Workload,
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    coding: Coding | None = None,
    x_scale: Tensor | None = None,
    normed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    **lora: Unpack[Lora],
) -> Cost:
    n, k = weight.shape[0], h.shape[1]
    weights = sum(t.nbytes for t in (weight, scales, norm_weight) if t is not None)
    columns = k + (2 if normed is None else 3) * n
    link = Collective("all_reduce", x, x, ranks).link_bytes
    weights += lora_numbers(**lora) * x.itemsize
    numbers = n * k + lora_numbers(**lora)
    return Cost(weights + workload.tokens * columns * x.itemsize, 2 * workload.tokens * numbers, link)


linear_add = Op(
    "linear_add", _contract, reference=_reference, launches=_launches, cost=_cost, collective=True
)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Qwen3.5-4B's output projections, in bf16, FP8 and INT4. `openinfer tune` measures the choices."""
    for n, k in ((2560, 4096), (2560, 9216)):
        for kind in ("bf16", "fp8", "int4"):
            scales = None
            if kind == "bf16":
                weight = memory.normal(n, k, scale=k**-0.5)
            elif kind == "fp8":
                weight, scales = (
                    memory.float8(n, k),
                    memory.normal(n // 128, k // 128, scale=0.01, dtype=float32),
                )
            else:
                weight, scales = (
                    memory.codes(n, k // 2),
                    memory.of(group_words(np.full((n, k // 128), 0.01, bfloat16), 8)),
                )
            for tokens in (1, 8, 32, 128, 1024, 4096):
                args = {
                    "x": memory.normal(tokens, n),
                    "h": memory.normal(tokens, k),
                    "weight": weight,
                    "scales": scales,
                }
                name = f"{n} x {k} {kind}, {tokens} tokens"
                copies = memory.copies(args, "weight", "scales")
                yield OpCase(name, linear_add, copies, Workload(tokens, tokens, 0, 0))
