"""Exchanges between ranks as commands: a sum added onto the residual stream, and columns gathered side by side."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.norms import norm
from openinfer.kernels.op.contract import require
from openinfer.kernels.op.launch import (
    Aligned,
    Arg,
    Collective,
    Command,
    Launch,
    PeerTable,
    Scratch,
    aligned,
    launch,
    power_of_two,
)
from openinfer.kernels.op.target import Target
from openinfer.kernels.store.tables import EXCHANGES, Exchange, entry_for
from openinfer.tensor import Tensor, bfloat16

NCCL = Exchange("nccl")
MOST_PUSHED = 4 << 20
"""Bytes of a sum that the rule still pushes. Figures: docs/lessons/ranks.md."""
MOST_OF_TWO = 32 << 20
"""The same between two ranks, for sums whose kernel is push_sum."""
ROWS_OF_16 = 128
"""The most rows that programs of 16 warps push. Of 8 warps twice as many run at once."""
ONE_SHOT_SENT = 768 << 10
"""Bytes that a rank sends to more than one other up to which the rule takes one shot."""
PROGRAMS = 512
"""Rows that ranks push to each other at once, by one kernel; a slot holds as many. More rows are more kernels."""
WARPS = 2048
"""Warps of a kernel that pushes wide rows: a program of 16 an SM, because more may not be on the GPU at once."""
COLUMNS_BYTES = 4096
"""Bytes of a row of push_columns, whatever the model."""
SETS = 2
"""Sets of slots that take turns."""
MOST_COLUMNS = 1 << 30
"""Bytes of columns of all ranks below which they are pushed; their places are int32."""

_BLOCK = 1024
_DEVICE = "openinfer.kernels.device.push_sum"


@functools.cache
def choose_exchange(target: Target, ranks: int, rows: int, width: int, most: int = MOST_PUSHED) -> Exchange:
    """The way to add up bf16 [rows, width] over ranks. most: bytes that the rule still pushes."""
    if target.batch_invariant:
        return Exchange("push", 8)
    entry = entry_for(target.gpu, EXCHANGES, f"{ranks}x{width}", rows)
    return exchange_rule(ranks, rows, width, most) if entry is None else Exchange(**entry)


def exchange_rule(ranks: int, rows: int, width: int, most: int = MOST_PUSHED) -> Exchange:
    """The choice for a sum without a measurement. In one shot a rank sends its rows to each other rank; in two shots it
    sends them twice, less a part, and waits twice. NCCL alone has no bound of rows at once."""
    nbytes = 2 * rows * width
    if nbytes > most:
        return NCCL
    one_shot = ranks == 2 or nbytes * (ranks - 1) <= ONE_SHOT_SENT
    return Exchange("push" if one_shot else "two_shot", 16 if rows <= ROWS_OF_16 else 8)


class Normed(NamedTuple):
    """The RMS norm that follows a sum: `out` [T, H] = rms_norm(x; weight, eps)."""

    out: Tensor
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, out: Tensor | None, weight: Tensor | None, eps: float | None) -> "Normed | None":
        """The norm that the arguments of an op name; None where they name none."""
        return None if out is None or weight is None or eps is None else cls(out, weight, eps)


def sum_of_ranks(
    target: Target,
    x: Tensor,
    y: Tensor | Scratch,
    ranks: int,
    *,
    add: bool = True,
    normed: Normed | None = None,
    way: Exchange | None = None,
) -> Iterator[Command]:
    """x += the sum of the y of all ranks, or x = with add=False; then the norm of x. y may be overwritten. way: None
    takes way_of."""
    args: dict[str, Arg]
    way = way or way_of(target, ranks, x, MOST_OF_TWO if ranks == 2 else MOST_PUSHED)
    if way.kind != "nccl":  # by our own kernel, see device.push_sum
        rows, width = x.shape
        lanes = power_of_two(width // 8)
        out, weight, eps = normed or (x, x, 0.0)
        own = {"LANES": lanes, "ADD": add, "NORM": normed is not None, "TWO_SHOT": way.kind == "two_shot"}
        warps, early = min(way.warps, max(1, lanes // 32)), target.starts_early
        for pushed in pushed_rows(target, ranks, rows, width, warps):
            args = {"x": x, "y": y, "normed": out, "gain": weight, **pushed.args, "eps": eps}
            constants = {**pushed.constants, **own}
            yield launch(_DEVICE, "push_sum", pushed.grid, args, constants, num_warps=warps, early=early)
        return
    yield Collective("all_reduce", y if add else x, y, ranks)
    if add:
        count = x.numel
        args = {"x": x, "y": y, "count": aligned(count)}
        grid = (-(-count // _BLOCK),)
        yield launch("openinfer.kernels.device.rows", "add_rows", grid, args, {"BLOCK": _BLOCK})
    if normed is not None:
        yield norm(normed.out, x, normed.weight, normed.eps)


def way_of(target: Target, ranks: int, x: Tensor, most: int = MOST_PUSHED) -> Exchange:
    """The way to add up an x [T, H] of each rank. most: bytes that are pushed without a measurement."""
    rows, width = x.shape
    if target.interpreted or x.dtype != bfloat16 or width % 8:
        invariant = target.batch_invariant and not target.interpreted
        require(not invariant, f"NCCL adds {x.dtype.name} [{rows}, {width}] in an order that depends on rows")
        return NCCL
    return choose_exchange(target, ranks, rows, width, most)


class PushedRows(NamedTuple):
    """The part of a launch that every kernel that pushes needs: arguments peers, rank and first, the constants WIDTH,
    RANKS, SLOT, BASE and COUNTS, and the grid. Program p has row first + p."""

    args: dict[str, Arg]
    constants: dict[str, int]
    grid: tuple[int]


def pushed_rows(target: Target, ranks: int, rows: int, width: int, warps: int) -> Iterator[PushedRows]:
    """A launch after the other for bf16 [rows, width], by programs of `warps`. All rows that a model pushes have
    one width."""
    base, at_once = segment_bytes(ranks, 0), min(PROGRAMS, WARPS // warps)
    yield from _pushed(target, ranks, rows, 2 * width, at_once, PeerTable(2 * width), base, PROGRAMS)


def _pushed(
    target: Target, ranks: int, rows: int, nbytes: int, at_once: int, peers: PeerTable, base: int, counts: int
) -> Iterator[PushedRows]:
    constants = {"WIDTH": nbytes // 2, "RANKS": ranks, "SLOT": PROGRAMS * nbytes}
    constants |= {"BASE": base, "COUNTS": counts}
    for first in range(0, rows, at_once):
        args: dict[str, Arg] = {"peers": peers, "rank": target.rank, "first": first}
        yield PushedRows(args, constants, (min(rows - first, at_once),))


def segment_bytes(ranks: int, width: int) -> int:
    """Bytes of a rank's segment where rows of sums have `width` bytes."""
    return SETS * ranks * PROGRAMS * (COLUMNS_BYTES + width)


