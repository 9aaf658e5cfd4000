"""linear_add: a linear layer added onto the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.benchmark import Case, Memory
from openinfer.kernels.communicator import Communicator, sum_over
from openinfer.kernels.contract import FLOATS, expect, expect_weight, require
from openinfer.kernels.exchange import sum_of_ranks
from openinfer.kernels.formats import dequantized
from openinfer.kernels.int4 import group_words
from openinfer.kernels.launch import Collective, Command, Scratch
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.products import product
from openinfer.kernels.reference import Array, f32, matmul_nt, rounded
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16, float32


def _contract(
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    added: Tensor | None = None,
) -> None:
    """x += h @ weight^T, in place. With several ranks, h and weight are a rank's part of K, and x gets the sum of all.

    x [T, H], h [T, K], weight [H, K] of one float dtype. The product accumulates in float32; the published models round
    it before the addition, an implementation may round once after it. H and K are multiples of 16. With `scales` the
    weight is float8_e4m3fn or INT4 (contract.expect_weight); h is not quantised. A rank's product is rounded before the
    sum.

    added [T, H]: of several ranks, what adapters add to a rank's product, see add_lora. It is overwritten.
    """
    expect("x", x, (-1, -1), *FLOATS)
    tokens, hidden = x.shape
    expect("h", h, (tokens, -1), x.dtype)
    expect_weight("weight", weight, scales, (hidden, h.shape[1]), x.dtype, rows=True)
    require(
        hidden % 16 == 0 and h.shape[1] % 16 == 0, f"weight is {weight.shape}; sizes must be multiples of 16"
    )
    if added is not None:
        expect("added", added, x.shape, x.dtype)
        require(ranks > 1, "added is for a rank of several; add_lora adds onto x itself")


def _reference(
    *,
    x: Array,
    h: Array,
    weight: Array,
    scales: Array | None = None,
    ranks: int = 1,
    added: Array | None = None,
    communicator: Communicator | None = None,
) -> None:
    y = matmul_nt(h, dequantized(weight, scales))
    y = rounded(y if added is None else f32(added) + y, x.dtype)
    x[:] = f32(x) + sum_over(communicator, y)


def _launches(
    target: Target,
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    added: Tensor | None = None,
) -> Iterator[Command]:
    if ranks == 1:
        yield from product(target, "linear_add", x, h, weight, scales, add=True)
        return
    y = Scratch(x.shape, x.dtype) if added is None else added
    yield from product(target, "linear_add", y, h, weight, scales, add=added is not None)
    yield from sum_of_ranks(target, x, y, ranks)


def _cost(
    workload: Workload,
    *,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    ranks: int = 1,
    added: Tensor | None = None,
) -> Cost:
    n, k = weight.shape[0], h.shape[1]
    weights = weight.nbytes + (scales.nbytes if scales else 0)
    link = Collective("all_reduce", x, x, ranks).link_bytes
    return Cost(weights + workload.tokens * (k + 2 * n) * x.itemsize, 2 * workload.tokens * n * k, link)


linear_add = Op(
    "linear_add", _contract, reference=_reference, launches=_launches, cost=_cost, collective=True
)


def cases(memory: Memory) -> Iterator[Case]:
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
                yield Case(name, linear_add, copies, Workload(tokens, tokens, 0, 0))
