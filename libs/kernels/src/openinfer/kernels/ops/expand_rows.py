"""expand_rows: from the rows of a step to its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.op.contract import expect, expect_rows, require
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, T, Workload, tensors
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """Write token_ids, positions and token_slots (int32 [T]) of a step's tokens.

    Row r of the step is the sequence in slot slots[r] and has the tokens q_starts[r] to q_starts[r+1] (int32 [R] and
    [R + 1]). Its token i is at position seq_lens[slot] + i; its id is prompt[t] (int32 [T]), or last_tokens[slot] where
    that is negative: the token sampled last. With drafts (int32 [S, L], L a power of two), token i > 0 at position p
    has the id drafts[slot, p % L] instead; below 0 it is none. Such tokens, those of dead rows (alive[slot] == 0) and
    those past q_starts[R] get id 0, position 0 and slot 0, the padding slot. seq_lens, last_tokens and alive are int32
    [S] by slot.
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


def _check(a: _Args[Tensor]) -> None:
    tokens = a.token_ids.shape[0]
    for name, tensor in tensors(a, "token_ids", "positions", "token_slots", "prompt").items():
        expect(name, tensor, (tokens,), int32)
    _, size = expect_rows(a.slots, a.q_starts, seq_lens=a.seq_lens, last_tokens=a.last_tokens, alive=a.alive)
    if a.drafts is not None:
        expect("drafts", a.drafts, (size, -1), int32)
        width = a.drafts.shape[1]
        require(width & (width - 1) == 0, f"drafts has {width} columns; it must have a power of two")


def _reference(a: _Args[Array]) -> None:
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


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    tokens, rows, block = a.token_ids.shape[0], a.slots.shape[0], 128
    yield launch(
        "openinfer.kernels.device.rows",
        "expand_rows",
        (-(-tokens // block),),
        {
            **tensors(a),
            "drafts": a.last_tokens if a.drafts is None else a.drafts,
            "tokens": tokens,
            "rows": rows,
            "steps": (rows - 1).bit_length(),
        },
        {"BLOCK": block, "DRAFTS": 0 if a.drafts is None else a.drafts.shape[1]},
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(16 * workload.tokens, 0)


expand_rows = Op("expand_rows", _Args[Tensor], _check, _reference, _launches, _cost)
