"""copy_words: a few results to memory of the host, by a kernel."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.op.contract import expect
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(*, out: Tensor, x: Tensor) -> None:
    """out = x, int32 [N] both. `out` may be page-locked memory of the host, which the device writes to. A copy engine
    would make this copy after all others of its direction; a kernel waits for none of them."""
    expect("x", x, (-1,), int32)
    expect("out", out, x.shape, int32)


def _reference(*, out: Array, x: Array) -> None:
    out[:] = x


def _launches(target: Target, *, out: Tensor, x: Tensor) -> Iterator[Command]:
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "copy_words",
        (-(-x.shape[0] // block),),
        {"out": out, "x": x, "count": x.shape[0]},
        {"BLOCK": block},
    )


def _cost(workload: Workload, *, out: Tensor, x: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 0)


copy_words = Op("copy_words", _contract, reference=_reference, launches=_launches, cost=_cost)
