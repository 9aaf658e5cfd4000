"""Ops in which the ranks that run one model together exchange arrays.

Every rank calls the same collectives in the same order, with arrays of the same shapes. Sums are float32, in the order
of the ranks, and rounded once, so every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, expect_normed, require
from openinfer.kernels.op.launch import Collective, CollectiveKind, Command
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.reference import normed as normed_of
from openinfer.kernels.op.target import Target
from openinfer.kernels.ranks.communicator import Communicator, sum_over
from openinfer.kernels.ranks.exchange import Normed, columns_of_ranks, sum_of_ranks
from openinfer.tensor import Tensor


def combine(kind: CollectiveKind, out: Array, x: Array, communicator: Communicator) -> None:
    """Run a collective on arrays, for references and the interpreter."""
    if kind == "all_gather":
        np.concatenate(communicator.exchange(x), out=out)
        return
    total = sum_over(communicator, x)
    if kind == "reduce_scatter":
        total = np.split(total, communicator.size)[communicator.rank]
    out[:] = total


def _expect(name: str, out: Tensor, x: Tensor, ranks: int, rows: int) -> None:
    require(ranks >= 1, f"{name} over {ranks} ranks; there must be one at least")
    expect("x", x, x.shape, *FLOATS)
    require(len(x.shape) >= 1, f"x of {name} has no axis; its first axis is cut up among ranks")
    expect("out", out, (rows, *x.shape[1:]), x.dtype)


def _all_reduce(*, out: Tensor, x: Tensor, ranks: int) -> None:
    """out = the sum of the x of all ranks.

    x and out [...] of one float dtype, dense; they may be one tensor. `ranks`: of the communicator.
    """
    _expect("all_reduce", out, x, ranks, x.shape[0])


def _all_gather(*, out: Tensor, x: Tensor, ranks: int) -> None:
    """out = the x of all ranks, one after the other along the first axis.

    x [N, ...] and out [ranks * N, ...] of one float dtype, dense, apart from each other.
    """
    _expect("all_gather", out, x, ranks, ranks * x.shape[0])


def _reduce_scatter(*, out: Tensor, x: Tensor, ranks: int) -> None:
    """out = this rank's part of the sum of the x of all ranks, cut up along the first axis.

    x [ranks * N, ...] and out [N, ...] of one float dtype, dense, apart from each other.
    """
    require(
        ranks >= 1 and x.shape[0] % ranks == 0, f"x has {x.shape[0]} rows, which {ranks} ranks cannot share"
    )
    _expect("reduce_scatter", out, x, ranks, x.shape[0] // ranks)


def _op(contract: Any, kind: CollectiveKind) -> Op[Any]:
    def reference(*, out: Array, x: Array, ranks: int, communicator: Communicator | None = None) -> None:
        if communicator is None:
            out[:] = x
        else:
            combine(kind, out, x, communicator)

    def launches(target: Target, *, out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
        if kind == "all_reduce" and len(x.shape) == 2:
            yield from sum_of_ranks(target, out, x, ranks, add=False)
        else:
            yield Collective(kind, out, x, ranks)

    def cost(workload: Workload, *, out: Tensor, x: Tensor, ranks: int) -> Cost:
        """The whole tensors travel, of a padded step too. `link`: the least bytes that a rank must send."""
        return Cost(x.nbytes + out.nbytes, 0, Collective(kind, out, x, ranks).link_bytes)

    return Op(kind, contract, reference=reference, launches=launches, cost=cost, collective=True)


def _reduce_add(
    *,
    x: Tensor,
    y: Tensor,
    ranks: int,
    normed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> None:
    """x += the sum of the y of all ranks, in place.

    x and y [T, H] of one float dtype, dense, apart from each other. The sum is float32, in the order of the ranks, and
    rounded once after the addition; an implementation may round the sum before it as well. y may be overwritten.

    normed [T, H] gets rms_norm(x; norm_weight, eps) of the new x, as norm_linear normalises. On GPUs that push the sum
    it is one kernel.
    """
    expect("x", x, (-1, -1), *FLOATS)
    expect("y", y, x.shape, x.dtype)
    require(ranks >= 1, f"reduce_add over {ranks} ranks; there must be one at least")
    expect_normed(normed, norm_weight, eps, x)


def _reduce_add_reference(
    *,
    x: Array,
    y: Array,
    ranks: int,
    normed: Array | None = None,
    norm_weight: Array | None = None,
    eps: float | None = None,
    communicator: Communicator | None = None,
) -> None:
    x[:] = x.astype(np.float32) + sum_over(communicator, y)
    if normed is not None:
        normed[:] = normed_of(x, norm_weight, eps)


def _reduce_add_launches(
    target: Target,
    *,
    x: Tensor,
    y: Tensor,
    ranks: int,
    normed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> Iterator[Command]:
    yield from sum_of_ranks(target, x, y, ranks, normed=Normed.of(normed, norm_weight, eps))


def _reduce_add_cost(
    workload: Workload, *, x: Tensor, y: Tensor, ranks: int, normed: Tensor | None = None, **_: object
) -> Cost:
    """The whole tensors travel, of a padded step too."""
    written = x.nbytes + (normed.nbytes if normed is not None else 0)
    return Cost(written + x.nbytes + y.nbytes, 0, Collective("all_reduce", y, y, ranks).link_bytes)


def _gather_columns(*, out: Tensor, x: Tensor, ranks: int) -> None:
    """out = the x of all ranks, one beside the other: columns r * C to (r + 1) * C are rank r's.

    x [N, C] and out [N, ranks * C] of one float dtype, dense, apart from each other. -0 may become +0.
    """
    require(ranks >= 1, f"gather_columns over {ranks} ranks; there must be one at least")
    expect("x", x, (-1, -1), *FLOATS)
    expect("out", out, (x.shape[0], ranks * x.shape[1]), x.dtype)


def _gather_columns_reference(
    *, out: Array, x: Array, ranks: int, communicator: Communicator | None = None
) -> None:
    np.concatenate([x] if communicator is None else communicator.exchange(x), axis=1, out=out)


def _gather_columns_launches(target: Target, *, out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
    yield from columns_of_ranks(target, out, x, ranks)


def _gather_columns_cost(workload: Workload, *, out: Tensor, x: Tensor, ranks: int) -> Cost:
    return Cost(x.nbytes + out.nbytes, 0, Collective("all_gather", out, x, ranks).link_bytes)


all_reduce = _op(_all_reduce, "all_reduce")
all_gather = _op(_all_gather, "all_gather")
reduce_scatter = _op(_reduce_scatter, "reduce_scatter")
reduce_add = Op(
    "reduce_add",
    _reduce_add,
    reference=_reduce_add_reference,
    launches=_reduce_add_launches,
    cost=_reduce_add_cost,
    collective=True,
)
gather_columns = Op(
    "gather_columns",
    _gather_columns,
    reference=_gather_columns_reference,
    launches=_gather_columns_launches,
    cost=_gather_columns_cost,
    collective=True,
)
