"""expand_rows: from the rows of a step to its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.op.contract import expect, expect_rows, require
from openinfer.kernels.op.launch import Command, launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32


def _contract(
    *,
    token_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    prompt: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    alive: Tensor,
    drafts: Tensor | None = None,
) -> None:
    """Write token_ids, positions and token_slots (int32 [T]) of a step's tokens.

    Row r of the step is the sequence in slot slots[r] and has the tokens q_starts[r] to q_starts[r+1] (int32 [R] and
    [R + 1]). Its token i is at position seq_lens[slot] + i; its id is prompt[t] (int32 [T]), or last_tokens[slot] where
    that is negative: the token sampled last. With drafts (int32 [S, L], L a power of two), token i > 0 at position p
    has the id drafts[slot, p % L] instead. Tokens of dead rows (alive[slot] == 0) and those past
    q_starts[R] get id 0, position 0 and slot 0, the padding slot. seq_lens, last_tokens and alive are int32 [S] by
    slot.
    """
    tokens = token_ids.shape[0]
    for name, tensor in (
        ("token_ids", token_ids),
        ("positions", positions),
        ("token_slots", token_slots),
        ("prompt", prompt),
    ):
        expect(name, tensor, (tokens,), int32)
    _, size = expect_rows(slots, q_starts, seq_lens=seq_lens, last_tokens=last_tokens, alive=alive)
    if drafts is not None:
        expect("drafts", drafts, (size, -1), int32)
        width = drafts.shape[1]
        require(width & (width - 1) == 0, f"drafts has {width} columns; it must have a power of two")


def _reference(
    *,
    token_ids: Array,
    positions: Array,
    token_slots: Array,
    prompt: Array,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    last_tokens: Array,
    alive: Array,
    drafts: Array | None = None,
) -> None:
    token = np.arange(len(token_ids))
    row = np.minimum(np.searchsorted(q_starts, token, side="right") - 1, len(slots) - 1)
    slot = slots[row]
    live = (token < q_starts[-1]) & (alive[slot] != 0)
    token_slots[:] = np.where(live, slot, 0)
    place = token - q_starts[row]
    positions[:] = np.where(live, seq_lens[slot] + place, 0)
    fed = last_tokens[slot]
    if drafts is not None:
        fed = np.where(place > 0, drafts[slot, (seq_lens[slot] + place) % drafts.shape[1]], fed)
    token_ids[:] = np.where(live, np.where(prompt >= 0, prompt, fed), 0)


def _launches(
    target: Target,
    *,
    token_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    prompt: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    alive: Tensor,
    drafts: Tensor | None = None,
) -> Iterator[Command]:
    tokens, rows, block = token_ids.shape[0], slots.shape[0], 128
    yield launch(
        "openinfer.kernels.device.rows",
        "expand_rows",
        (-(-tokens // block),),
        {
            "token_ids": token_ids,
            "positions": positions,
            "token_slots": token_slots,
            "prompt": prompt,
            "slots": slots,
            "q_starts": q_starts,
            "seq_lens": seq_lens,
            "last_tokens": last_tokens,
            "alive": alive,
            "drafts": last_tokens if drafts is None else drafts,
            "tokens": tokens,
            "rows": rows,
            "steps": (rows - 1).bit_length(),
        },
        {"BLOCK": block, "DRAFTS": 0 if drafts is None else drafts.shape[1]},
    )


def _cost(workload: Workload, **args: Tensor | None) -> Cost:
    return Cost(16 * workload.tokens, 0)


expand_rows = Op("expand_rows", _contract, reference=_reference, launches=_launches, cost=_cost)
