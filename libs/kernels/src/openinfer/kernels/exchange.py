"""Exchanges between ranks as commands: a sum added onto the residual stream, and columns gathered side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from openinfer.kernels.launch import Arg, Collective, Command, Peers, Scratch, aligned, launch, power_of_two
from openinfer.kernels.products import norm
from openinfer.kernels.target import Target
from openinfer.kernels.tuning import NCCL, Exchange, choose_exchange
from openinfer.tensor import Tensor, bfloat16

PROGRAMS = 512
"""Rows that ranks push to each other at once; a slot holds as many. More rows take turns."""
_BLOCK = 1024


class Normed(NamedTuple):
    """The RMS norm that follows a sum: `out` [T, H] = rms_norm(x; weight, eps)."""

    out: Tensor
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, out: Tensor | None, weight: Tensor | None, eps: float | None) -> Normed | None:
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
) -> Iterator[Command]:
    """x += the sum of the y of all ranks, or x = with add=False; then the norm of x. y may be overwritten."""
    rows, width = x.shape
    choice = NCCL
    if not target.interpreted and x.dtype == bfloat16 and width % 8 == 0:
        choice = choose_exchange(target, ranks, rows, width)
    yield from sum_by(choice, target, x, y, ranks, add=add, normed=normed)


def sum_by(
    choice: Exchange,
    target: Target,
    x: Tensor,
    y: Tensor | Scratch,
    ranks: int,
    *,
    add: bool = True,
    normed: Normed | None = None,
) -> Iterator[Command]:
    """sum_of_ranks in the way of `choice`."""
    if choice.kind != "nccl":
        yield _push(choice, target, x, y, ranks, add, normed)
        return
    yield Collective("all_reduce", y if add else x, y, ranks)
    if add:
        count = x.numel
        args: dict[str, Arg] = {"x": x, "y": y, "count": aligned(count)}
        grid = (-(-count // _BLOCK),)
        yield launch("openinfer.kernels.device.rows", "add_rows", grid, args, {"BLOCK": _BLOCK})
    if normed is not None:
        yield norm(normed.out, x, normed.weight, normed.eps)


def _push(
    choice: Exchange,
    target: Target,
    x: Tensor,
    y: Tensor | Scratch,
    ranks: int,
    add: bool,
    normed: Normed | None,
) -> Command:
    """The sum by our own kernel, see device.push_sum."""
    rows, width = x.shape
    lanes, pushed = power_of_two(width // 8), pushed_rows(target, ranks, rows, width)
    out, weight, eps = normed or (x, x, 0.0)
    args: dict[str, Arg] = {"x": x, "y": y, "normed": out, "gain": weight, **pushed.args, "eps": eps}
    constants = {
        **pushed.constants,
        "LANES": lanes,
        "ADD": add,
        "NORM": normed is not None,
        "TWO_SHOT": choice.kind == "two_shot",
    }
    warps = min(choice.warps, max(1, lanes // 32))
    return launch(
        "openinfer.kernels.device.push_sum", "push_sum", pushed.grid, args, constants, num_warps=warps
    )


class PushedRows(NamedTuple):
    """The part of a launch that device.push_sum's `exchanged` needs: arguments peers, rank and rows, the constants
    WIDTH, RANKS and SLOT, and the grid."""

    args: dict[str, Arg]
    constants: dict[str, int]
    grid: tuple[int]


def pushed_rows(target: Target, ranks: int, rows: int, width: int) -> PushedRows:
    """For bf16 [rows, width]. All rows that a model's kernels push have one width."""
    args: dict[str, Arg] = {"peers": Peers(2 * width), "rank": target.rank, "rows": rows}
    constants = {"WIDTH": width, "RANKS": ranks, "SLOT": PROGRAMS * 2 * width}
    return PushedRows(args, constants, (min(rows, PROGRAMS),))


def pushes(target: Target, ranks: int, rows: int, width: int) -> bool:
    """Whether a kernel of one shot is the way to add up bf16 [rows, width]."""
    return not target.interpreted and choose_exchange(target, ranks, rows, width).kind == "push"


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
