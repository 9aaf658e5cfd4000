"""embed: rows of the embedding table. select_rows: the last token of each row of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect
from openinfer.kernels.op.launch import Aligned, Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _EmbedArgs(Generic[T]):
    """out[t] = table[token_ids[t]].

    out [T, H], table [V, H] of one float dtype; token_ids int32 [T], each in [0, V).
    """

    out: T
    token_ids: T
    table: T


def _check_embed(a: _EmbedArgs[Tensor]) -> None:
    expect("table", a.table, (-1, -1), *FLOATS)
    expect("token_ids", a.token_ids, (-1,), int32)
    expect("out", a.out, (a.token_ids.shape[0], a.table.shape[1]), a.table.dtype)


def _embed(a: _EmbedArgs[Array]) -> None:
    a.out[:] = a.table[a.token_ids]


def _embed_launches(target: Target, a: _EmbedArgs[Tensor]) -> Iterator[Command]:
    yield _gather("gather_rows", a.out, {"index": a.token_ids, "table": a.table})


def _embed_cost(workload: Workload, a: _EmbedArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.out.shape[1] * a.out.itemsize, 0)


embed = Op("embed", _EmbedArgs[Tensor], _check_embed, _embed, _embed_launches, _embed_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SelectArgs(Generic[T]):
    """out[r] = x[q_starts[r + 1] - 1], or x[0] where that is -1 (empty first rows).

    out [R, H], x [T, H] of one float dtype; q_starts int32 [R + 1].
    """

    out: T
    x: T
    q_starts: T


def _check_select(a: _SelectArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("out", a.out, (-1, a.x.shape[1]), a.x.dtype)
    expect("q_starts", a.q_starts, (a.out.shape[0] + 1,), int32)


def _select(a: _SelectArgs[Array]) -> None:
    a.out[:] = a.x[np.maximum(a.q_starts[1:] - 1, 0)]


def _select_launches(target: Target, a: _SelectArgs[Tensor]) -> Iterator[Command]:
    yield _gather("gather_last", a.out, {"x": a.x, "q_starts": a.q_starts})


def _select_cost(workload: Workload, a: _SelectArgs[Tensor]) -> Cost:
    return Cost(2 * workload.rows * a.out.shape[1] * a.out.itemsize, 0)


select_rows = Op("select_rows", _SelectArgs[Tensor], _check_select, _select, _select_launches, _select_cost)


def _gather(kernel: str, out: Tensor, sources: dict[str, Tensor]) -> Command:
    """A launch that copies rows."""
    (rows, width), block = out.shape, 1024
    length = Aligned(width) if width % 16 == 0 else width
    args = {"out": out, **sources, "width": length}
    return launch("openinfer.kernels.device.rows", kernel, (rows, -(-width // block)), args, {"BLOCK": block})
