"""select_rows: the last token of each row of a step."""

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
class _Args(Generic[T]):
    """out[r] = x[q_starts[r + 1] - 1], or x[0] where that is -1 (empty first rows).

    out [R, H], x [T, H] of one float dtype; q_starts int32 [R + 1].
    """

    out: T
    x: T
    q_starts: T


def _check(a: _Args[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("out", a.out, (-1, a.x.shape[1]), a.x.dtype)
    expect("q_starts", a.q_starts, (a.out.shape[0] + 1,), int32)


def _reference(a: _Args[Array]) -> None:
    a.out[:] = a.x[np.maximum(a.q_starts[1:] - 1, 0)]


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, width = a.out.shape
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "gather_last",
        (rows, -(-width // block)),
        {
            "out": a.out,
            "x": a.x,
            "q_starts": a.q_starts,
            "width": Aligned(width) if width % 16 == 0 else width,
        },
        {"BLOCK": block},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(2 * workload.rows * a.out.shape[1] * a.out.itemsize, 0)


select_rows = Op("select_rows", _Args[Tensor], _check, _reference, _launches, _cost)
