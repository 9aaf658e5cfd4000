"""norm_linear: RMS norm into a linear layer. gate_up_silu: into the two halves of a gated MLP, and their product."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import DENSE, Linear, expect_linear, linear_of
from openinfer.kernels.linear import kernels as linear
from openinfer.kernels.linear.problem import Problem
from openinfer.kernels.lora.low_rank import Lora, expect_lora, lora_numbers, lora_sums
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.contract import FLOATS, expect, expect_norm, require
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, matmul_nt, normed, over_rows, rounded, silu
from openinfer.kernels.op.rounding import SCALE_BLOCK, coded
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, float32


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearArgs(Generic[T]):
    """out = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [N, H] of one float dtype; out [T, N] of that dtype, or float32 (logits: not
    rounded). The norm is computed in float32, rounded, multiplied by its weight and rounded; a norm_weight of float32
    multiplies before the one rounding. The product accumulates in float32 and is rounded once. H and N are multiples
    of 16. A weight that is not a tensor is a Linear of plain, FP8 or INT4 numbers. Without norm_weight and eps, x is
    normalised already.

    The Linear says how the normalised x is quantised to e4m3 before the product (rounding.coded). lora: adapters of the
    product of the normalised x, before it is quantised (low_rank.Lora).
    """

    out: T
    x: T
    weight: Linear[T] | T
    norm_weight: T | None = None
    eps: float | None = None
    lora: Lora[T] | None = None

    @property
    def packed(self) -> str:
        """As of Linear. Products of a packed format have the same kernels in all ops."""
        return linear_of(self.weight).packed


def _check(a: LinearArgs[Tensor]) -> None:
    expect("out", a.out, (a.x.shape[0], _expect_product(a)), a.x.dtype, float32)
    alike = a.lora is None or a.out.dtype == a.x.dtype
    require(alike, f"out is {a.out.dtype.name}; with adapters it is {a.x.dtype.name}")


def _expect_product(a: LinearArgs[Tensor], parts: int = 1) -> int:
    """The weight's rows. Raises ContractError unless it fits x, the norm and adapters, with multiples of 16 a part."""
    expect("x", a.x, (-1, -1), *FLOATS)
    hidden, weight = a.x.shape[1], linear_of(a.weight)
    expect_norm(a.norm_weight, a.eps, hidden, a.x.dtype)
    expect_linear("weight", weight, (-1, hidden), a.x.dtype, *DENSE, parts=parts)
    even = hidden % 16 == 0 and weight.shape[0] % (16 * parts) == 0
    require(even, f"weight is {weight.shape}; sizes must be multiples of 16")
    expect_lora(a.x, weight.shape[0], a.lora)
    return weight.shape[0]


def _reference(a: LinearArgs[Array]) -> None:
    own = linear_of(a.weight)
    weight = own.values()

    def some(rows: slice) -> None:
        h = normed(a.x[rows], a.norm_weight, a.eps)
        y = matmul_nt(coded(h, own.coding, own.x_scale), weight)
        if a.lora is not None:
            y[:, : sum(a.lora.parts)] += lora_sums(h, a.lora, rows)
        a.out[rows] = y

    over_rows(len(a.x), some)


def _launches(target: Target, a: LinearArgs[Tensor]) -> Iterator[Command]:
    op, norm = "norm_linear" if a.out.dtype == a.x.dtype else "logits", Norm.of(a.norm_weight, a.eps)
    yield from linear.launches(Problem(target, op, a.out, a.x, linear_of(a.weight), "none", norm, a.lora))


def _cost(workload: Workload, a: LinearArgs[Tensor]) -> Cost:
    n, h = a.weight.shape[0], a.x.shape[1]
    tokens = workload.tokens if a.out.dtype == a.x.dtype else workload.rows
    weights = sum(t.nbytes for t in (a.weight, a.norm_weight) if t is not None)
    numbers = n * h + lora_numbers(a.lora)
    weights += lora_numbers(a.lora) * a.x.itemsize
    columns = h * a.x.itemsize + a.out.shape[1] * a.out.itemsize
    return Cost(weights + tokens * columns, 2 * tokens * numbers)


norm_linear = Op("norm_linear", LinearArgs[Tensor], _check, _reference, _launches, _cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GateArgs(LinearArgs[T], Generic[T]):
    """out = silu(g) * u with [g, u] = rms_norm(x; norm_weight, eps) @ weight^T.

    x [T, H], norm_weight [H], weight [2 I, H] (the gate's rows, then the up projection's), out [T, I], of one float
    dtype; norm_weight may also be float32 (as in norm_linear). g and u are rounded as outputs of a linear layer,
    silu(g) is rounded, and the product is rounded. H and I are multiples of 16. The weight may be a
    Linear as in norm_linear; in FP8 each half has blocks of its own (formats.linear, parts=2). Without norm_weight and
    eps, x is normalised already.

    lora: adapters of the product of the normalised x, before it is quantised, two parts (low_rank.Lora). With scales of
    blocks, I is then a multiple of 128.
    """


def _gate_check(a: _GateArgs[Tensor]) -> None:
    inter = _expect_product(a, parts=2) // 2
    expect("out", a.out, (a.x.shape[0], inter), a.x.dtype)
    if a.lora is not None:
        require(a.lora.parts == (inter, inter), f"two parts of {inter} columns are possible")
        require(
            linear_of(a.weight).form != Fp8(by_row=False) or inter % SCALE_BLOCK == 0,
            f"weight is {a.weight.shape} in float8; adapters are possible where each half is of whole blocks",
        )


def _gate_reference(a: _GateArgs[Array]) -> None:
    own = linear_of(a.weight)
    both = own.values(parts=2)

    def some(rows: slice) -> None:
        h = normed(a.x[rows], a.norm_weight, a.eps)
        y = matmul_nt(coded(h, own.coding, own.x_scale), both)
        if a.lora is not None:
            y += lora_sums(h, a.lora, rows)
        gate, up = np.split(rounded(y, a.x.dtype), 2, axis=1)
        a.out[rows] = rounded(silu(gate), a.x.dtype) * up

    over_rows(len(a.x), some)


def _gate_launches(target: Target, a: _GateArgs[Tensor]) -> Iterator[Command]:
    norm, weight = Norm.of(a.norm_weight, a.eps), linear_of(a.weight)
    yield from linear.launches(Problem(target, "gate_up_silu", a.out, a.x, weight, "gated", norm, a.lora))


gate_up_silu = Op("gate_up_silu", _GateArgs[Tensor], _gate_check, _gate_reference, _gate_launches, _cost)
