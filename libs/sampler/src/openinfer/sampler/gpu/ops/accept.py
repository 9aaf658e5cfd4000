"""accept: the rows of a step whose next draft is the token that was just sampled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import (
    Command,
    Cost,
    Op,
    Target,
    Workload,
    expect,
    launch,
    power_of_two,
    require,
)
from openinfer.sampler.gpu.ops.rows import Array, RowStatus
from openinfer.tensor import Tensor, int32


def _contract(
    *,
    follows: Tensor,
    starts: Tensor,
    result: Tensor,
    accepted: Tensor,
    slots: Tensor,
    emits: Tensor,
    num_drafts: Tensor,
    drafts: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    alive: Tensor,
    place: int,
) -> None:
    """Find the rows that accept draft number `place` (1, 2, ...), after `advance` has added the token before it.

    Row r has num_drafts[r] drafts (int32 [R]) and is the sequence in slot slots[r]; emits int32 [R] says which rows
    sampled that token. drafts int32 [S, L], L a power of two, has the token that was proposed for position p at p % L.
    A row accepts the draft if it sampled, its slot is alive, it has a draft of this number, and
    drafts[slot, seq_lens[slot] % L] is last_tokens[slot]. seq_lens, last_tokens, alive int32 [S].

    follows int32 [R] gets 1 for these rows and 0 for the others; it may be `emits`. starts int32 [R + 1] gets 0 and the
    running sums of `follows`: the q_starts of a step in which these rows have one token each. accepted int32 [S] gets
    the row's number of accepted drafts up to this one. Number 1 overwrites what it held. result int32 [R, 3] is
    `advance`'s: the status STOP of a row whose token is its draft becomes DRAFTED_STOP. Slots of live rows must be
    distinct; alive of the padding slot 0, which may repeat, must be 0.
    """
    rows, size = slots.shape[0], seq_lens.shape[0]
    for name, tensor in (
        ("follows", follows),
        ("slots", slots),
        ("emits", emits),
        ("num_drafts", num_drafts),
    ):
        expect(name, tensor, (rows,), int32)
    expect("starts", starts, (rows + 1,), int32)
    expect("result", result, (rows, 3), int32)
    by_slot = {"seq_lens": seq_lens, "last_tokens": last_tokens, "alive": alive, "accepted": accepted}
    for name, tensor in by_slot.items():
        expect(name, tensor, (size,), int32)
    expect("drafts", drafts, (size, -1), int32)
    width = drafts.shape[1]
    require(width == power_of_two(width), f"drafts has {width} columns; it must have a power of two")
    require(1 <= place < width, f"place is {place}; it must be in [1, {width})")


def _reference(
    *,
    follows: Array,
    starts: Array,
    result: Array,
    accepted: Array,
    slots: Array,
    emits: Array,
    num_drafts: Array,
    drafts: Array,
    seq_lens: Array,
    last_tokens: Array,
    alive: Array,
    place: int,
) -> None:
    right = drafts[slots, seq_lens[slots] % drafts.shape[1]] == last_tokens[slots]
    right &= (emits != 0) & (num_drafts >= place)
    follow = right & (alive[slots] != 0)
    result[right & (result[:, 1] == RowStatus.STOP), 1] = RowStatus.DRAFTED_STOP
    accepted[slots] = (accepted[slots] if place > 1 else 0) + follow
    follows[:] = follow
    starts[0] = 0
    np.cumsum(follow, out=starts[1:])


def _launches(
    target: Target,
    *,
    follows: Tensor,
    starts: Tensor,
    result: Tensor,
    accepted: Tensor,
    slots: Tensor,
    emits: Tensor,
    num_drafts: Tensor,
    drafts: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    alive: Tensor,
    place: int,
) -> Iterator[Command]:
    rows = slots.shape[0]
    yield launch(
        "openinfer.sampler.gpu.device.accept",
        "accept",
        (1,),
        {
            "follows": follows,
            "starts": starts,
            "result": result,
            "accepted": accepted,
            "slots": slots,
            "emits": emits,
            "num_drafts": num_drafts,
            "drafts": drafts,
            "seq_lens": seq_lens,
            "last_tokens": last_tokens,
            "alive": alive,
            "rows": rows,
            "width": drafts.shape[1],
            "place": place,
        },
        {
            "BLOCK": power_of_two(rows),
            "STOP": int(RowStatus.STOP),
            "DRAFTED_STOP": int(RowStatus.DRAFTED_STOP),
        },
    )


def _cost(workload: Workload, **_: object) -> Cost:
    return Cost(workload.rows * 4 * 10, 0)


accept = Op("accept", _contract, reference=_reference, launches=_launches, cost=_cost)
