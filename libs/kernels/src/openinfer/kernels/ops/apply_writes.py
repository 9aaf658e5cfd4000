"""apply_writes: scatter the host's changes into the batch state on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.op.contract import expect, expect_each, require
from openinfer.kernels.op.launch import Arg, Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32

_DEVICE = "openinfer.kernels.device.rows"


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
    paired = a.writes.shape[0] % 2 == 1
    require(paired, f"writes has {a.writes.shape[0]} words; it must have 1 + 2 * capacity")


def _reference(a: _Args[Array]) -> None:
    count, capacity = int(a.writes[0]), (len(a.writes) - 1) // 2
    a.words[a.writes[1 : 1 + count]] = a.writes[1 + capacity : 1 + capacity + count]


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    capacity, block = (a.writes.shape[0] - 1) // 2, 256
    args: dict[str, Arg] = {**tensors(a), "capacity": capacity}
    yield launch(_DEVICE, "scatter_words", (max(-(-capacity // block), 1),), args, {"BLOCK": block})


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(0, 0)


apply_writes = Op("apply_writes", _Args[Tensor], _check, _reference, _launches, _cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CopyArgs(Generic[T]):
    """out = x, int32 [N] both. `out` may be page-locked memory of the host, which the device writes to. A copy engine
    would make this copy after all others of its direction; a kernel waits for none of them."""

    out: T
    x: T


def _copy_check(a: _CopyArgs[Tensor]) -> None:
    expect("x", a.x, (-1,), int32)
    expect("out", a.out, a.x.shape, int32)


def _copy_reference(a: _CopyArgs[Array]) -> None:
    a.out[:] = a.x


def _copy_launches(target: Target, a: _CopyArgs[Tensor]) -> Iterator[Command]:
    count, block = a.x.shape[0], 1024
    args: dict[str, Arg] = {**tensors(a), "count": count}
    yield launch(_DEVICE, "copy_words", (-(-count // block),), args, {"BLOCK": block})


def _copy_cost(workload: Workload, a: _CopyArgs[Tensor]) -> Cost:
    return Cost(2 * a.x.nbytes, 0)


copy_words = Op("copy_words", _CopyArgs[Tensor], _copy_check, _copy_reference, _copy_launches, _copy_cost)
