"""Exchanges between ranks as commands: a sum added onto the residual stream, and columns gathered side by side."""

from __future__ import annotations

from collections.abc import Iterator

from openinfer.kernels.launch import Arg, Collective, Command, Peers, Scratch, aligned, launch, power_of_two
from openinfer.kernels.target import Target
from openinfer.tensor import Tensor, bfloat16

PROGRAMS = 128
"""Rows that ranks push to each other at once; a slot holds as many. More rows take turns."""
MOST_BYTES = 1 << 20
"""Bytes that a rank pushes, to all others together. NCCL takes larger sums: it sends each byte twice and no more."""

_BLOCK = 1024


def sum_of_ranks(
    target: Target, x: Tensor, y: Tensor | Scratch, ranks: int, *, add: bool = True
) -> Iterator[Command]:
    """x += the sum of the y of all ranks, or x = with add=False. y may be overwritten."""
    rows, width = x.shape
    pushes = not target.interpreted and x.dtype == bfloat16 and width % 8 == 0
    few = rows <= PROGRAMS and x.nbytes * (ranks - 1) <= MOST_BYTES
    if pushes and (few or target.batch_invariant):
        yield _push(target, x, y, ranks, add)
        return
    yield Collective("all_reduce", y if add else x, y, ranks)
    if add:
        count = rows * width
        args: dict[str, Arg] = {"x": x, "y": y, "count": aligned(count)}
        grid = (-(-count // _BLOCK),)
        yield launch("openinfer.kernels.device.rows", "add_rows", grid, args, {"BLOCK": _BLOCK})


def _push(target: Target, x: Tensor, y: Tensor | Scratch, ranks: int, add: bool) -> Command:
    """The sum by our own kernel: each rank writes its rows to all others."""
    rows, width = x.shape
    lanes = power_of_two(width // 8)
    args: dict[str, Arg] = {
        "x": x,
        "y": y,
        "peers": Peers(2 * width),
        "rank": target.rank,
        "rows": rows,
    }
    constants = {
        "WIDTH": width,
        "RANKS": ranks,
        "SLOT": PROGRAMS * 2 * width,
        "LANES": lanes,
        "ADD": add,
    }
    grid = (min(rows, PROGRAMS),)
    warps = min(16, max(1, lanes // 32))
    return launch("openinfer.kernels.device.push_sum", "push_sum", grid, args, constants, num_warps=warps)


def columns_of_ranks(out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
    """out [N, ranks * C] = the x [N, C] of all ranks side by side."""
    rows, width = x.shape
    if rows == 1:
        yield Collective("all_gather", out, x, ranks)
        return
    parts = Scratch((ranks * rows, width), x.dtype)
    yield Collective("all_gather", parts, x, ranks)
    args: dict[str, Arg] = {
        "out": out,
        "parts": parts,
        "rows": rows,
        "width": aligned(width),
        "ranks": ranks,
    }
    grid = (rows * ranks, -(-width // _BLOCK))
    yield launch("openinfer.kernels.device.rows", "join_columns", grid, args, {"BLOCK": _BLOCK})
