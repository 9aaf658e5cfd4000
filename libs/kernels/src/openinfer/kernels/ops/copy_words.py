"""copy_words: a few results to memory of the host, by a kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.op.contract import expect
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """out = x, int32 [N] both. `out` may be page-locked memory of the host, which the device writes to. A copy engine
    would make this copy after all others of its direction; a kernel waits for none of them."""

    out: T
    x: T


def _check(a: _Args[Tensor]) -> None:
    expect("x", a.x, (-1,), int32)
    expect("out", a.out, a.x.shape, int32)


def _reference(a: _Args[Array]) -> None:
    a.out[:] = a.x


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "copy_words",
        (-(-a.x.shape[0] // block),),
        {"out": a.out, "x": a.x, "count": a.x.shape[0]},
        {"BLOCK": block},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(2 * a.x.nbytes, 0)


copy_words = Op("copy_words", _Args[Tensor], _check, _reference, _launches, _cost)
