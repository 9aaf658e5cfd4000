"""accept: the rows of a step whose next draft is the token that was just sampled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels.authoring import (
    Command,
    Cost,
    Op,
    T,
    Target,
    Workload,
    expect,
    expect_each,
    launch,
    power_of_two,
    require,
    tensors,
)
from openinfer.sampler.gpu.ops import Array, RowStatus
from openinfer.tensor import Tensor, int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """Find the rows that accept draft number `place` (1, 2, ...), after `advance` has added the token before it.

    Row r has num_drafts[r] drafts (int32 [R]) and is the sequence in slot slots[r]; emits int32 [R] says which rows
    sampled that token. drafts int32 [S, L], L a power of two, has the token that was proposed for position p at p % L.
    A row accepts the draft if it sampled, its slot is alive, it has a draft of this number, and
    drafts[slot, seq_lens[slot] % L] is last_tokens[slot]. seq_lens, last_tokens, alive int32 [S].

    follows int32 [R] gets 1 for these rows and 0 for the others; it may be `emits`. starts int32 [R + 1] gets 0 and the
    running sums of `follows`: the q_starts of a step in which these rows have one token each. accepted int32 [S] gets
    the row's number of accepted drafts up to this one. Number 1 overwrites what it held. result int32 [R, 3] is
    `advance`'s: the status STOP of a row whose token is its draft becomes DRAFTED_STOP, and RUNNING becomes UNTRIED
    where that draft is below 0, which is none. Slots of live rows must be
    distinct; alive of the padding slot 0, which may repeat, must be 0.
    """

    follows: T
    starts: T
    result: T
    accepted: T
    slots: T
    emits: T
    num_drafts: T
    drafts: T
    seq_lens: T
    last_tokens: T
    alive: T
    place: int


def _check(a: _Args[Tensor]) -> None:
    rows, size = a.slots.shape[0], a.seq_lens.shape[0]
    expect_each(a, (rows,), int32, "follows", "slots", "emits", "num_drafts")
    expect("starts", a.starts, (rows + 1,), int32)
    expect("result", a.result, (rows, 3), int32)
    expect_each(a, (size,), int32, "seq_lens", "last_tokens", "alive", "accepted")
    expect("drafts", a.drafts, (size, -1), int32)
    width = a.drafts.shape[1]
    require(width == power_of_two(width), f"drafts has {width} columns; it must have a power of two")
    require(1 <= a.place < width, f"place is {a.place}; it must be in [1, {width})")


def _reference(a: _Args[Array]) -> None:
    draft, drafted = a.drafts[a.slots, a.seq_lens[a.slots] % a.drafts.shape[1]], a.num_drafts >= a.place
    drafted &= a.emits != 0
    right = drafted & (draft == a.last_tokens[a.slots])
    a.result[drafted & (draft < 0) & (a.result[:, 1] == RowStatus.RUNNING), 1] = RowStatus.UNTRIED
    follow = right & (a.alive[a.slots] != 0)
    a.result[right & (a.result[:, 1] == RowStatus.STOP), 1] = RowStatus.DRAFTED_STOP
    a.accepted[a.slots] = (a.accepted[a.slots] if a.place > 1 else 0) + follow
    a.follows[:] = follow
    a.starts[0] = 0
    np.cumsum(follow, out=a.starts[1:])


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows = a.slots.shape[0]
    yield launch(
        "openinfer.sampler.gpu.device.advance",
        "accept",
        (1,),
        {**tensors(a), "rows": rows, "width": a.drafts.shape[1], "place": a.place},
        {
            "BLOCK": power_of_two(rows),
            **{
                s.name: int(s)
                for s in (RowStatus.RUNNING, RowStatus.STOP, RowStatus.DRAFTED_STOP, RowStatus.UNTRIED)
            },
        },
    )


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(workload.rows * 4 * 10, 0)


accept = Op("accept", _Args[Tensor], _check, _reference, _launches, _cost)
