"""Ops in which the ranks that run one model together exchange arrays.

Every rank calls the same collectives in the same order, with arrays of the same shapes. Sums are float32, in the order
of the ranks, and rounded once, so every rank has the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, expect_normed, require
from openinfer.kernels.op.launch import Collective, CollectiveKind, Command
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.reference import normed as normed_of
from openinfer.kernels.op.target import Target
from openinfer.kernels.ranks import Communicator, sum_over
from openinfer.kernels.ranks.exchange import Normed, columns_of_ranks, sum_of_ranks
from openinfer.tensor import Tensor, float8_e4m3fn, uint8

CODES = (float8_e4m3fn, uint8)
"""Dtypes of op.coded.Coded, which can be gathered."""


def combine(kind: CollectiveKind, out: Array, x: Array, communicator: Communicator) -> None:
    """Run a collective on arrays, for references and the interpreter."""
    if kind == "all_gather":
        np.concatenate(communicator.exchange(x), out=out)
        return
    total = sum_over(communicator, x)
    if kind == "reduce_scatter":
        total = np.split(total, communicator.size)[communicator.rank]
    out[:] = total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    out: T
    x: T
    ranks: int


def _expect(name: str, a: _Args[Tensor], rows: int) -> None:
    require(a.ranks >= 1, f"{name} over {a.ranks} ranks; there must be one at least")
    expect("x", a.x, a.x.shape, *FLOATS, *(CODES if name == "all_gather" else ()))
    require(len(a.x.shape) >= 1, f"x of {name} has no axis; its first axis is cut up among ranks")
    expect("out", a.out, (rows, *a.x.shape[1:]), a.x.dtype)


def _all_reduce(a: _Args[Tensor]) -> None:
    """out = the sum of the x of all ranks.

    x and out [...] of one float dtype, dense; they may be one tensor. `ranks`: of the communicator.
    """
    _expect("all_reduce", a, a.x.shape[0])


def _all_gather(a: _Args[Tensor]) -> None:
    """out = the x of all ranks, one after the other along the first axis.

    x [N, ...] and out [ranks * N, ...] of one float dtype, float8 or uint8, dense. x may be this rank's place in out.
    """
    _expect("all_gather", a, a.ranks * a.x.shape[0])


def _reduce_scatter(a: _Args[Tensor]) -> None:
    """out = this rank's part of the sum of the x of all ranks, cut up along the first axis.

    x [ranks * N, ...] and out [N, ...] of one float dtype, dense. out may be this rank's place in x.
    """
    rows = a.x.shape[0]
    require(a.ranks >= 1 and rows % a.ranks == 0, f"x has {rows} rows, which {a.ranks} ranks cannot share")
    _expect("reduce_scatter", a, rows // a.ranks)


def _gather_columns(a: _Args[Tensor]) -> None:
    """out = the x of all ranks, one beside the other: columns r * C to (r + 1) * C are rank r's.

    x [N, C] and out [N, ranks * C] of one float dtype, dense, apart from each other. -0 may become +0.
    """
    require(a.ranks >= 1, f"gather_columns over {a.ranks} ranks; there must be one at least")
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("out", a.out, (a.x.shape[0], a.ranks * a.x.shape[1]), a.x.dtype)


def _op(name: str, check: Callable[[_Args[Tensor]], None], kind: CollectiveKind) -> Op[Any]:
    columns = name == "gather_columns"

    def reference(a: _Args[Array], communicator: Communicator | None) -> None:
        if communicator is None:
            a.out[:] = a.x
        elif columns:
            np.concatenate(communicator.exchange(a.x), axis=1, out=a.out)
        else:
            combine(kind, a.out, a.x, communicator)

    def launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
        if columns:
            yield from columns_of_ranks(target, a.out, a.x, a.ranks)
        elif kind == "all_reduce" and len(a.x.shape) == 2:
            yield from sum_of_ranks(target, a.out, a.x, a.ranks, add=False)
        else:
            yield Collective(kind, a.out, a.x, a.ranks)

    def cost(workload: Workload, a: _Args[Tensor]) -> Cost:
        """The whole tensors travel, of a padded step too. `link`: the least bytes that a rank must send."""
        return Cost(a.x.nbytes + a.out.nbytes, 0, Collective(kind, a.out, a.x, a.ranks).link_bytes)

    return Op(name, _Args[Tensor], check, reference, launches, cost, collective=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AddArgs(Generic[T]):
    """x += the sum of the y of all ranks, in place.

    x and y [T, H] of one float dtype, dense, apart from each other. The sum is float32, in the order of the ranks, and
    rounded once after the addition; an implementation may round the sum before it as well. y may be overwritten.

    normed [T, H] gets rms_norm(x; norm_weight, eps) of the new x, as norm_linear normalises. On GPUs that push the sum
    it is one kernel.
    """

    x: T
    y: T
    ranks: int
    normed: T | None = None
    norm_weight: T | None = None
    eps: float | None = None


def _check_add(a: _AddArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("y", a.y, a.x.shape, a.x.dtype)
    require(a.ranks >= 1, f"reduce_add over {a.ranks} ranks; there must be one at least")
    expect_normed(a.normed, a.norm_weight, a.eps, a.x)


def _add_reference(a: _AddArgs[Array], communicator: Communicator | None) -> None:
    a.x[:] = a.x.astype(np.float32) + sum_over(communicator, a.y)
    if a.normed is not None:
        a.normed[:] = normed_of(a.x, a.norm_weight, a.eps)


def _add_launches(target: Target, a: _AddArgs[Tensor]) -> Iterator[Command]:
    normed = Normed.of(a.normed, a.norm_weight, a.eps)
    yield from sum_of_ranks(target, a.x, a.y, a.ranks, normed=normed)


def _add_cost(workload: Workload, a: _AddArgs[Tensor]) -> Cost:
    """The whole tensors travel, of a padded step too."""
    moved = 2 * a.x.nbytes + a.y.nbytes + (a.normed.nbytes if a.normed is not None else 0)
    return Cost(moved, 0, Collective("all_reduce", a.y, a.y, a.ranks).link_bytes)


all_reduce = _op("all_reduce", _all_reduce, "all_reduce")
all_gather = _op("all_gather", _all_gather, "all_gather")
reduce_scatter = _op("reduce_scatter", _reduce_scatter, "reduce_scatter")
gather_columns = _op("gather_columns", _gather_columns, "all_gather")
reduce_add = Op(
    "reduce_add", _AddArgs[Tensor], _check_add, _add_reference, _add_launches, _add_cost, collective=True,
    writes=("x", "y", "normed"),
)  # fmt: skip
