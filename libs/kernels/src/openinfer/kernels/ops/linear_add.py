"""linear_add: a linear layer added onto the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.formats.int4 import group_words
from openinfer.kernels.formats.linear import DENSE, Linear, expect_linear, linear_of
from openinfer.kernels.linear import kernels as linear
from openinfer.kernels.linear.problem import Epilogue, Problem
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import norm
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_normed, require
from openinfer.kernels.op.launch import Collective, Command, Scratch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, over_rows, rounded
from openinfer.kernels.op.reference import normed as normed_of
from openinfer.kernels.op.rounding import coded
from openinfer.kernels.op.target import Target
from openinfer.kernels.ranks import Communicator, sum_over
from openinfer.kernels.ranks.exchange import Normed, sum_of_ranks
from openinfer.tensor import Tensor, bfloat16, float32


@dataclass(frozen=True, kw_only=True, slots=True)
class AddArgs(Generic[T]):
    """x += h @ weight^T, in place. With several ranks, h and weight are a rank's part of K, and x gets the sum of all.

    x [T, H], h [T, K], weight [H, K] of one float dtype. The product accumulates in float32; the published models round
    it before the addition, an implementation may round once after it. H and K are multiples of 16. The weight may
    be a Linear as in norm_linear, which says how h is quantised. A rank's product is rounded before the sum.

    lora: adapters of the product, one part (low_rank.Lora); of several ranks, a rank's part of them.

    normed [T, H] gets rms_norm(x; norm_weight, eps) of the new x, as norm_linear normalises. With several ranks it can
    be part of the sum's kernel; one rank makes it for several products at once.
    """

    x: T
    h: T
    weight: Linear[T] | T
    ranks: int = 1
    normed: T | None = None
    norm_weight: T | None = None
    eps: float | None = None
    lora: Lora[T] | None = None

    @property
    def packed(self) -> str:
        """As of Linear. Products of a packed format have the same kernels in all ops."""
        return linear_of(self.weight).packed


def _check(a: AddArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    tokens, hidden = a.x.shape
    expect("h", a.h, (tokens, -1), a.x.dtype)
    expect_linear("weight", linear_of(a.weight), (hidden, a.h.shape[1]), a.x.dtype, *DENSE)
    even = hidden % 16 == 0 and a.h.shape[1] % 16 == 0
    require(even, f"weight is {a.weight.shape}; sizes must be multiples of 16")
    expect_lora(a.h, hidden, a.lora)
    require(a.lora is None or a.lora.parts == (hidden,), f"one part of {hidden} columns is possible")
    expect_normed(a.normed, a.norm_weight, a.eps, a.x)


def _reference(a: AddArgs[Array], communicator: Communicator | None) -> None:
    own = linear_of(a.weight)
    weight, y = own.values(), np.empty(a.x.shape, np.float32)

    def some(rows: slice) -> None:
        y[rows] = matmul_nt(coded(a.h[rows], own.coding, own.x_scale), weight)
        if a.lora is not None:
            y[rows] += lora_sums(a.h[rows], a.lora, rows)

    over_rows(len(a.x), some)
    a.x[:] = f32(a.x) + sum_over(communicator, rounded(y, a.x.dtype))
    if a.normed is not None:
        a.normed[:] = normed_of(a.x, a.norm_weight, a.eps)


def _launches(target: Target, a: AddArgs[Tensor]) -> Iterator[Command]:
    own = Normed.of(a.normed, a.norm_weight, a.eps)
    y = a.x if a.ranks == 1 else Scratch(a.x.shape, a.x.dtype)
    epilogue: Epilogue = "add" if a.ranks == 1 else "none"
    problem = Problem(target, "linear_add", y, a.h, linear_of(a.weight), epilogue, adapter=a.lora)
    yield from linear.launches(problem)
    if isinstance(y, Scratch):
        yield from sum_of_ranks(target, a.x, y, a.ranks, normed=own)
    elif own is not None:
        yield norm(own.out, a.x, own.weight, own.eps, early=target.starts_early)


def _cost(workload: Workload, a: AddArgs[Tensor]) -> Cost:
    n, k = a.weight.shape[0], a.h.shape[1]
    weights = sum(t.nbytes for t in (a.weight, a.norm_weight) if t is not None)
    columns = k + (2 if a.normed is None else 3) * n
    link = Collective("all_reduce", a.x, a.x, a.ranks).link_bytes
    weights += lora_numbers(a.lora) * a.x.itemsize
    numbers = n * k + lora_numbers(a.lora)
    return Cost(weights + workload.tokens * columns * a.x.itemsize, 2 * workload.tokens * numbers, link)


linear_add = Op(
    "linear_add", AddArgs[Tensor], _check, _reference, _launches, _cost, collective=True,
    writes=("x", "normed"),
)  # fmt: skip


def cases(memory: Memory) -> Iterator[OpCase]:
    """Qwen3.5-4B's output projections, in bf16, FP8 and INT4. `openinfer tune` measures the choices."""
    for n, k in ((2560, 4096), (2560, 9216)):
        for kind in ("bf16", "fp8", "int4"):
            if kind == "bf16":
                weight = Linear(memory.normal(n, k, scale=k**-0.5))
            elif kind == "fp8":
                scales = memory.normal(n // 128, k // 128, scale=0.01, dtype=float32)
                weight = Linear(memory.float8(n, k), scales)
            else:
                words = memory.of(group_words(np.full((n, k // 128), 0.01, bfloat16), 8))
                weight = Linear(memory.codes(n, k // 2), words)
            for tokens in (1, 8, 32, 128, 1024, 4096):
                args = {"x": memory.normal(tokens, n), "h": memory.normal(tokens, k), "weight": weight}
                name = f"{n} x {k} {kind}, {tokens} tokens"
                copies = memory.copies(args, "weight")
                yield OpCase(name, linear_add, copies, Workload(tokens, tokens, 0, 0))
