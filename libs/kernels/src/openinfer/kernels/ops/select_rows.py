"""select_rows: the last token of each row of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect
from openinfer.kernels.op.launch import Aligned, Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(*, out: Tensor, x: Tensor, q_starts: Tensor) -> None:
    """out[r] = x[q_starts[r + 1] - 1], or x[0] where that is -1 (empty first rows).

    out [R, H], x [T, H] of one float dtype; q_starts int32 [R + 1].
    """
    expect("x", x, (-1, -1), *FLOATS)
    expect("out", out, (-1, x.shape[1]), x.dtype)
    expect("q_starts", q_starts, (out.shape[0] + 1,), int32)


def _reference(*, out: Array, x: Array, q_starts: Array) -> None:
    out[:] = x[np.maximum(q_starts[1:] - 1, 0)]


def _launches(target: Target, *, out: Tensor, x: Tensor, q_starts: Tensor) -> Iterator[Command]:
    rows, width = out.shape
    block = 1024
    yield launch(
        "openinfer.kernels.device.rows",
        "gather_last",
        (rows, -(-width // block)),
        {"out": out, "x": x, "q_starts": q_starts, "width": Aligned(width) if width % 16 == 0 else width},
        {"BLOCK": block},
    )


def _cost(workload: Workload, *, out: Tensor, x: Tensor, q_starts: Tensor) -> Cost:
    return Cost(2 * workload.rows * out.shape[1] * out.itemsize, 0)


select_rows = Op("select_rows", _contract, reference=_reference, launches=_launches, cost=_cost)
