"""apply_writes: scatter the host's changes into the batch state on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.op.contract import expect_each, require
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """words[index] = value for each of the writes.

    words: int32 [W], the batch state as 32-bit words. writes: int32 [1 + 2 * capacity]: the count n, then `capacity`
    indices, then `capacity` values; the first n of each are used. An index may come twice with the same value.
    """

    words: T
    writes: T


def _check(a: _Args[Tensor]) -> None:
    expect_each(a, (-1,), int32, "words", "writes")
    require(
        a.writes.shape[0] % 2 == 1, f"writes has {a.writes.shape[0]} words; it must have 1 + 2 * capacity"
    )


def _reference(a: _Args[Array]) -> None:
    count, capacity = int(a.writes[0]), (len(a.writes) - 1) // 2
    a.words[a.writes[1 : 1 + count]] = a.writes[1 + capacity : 1 + capacity + count]


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    capacity, block = (a.writes.shape[0] - 1) // 2, 256
    yield launch(
        "openinfer.kernels.device.rows",
        "scatter_words",
        (max(-(-capacity // block), 1),),
        {"words": a.words, "writes": a.writes, "capacity": capacity},
        {"BLOCK": block},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(0, 0)


apply_writes = Op("apply_writes", _Args[Tensor], _check, _reference, _launches, _cost)
