"""project: a linear layer. gate_up_clamped: the first half of a clamped gated MLP. norm_rows, code_rows: an RMS norm
and q8 by themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from openinfer.kernels.formats.fp8 import Mx
from openinfer.kernels.formats.linear import Linear, Plain, expect_linear, linear_of
from openinfer.kernels.linear import kernels as linear
from openinfer.kernels.linear import mx
from openinfer.kernels.linear.problem import Problem, expect_q8
from openinfer.kernels.op.cases import Memory, OpCase
from openinfer.kernels.op.coded import Coded, decoded, expect_values, in_blocks, write_values
from openinfer.kernels.op.contract import FLOATS, expect, expect_columns, require
from openinfer.kernels.op.launch import Command, Scratch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array, f32, matmul_nt, rms_norm, rounded, silu
from openinfer.kernels.op.rounding import SCALE_BLOCK
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float32


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProjectArgs(Generic[T]):
    """out = x @ weight^T; in `groups`, each with an equal part of the columns of x and of the rows of weight.

    x [T, G K], rows at any stride, or Coded where G is 1: products with float8 weights may then be of codes. weight
    [N, K] of x's dtype, or a Linear of FP8 with E8M0 scales. out [T, N] of x's dtype, or float32 (not rounded): rows
    g N / G .. of weight times columns g K .. of x. Accumulated in float32 and rounded once; where out is Coded the
    rounded values go through q8. N / G and K are multiples of 16.
    """

    out: Coded[T] | T
    x: Coded[T] | T
    weight: Linear[T] | T
    groups: int


def _project_check(a: _ProjectArgs[Tensor]) -> None:
    if isinstance(a.x, Coded):
        expect_values("x", a.x, (-1, -1), *FLOATS)
        require(a.groups == 1, f"x is codes in {a.groups} groups; codes are of one")
    else:
        expect_columns("x", a.x, (-1, -1), *FLOATS)
    (tokens, width), groups = a.x.shape, a.groups
    require(groups >= 1 and width % groups == 0, f"x has {width} columns, which {groups} groups cannot share")
    expect_linear("weight", linear_of(a.weight), (-1, width // groups), a.x.dtype, Plain, Mx)
    rows = a.weight.shape[0]
    expect_values("out", a.out, (tokens, rows), a.x.dtype, float32)
    require(
        rows % (16 * a.groups) == 0 and width // a.groups % 16 == 0,
        f"weight is {a.weight.shape} in {a.groups} groups; rows of a group and columns must be multiples of 16",
    )


def _project_reference(a: _ProjectArgs[Array]) -> None:
    x, wide, (n, k) = decoded(a.x), linear_of(a.weight).values(), a.weight.shape
    each = n // a.groups
    y = np.empty(a.out.shape, np.float32)
    for g in range(a.groups):
        part = slice(g * each, (g + 1) * each)
        y[:, part] = matmul_nt(x[:, g * k : (g + 1) * k], wide[part])
    write_values(a.out, rounded(y, a.out.dtype))


def _project_launches(target: Target, a: _ProjectArgs[Tensor]) -> Iterator[Command]:
    expect_q8(target, isinstance(a.x, Coded) or isinstance(a.out, Coded))
    out = Scratch(a.out.shape, bfloat16) if isinstance(a.out, Coded) else a.out
    x, scales = _codes(a.x)
    weight = linear_of(a.weight)
    yield from linear.launches(Problem(target, "project", out, x, weight, x_scales=scales, groups=a.groups))
    if isinstance(a.out, Coded):
        yield mx.launch_code_rows(target, a.out, out)


def _codes(x: Coded[Tensor] | Tensor) -> tuple[Tensor, Tensor | None]:
    return (x.codes, x.scales) if isinstance(x, Coded) else (x, None)


def _cost(workload: Workload, a: "_ProjectArgs[Tensor] | _GateUpClampedArgs[Tensor]") -> Cost:
    n, k = a.weight.shape
    activations = workload.tokens * (a.x.nbytes + a.out.nbytes) // a.x.shape[0]
    return Cost(a.weight.nbytes + activations, 2 * workload.tokens * n * k)


project = Op("project", _ProjectArgs[Tensor], _project_check, _project_reference, _project_launches, _cost)


def clamped_product(gate: Array, up: Array, limit: float) -> Array:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    top = np.float32(limit)
    return np.asarray(silu(np.minimum(gate, top)) * np.clip(up, -top, top))


@dataclass(frozen=True, kw_only=True, slots=True)
class _GateUpClampedArgs(Generic[T]):
    """out = silu(min(g, limit)) * clamp(u, -limit, limit) with [g, u] = x @ weight^T.

    x [T, K], or Coded. weight [2 I, K]: the gate's rows, then the up projection's; of x's dtype, or a Linear of FP8
    with E8M0 scales (parts=2). out [T, I] of x's dtype, or Coded. g and u are rounded as outputs of a linear layer. The
    product is in float32 and rounded, and goes through q8 where out is Coded. K is a multiple of 16. I is a multiple of
    128, or 16, 32 or 64.
    """

    out: Coded[T] | T
    x: Coded[T] | T
    weight: Linear[T] | T
    limit: float


def _gate_check(a: _GateUpClampedArgs[Tensor]) -> None:
    expect_values("x", a.x, (-1, -1), *FLOATS)
    expect_values("out", a.out, (a.x.shape[0], -1), a.x.dtype)
    inter, width = a.out.shape[1], a.x.shape[1]
    expect_linear("weight", linear_of(a.weight), (2 * inter, width), a.x.dtype, Plain, Mx, parts=2)
    require(width % 16 == 0, f"x has {width} columns; it must be a multiple of 16")
    whole = inter % 16 == 0 and in_blocks(inter)
    require(whole, f"out has {inter} columns; it must be a multiple of {SCALE_BLOCK}")
    require(a.limit > 0, f"limit is {a.limit}; it must be positive")


def _gate_reference(a: _GateUpClampedArgs[Array]) -> None:
    x, dtype = decoded(a.x), a.x.dtype
    gate, up = (rounded(matmul_nt(x, half), dtype) for half in linear_of(a.weight).halves())
    write_values(a.out, rounded(clamped_product(gate, up, a.limit), dtype))


def _gate_launches(target: Target, a: _GateUpClampedArgs[Tensor]) -> Iterator[Command]:
    expect_q8(target, isinstance(a.x, Coded) or isinstance(a.out, Coded))
    both, weight = Scratch((a.x.shape[0], a.weight.shape[0]), bfloat16), linear_of(a.weight)
    x, scales = _codes(a.x)
    yield from linear.launches(Problem(target, "project", both, x, weight, x_scales=scales, parts=2))
    yield mx.launch_clamped_gate(target, a.out, both, a.limit)


gate_up_clamped = Op(
    "gate_up_clamped", _GateUpClampedArgs[Tensor], _gate_check, _gate_reference, _gate_launches, _cost
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _NormRowsArgs(Generic[T]):
    """out = norm_weight * x / rms(x), rounded once. x [T, D]; out like x, or Coded; norm_weight float32 [D]."""

    out: Coded[T] | T
    x: T
    norm_weight: T
    eps: float


def _norm_check(a: _NormRowsArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect_values("out", a.out, a.x.shape, a.x.dtype)
    expect("norm_weight", a.norm_weight, (a.x.shape[1],), float32)
    require(a.eps > 0, f"eps is {a.eps}; it must be positive")


def _norm_reference(a: _NormRowsArgs[Array]) -> None:
    write_values(a.out, rms_norm(a.x, a.norm_weight, a.eps))


def _norm_launches(target: Target, a: _NormRowsArgs[Tensor]) -> Iterator[Command]:
    expect_q8(target, isinstance(a.out, Coded))
    yield mx.launch_norm_rows(target, a.out, a.x, a.norm_weight, a.eps)


def _norm_cost(workload: Workload, a: _NormRowsArgs[Tensor]) -> Cost:
    numbers = workload.tokens * a.x.shape[1]
    return Cost(4 * a.x.shape[1] + 2 * numbers * a.x.itemsize, 4 * numbers)


norm_rows = Op("norm_rows", _NormRowsArgs[Tensor], _norm_check, _norm_reference, _norm_launches, _norm_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CodeRowsArgs(Generic[T]):
    """out = x [T, D] of a float dtype, through q8."""

    out: Coded[T]
    x: T


def _code_check(a: _CodeRowsArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect_values("out", a.out, a.x.shape, a.x.dtype)


def _code_launches(target: Target, a: _CodeRowsArgs[Tensor]) -> Iterator[Command]:
    expect_q8(target, True)
    yield mx.launch_code_rows(target, a.out, a.x)


code_rows = Op(
    "code_rows", _CodeRowsArgs[Tensor], _code_check, lambda a: write_values(a.out, f32(a.x)), _code_launches,
    lambda workload, a: Cost(workload.tokens * (a.x.nbytes + a.out.nbytes) // a.x.shape[0], 0),
)  # fmt: skip


def cases(memory: Memory) -> Iterator[OpCase]:
    """DeepSeek-V4-Flash's projections and its shared expert's gate."""
    layers = {  # rows, columns, groups, whether the weight is FP8
        "wq_a and wkv": (1536, 4096, 1, True), "wq_b": (32768, 1024, 1, True), "wo_a": (8192, 4096, 8, True),
        "wo_b": (4096, 8192, 1, True), "router": (256, 4096, 1, False), "compressor": (2624, 4096, 1, False),
    }  # fmt: skip

    def weight(n: int, k: int, packed: bool) -> Linear[Tensor]:
        if not packed:
            return Linear(memory.normal(n, k, scale=k**-0.5))
        scales = memory.codes(-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK), low=118, high=121)
        return Linear(memory.float8(n, k), scales)

    for tokens in (1, 8, 32, 128, 1024, 4096):
        workload = Workload(tokens, tokens, 0, 0)
        for name, (n, k, groups, packed) in layers.items():
            codes = packed and groups == 1
            args: dict[str, Any] = {
                "out": memory.empty(tokens, n, dtype=bfloat16 if packed else float32),
                "x": memory.coded(tokens, k) if codes else memory.normal(tokens, groups * k),
                "weight": weight(n, k, packed), "groups": groups,
            }  # fmt: skip
            yield OpCase(
                f"V4-Flash {name}, {tokens} tokens", project, memory.copies(args, "weight"), workload
            )
        args = {
            "out": memory.coded(tokens, 2048, empty=True), "x": memory.coded(tokens, 4096),
            "weight": weight(4096, 4096, True), "limit": 10.0,
        }  # fmt: skip
        copies = memory.copies(args, "weight")
        yield OpCase(f"V4-Flash shared expert, {tokens} tokens", gate_up_clamped, copies, workload)
