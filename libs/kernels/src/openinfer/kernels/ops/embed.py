"""embed: rows of the embedding table."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.op.contract import FLOATS, expect
from openinfer.kernels.op.launch import Aligned, Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(*, out: Tensor, token_ids: Tensor, table: Tensor) -> None:
    """out[t] = table[token_ids[t]].

    out [T, H], table [V, H] of one float dtype; token_ids int32 [T], each in [0, V).
    """
    expect("table", table, (-1, -1), *FLOATS)
    expect("token_ids", token_ids, (-1,), int32)
    expect("out", out, (token_ids.shape[0], table.shape[1]), table.dtype)


def _reference(*, out: Array, token_ids: Array, table: Array) -> None:
    out[:] = table[token_ids]


def _launches(target: Target, *, out: Tensor, token_ids: Tensor, table: Tensor) -> Iterator[Command]:
    tokens, width = out.shape
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "gather_rows",
        (tokens, -(-width // block)),
        {
            "out": out,
            "index": token_ids,
            "table": table,
            "width": Aligned(width) if width % 16 == 0 else width,
        },
        {"BLOCK": block},
    )


def _cost(workload: Workload, *, out: Tensor, token_ids: Tensor, table: Tensor) -> Cost:
    return Cost(2 * workload.tokens * out.shape[1] * out.itemsize, 0)


embed = Op("embed", _contract, reference=_reference, launches=_launches, cost=_cost)
