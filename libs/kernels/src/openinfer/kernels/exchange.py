"""Exchanges between ranks as commands: a sum added onto the residual stream, and columns gathered side by side."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.launch import Arg, Collective, Command, Scratch, aligned, launch
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor

_BLOCK = 1024


def sum_of_ranks(target: Target, x: Tensor, y: Tensor | Scratch, ranks: int) -> Iterator[Command]:
    """x += the sum of the y of all ranks. y is overwritten."""
    yield Collective("all_reduce", y, y, ranks)
    count = x.shape[0] * x.shape[1]
    args: dict[str, Arg] = {"x": x, "y": y, "count": aligned(count)}
    yield launch("openinfer.kernels.device.rows", "add_rows", (-(-count // _BLOCK),), args, {"BLOCK": _BLOCK})


def columns_of_ranks(out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
    """out [N, ranks * C] = the x [N, C] of all ranks side by side."""
    rows, width = x.shape
    if rows == 1:
        yield Collective("all_gather", out, x, ranks)
        return
    parts = Scratch((ranks * rows, width), x.dtype)
    yield Collective("all_gather", parts, x, ranks)
    args: dict[str, Arg] = {"out": out, "parts": parts, "rows": rows, "width": aligned(width), "ranks": ranks}
    yield launch(
        "openinfer.kernels.device.rows",
        "join_columns",
        (rows * ranks, -(-width // _BLOCK)),
        args,
        {"BLOCK": _BLOCK},
    )
