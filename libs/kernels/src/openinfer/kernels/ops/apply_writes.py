"""apply_writes: scatter the host's changes into the batch state on the device."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.op.contract import expect, require
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(*, words: Tensor, writes: Tensor) -> None:
    """words[index] = value for each of the writes.

    words: int32 [W], the batch state as 32-bit words. writes: int32 [1 + 2 * capacity]: the count n, then `capacity`
    indices, then `capacity` values; the first n of each are used. An index may come twice with the same value.
    """
    expect("words", words, (-1,), int32)
    expect("writes", writes, (-1,), int32)
    require(writes.shape[0] % 2 == 1, f"writes has {writes.shape[0]} words; it must have 1 + 2 * capacity")


def _reference(*, words: Array, writes: Array) -> None:
    count, capacity = int(writes[0]), (len(writes) - 1) // 2
    words[writes[1 : 1 + count]] = writes[1 + capacity : 1 + capacity + count]


def _launches(target: Target, *, words: Tensor, writes: Tensor) -> Iterator[Command]:
    capacity, block = (writes.shape[0] - 1) // 2, 256
    yield launch(
        "openinfer.kernels.device.rows",
        "scatter_words",
        (max(-(-capacity // block), 1),),
        {"words": words, "writes": writes, "capacity": capacity},
        {"BLOCK": block},
    )


def _cost(workload: Workload, *, words: Tensor, writes: Tensor) -> Cost:
    return Cost(0, 0)


apply_writes = Op("apply_writes", _contract, reference=_reference, launches=_launches, cost=_cost)
