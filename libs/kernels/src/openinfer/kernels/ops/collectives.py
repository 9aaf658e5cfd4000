"""all_reduce, all_gather and reduce_scatter: arrays of the ranks that run one model together.

Every rank calls the same collectives in the same order, with arrays of the same shapes. Sums are float32, in the order
of the ranks, and rounded once, so every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from openinfer.kernels.communicator import Communicator
from openinfer.kernels.contract import FLOATS, expect, require
from openinfer.kernels.launch import Collective, CollectiveKind, Command
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.reference import Array
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor


def combine(kind: CollectiveKind, out: Array, x: Array, communicator: Communicator) -> None:
    """Run a collective on arrays, for references and the interpreter."""
    parts = communicator.exchange(x)
    if kind == "all_gather":
        np.concatenate(parts, out=out)
        return
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
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
    def reference(communicator: Communicator, *, out: Array, x: Array, ranks: int) -> None:
        combine(kind, out, x, communicator)

    def launches(target: Target, *, out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
        yield Collective(kind, out, x, ranks)

    def cost(workload: Workload, *, out: Tensor, x: Tensor, ranks: int) -> Cost:
        """The whole tensors travel, of a padded step too. `link`: the least bytes that a rank must send."""
        return Cost(x.nbytes + out.nbytes, 0, Collective(kind, out, x, ranks).link_bytes)

    return Op(kind, contract, reference=reference, launches=launches, cost=cost, collective=True)


all_reduce = _op(_all_reduce, "all_reduce")
all_gather = _op(_all_gather, "all_gather")
reduce_scatter = _op(_reduce_scatter, "reduce_scatter")
