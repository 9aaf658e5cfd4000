"""embed: rows of the embedding table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.op.contract import FLOATS, expect
from openinfer.kernels.op.launch import Aligned, Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """out[t] = table[token_ids[t]].

    out [T, H], table [V, H] of one float dtype; token_ids int32 [T], each in [0, V).
    """

    out: T
    token_ids: T
    table: T


def _check(a: _Args[Tensor]) -> None:
    expect("table", a.table, (-1, -1), *FLOATS)
    expect("token_ids", a.token_ids, (-1,), int32)
    expect("out", a.out, (a.token_ids.shape[0], a.table.shape[1]), a.table.dtype)


def _reference(a: _Args[Array]) -> None:
    a.out[:] = a.table[a.token_ids]


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    tokens, width = a.out.shape
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "gather_rows",
        (tokens, -(-width // block)),
        {
            "out": a.out,
            "index": a.token_ids,
            "table": a.table,
            "width": Aligned(width) if width % 16 == 0 else width,
        },
        {"BLOCK": block},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.out.shape[1] * a.out.itemsize, 0)


embed = Op("embed", _Args[Tensor], _check, _reference, _launches, _cost)
