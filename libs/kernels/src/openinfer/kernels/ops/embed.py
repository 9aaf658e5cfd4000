"""embed: rows of the embedding table. select_rows: the last token of each row. expand_rows: from rows to tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import FLOATS, expect, expect_each, expect_rows, require
from openinfer.kernels.op.launch import Arg, Command, aligned, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32

_DEVICE = "openinfer.kernels.device.rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class _EmbedArgs(Generic[T]):
    """out[t] = table[token_ids[t]].

    out [T, H], table [V, H] of one float dtype; token_ids int32 [T], each in [0, V).
    """

    out: T
    token_ids: T
    table: T


def _check_embed(a: _EmbedArgs[Tensor]) -> None:
    expect("table", a.table, (-1, -1), *FLOATS)
    expect("token_ids", a.token_ids, (-1,), int32)
    expect("out", a.out, (a.token_ids.shape[0], a.table.shape[1]), a.table.dtype)


def _embed(a: _EmbedArgs[Array]) -> None:
    a.out[:] = a.table[a.token_ids]


def _embed_launches(target: Target, a: _EmbedArgs[Tensor]) -> Iterator[Command]:
    yield _gather("gather_rows", a.out, {"index": a.token_ids, "table": a.table})


def _embed_cost(workload: Workload, a: _EmbedArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.out.shape[1] * a.out.itemsize, 0)


embed = Op("embed", _EmbedArgs[Tensor], _check_embed, _embed, _embed_launches, _embed_cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SelectArgs(Generic[T]):
    """out[r] = x[q_starts[r + 1] - 1], or x[0] where that is -1 (empty first rows).

    out [R, H], x [T, H] of one float dtype; q_starts int32 [R + 1].
    """

    out: T
    x: T
    q_starts: T


def _check_select(a: _SelectArgs[Tensor]) -> None:
    expect("x", a.x, (-1, -1), *FLOATS)
    expect("out", a.out, (-1, a.x.shape[1]), a.x.dtype)
    expect("q_starts", a.q_starts, (a.out.shape[0] + 1,), int32)


def _select(a: _SelectArgs[Array]) -> None:
    a.out[:] = a.x[np.maximum(a.q_starts[1:] - 1, 0)]


def _select_launches(target: Target, a: _SelectArgs[Tensor]) -> Iterator[Command]:
    yield _gather("gather_last", a.out, {"x": a.x, "q_starts": a.q_starts})


def _select_cost(workload: Workload, a: _SelectArgs[Tensor]) -> Cost:
    return Cost(2 * workload.rows * a.out.shape[1] * a.out.itemsize, 0)


select_rows = Op("select_rows", _SelectArgs[Tensor], _check_select, _select, _select_launches, _select_cost)


def _gather(kernel: str, out: Tensor, sources: dict[str, Tensor]) -> Command:
    """A launch that copies rows."""
    (rows, width), block = out.shape, 1024
    args = {"out": out, **sources, "width": aligned(width)}
    return launch(_DEVICE, kernel, (rows, -(-width // block)), args, {"BLOCK": block})


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExpandArgs(Generic[T]):
    """Write token_ids, positions and token_slots (int32 [T]) of a step's tokens.

    Row r of the step is the sequence in slot slots[r] and has the tokens q_starts[r] to q_starts[r+1] (int32 [R] and
    [R + 1]). Its token i is at position seq_lens[slot] + i; its id is prompt[t] (int32 [T]), or last_tokens[slot] where
    that is negative: the token sampled last. With drafts (int32 [S, L], L a power of two), token i > 0 at position p
    has the id drafts[slot, p % L] instead; a negative one stands for no draft. Its token, those of dead rows
    (alive[slot] == 0) and those past q_starts[R] get id 0, position 0 and slot 0, the padding slot. seq_lens,
    last_tokens and alive are int32 [S] by slot.
    """

    token_ids: T
    positions: T
    token_slots: T
    prompt: T
    slots: T
    q_starts: T
    seq_lens: T
    last_tokens: T
    alive: T
    drafts: T | None = None


def _expand_check(a: _ExpandArgs[Tensor]) -> None:
    tokens = a.token_ids.shape[0]
    expect_each(a, (tokens,), int32, "token_ids", "positions", "token_slots", "prompt")
    _, size = expect_rows(a.slots, a.q_starts, seq_lens=a.seq_lens, last_tokens=a.last_tokens, alive=a.alive)
    if a.drafts is not None:
        expect("drafts", a.drafts, (size, -1), int32)
        width = a.drafts.shape[1]
        require(width & (width - 1) == 0, f"drafts has {width} columns; it must have a power of two")


def _expand_reference(a: _ExpandArgs[Array]) -> None:
    token = np.arange(len(a.token_ids))
    row = np.minimum(np.searchsorted(a.q_starts, token, side="right") - 1, len(a.slots) - 1)
    slot = a.slots[row]
    live = (token < a.q_starts[-1]) & (a.alive[slot] != 0)
    place = token - a.q_starts[row]
    fed = a.last_tokens[slot]
    if a.drafts is not None:
        fed = np.where(place > 0, a.drafts[slot, (a.seq_lens[slot] + place) % a.drafts.shape[1]], fed)
    fed = np.where(a.prompt >= 0, a.prompt, fed)
    live &= (fed >= 0) | (a.drafts is None)
    a.token_ids[:] = np.where(live, fed, 0)
    a.token_slots[:] = np.where(live, slot, 0)
    a.positions[:] = np.where(live, a.seq_lens[slot] + place, 0)


def _expand_launches(target: Target, a: _ExpandArgs[Tensor]) -> Iterator[Command]:
    tokens, rows, block = a.token_ids.shape[0], a.slots.shape[0], 128
    args: dict[str, Arg] = {**tensors(a), "drafts": a.last_tokens if a.drafts is None else a.drafts}
    args |= {"tokens": tokens, "rows": rows, "steps": (rows - 1).bit_length()}
    constants = {"BLOCK": block, "DRAFTS": 0 if a.drafts is None else a.drafts.shape[1]}
    yield launch(_DEVICE, "expand_rows", (-(-tokens // block),), args, constants)


def _expand_cost(workload: Workload, a: _ExpandArgs[Tensor]) -> Cost:
    return Cost(16 * workload.tokens, 0)


expand_rows = Op(
    "expand_rows", _ExpandArgs[Tensor], _expand_check, _expand_reference, _expand_launches, _expand_cost
)