def table_of(addresses: Sequence[int], lost: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The table that device.push_sum describes, at the start. addresses: of the ranks' segments."""
    return np.array([*addresses, lost, 0, *[0] * PROGRAMS], np.int64)  # two counts a program are a word


def columns_of_ranks(target: Target, out: Tensor, x: Tensor, ranks: int) -> Iterator[Command]:
    """out [N, ranks * C] = the x [N, C] of all ranks side by side."""
    rows, width = x.shape
    part = width * x.itemsize
    if not target.interpreted and part % 16 == 0 and ranks * x.nbytes < MOST_COLUMNS:
        count = -(-x.nbytes // COLUMNS_BYTES)
        for pushed in _pushed(target, ranks, count, COLUMNS_BYTES, PROGRAMS, PeerTable(None), 0, 0):
            own: dict[str, Arg] = {"out": out, "x": x, **pushed.args, "nbytes": x.nbytes}
            own["part"] = Aligned(part)
            yield launch(_DEVICE, "push_columns", pushed.grid, own, pushed.constants, num_warps=8)
        return
    if rows == 1:
        yield Collective("all_gather", out, x, ranks)
        return
    parts = Scratch((ranks * rows, width), x.dtype)
    yield Collective("all_gather", parts, x, ranks)
    args: dict[str, Arg] = {"out": out, "parts": parts, "rows": rows, "width": aligned(width), "ranks": ranks}
    grid = (rows * ranks, -(-width // _BLOCK))
    yield launch("openinfer.kernels.device.rows", "join_columns", grid, args, {"BLOCK": _BLOCK})


def described(command: Command) -> str | None:
    """How ranks carry out a command of this module, or of another kernel that pushes; None for other commands."""
    if isinstance(command, Collective):
        return f"NCCL's {command.kind} of {list(command.x.shape)}"
    if not isinstance(command, Launch):
        return None
    args = dict(zip((name for name, _ in command.spec.signature), command.args, strict=True))
    constants = dict(command.spec.constants)
    if "peers" not in args:
        return None
    shots, rows = "two shots" if constants.get("TWO_SHOT") else "one shot", command.grid[0]
    if command.spec.function == "push_columns":
        return f"columns pushed, {2 * rows * constants['WIDTH']} bytes"
    norm = " with the norm" if constants.get("NORM") else ""
    return f"sum in {shots} of [{rows}, {constants['WIDTH']}]{norm}"
