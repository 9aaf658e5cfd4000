"""advance: the end of a step, in place on the state of its rows. accept: rows whose next draft is the new token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Command, Cost, Op, T, Target, Workload
from openinfer.sampler.gpu.ops import NO_TOKEN, UNSOUND, Adjustment, Array, RowStatus
from openinfer.sampler.gpu.ops.state import ADVANCE_FIELDS, expect_state
from openinfer.sampler.gpu.ops.step import StepArgs, expect_step
from openinfer.tensor import Tensor, int32

_MODULE = "openinfer.sampler.gpu.device.advance"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(StepArgs[T], Generic[T]):
    """Move the state of a step's live rows past it, and write result int32 [R, 3]: token, RowStatus, bits of
    the logprob.

    tokens int32 [R] and logprobs float32 [R] come from `sample`; slots, emits int32 [R] and q_starts int32 [R
    + 1] are the step's. In place, int32 [S] by slot: seq_lens, last_tokens, alive. Read, by slot: limits,
    min_lens int32 [S], stop_ids int32 [S, W] (-1 = none).

    A dead row (alive[slot] == 0) or one without tokens in the step is IDLE, with token -1, and its state
    stays. Any other has its tokens added to seq_lens[slot]. If it does not emit it is RUNNING, with token -1.
    If it emits, its token goes to last_tokens[slot], and its status is the first of these that holds:

    - FAILED: the token is -2 (last_tokens stays).
    - STOP: the token is in stop_ids[slot], and seq_lens[slot] is not below min_lens[slot].
    - LENGTH: seq_lens[slot] + 1 (the new token included) is limits[slot] or more.
    - RUNNING.

    The first three end the row: alive[slot] = 0. adjusts int32 [S] has bits of `Adjustment`. With the bit PENALTIES,
    the token is counted in output_counts int32 [S, C] (two 16-bit counts a word, up to 65,535). With BAD_WORDS, it
    goes to recent_tokens int32 [S, L], at its index in the sequence modulo L. The slots of live rows must be
    distinct; alive of the padding slot 0, which may repeat, must be 0.
    """

    result: T
    last_tokens: T
    limits: T
    min_lens: T
    stop_ids: T
    adjusts: T
    output_counts: T
    recent_tokens: T


def _check(a: _Args[Tensor]) -> None:
    rows, size = expect_step(a)
    op.expect("last_tokens", a.last_tokens, (size,), int32)
    op.expect("result", a.result, (rows, 3), int32)
    expect_state(op.tensors(a, *ADVANCE_FIELDS), size)


def _reference(a: _Args[Array]) -> None:
    a.result[:] = NO_TOKEN, RowStatus.IDLE, 0
    q_lens = np.diff(a.q_starts)
    rows = np.flatnonzero((a.alive[a.slots] != 0) & (q_lens > 0))
    a.seq_lens[a.slots[rows]] += q_lens[rows]
    a.result[rows, 1] = RowStatus.RUNNING

    rows = rows[a.emits[rows] != 0]
    slot, token = a.slots[rows], a.tokens[rows]
    length = a.seq_lens[slot]
    stopped = (a.stop_ids[slot] == token[:, None]).any(axis=1) & (length >= a.min_lens[slot])
    status = np.select(
        [token == UNSOUND, stopped, length + 1 >= a.limits[slot]],
        [RowStatus.FAILED, RowStatus.STOP, RowStatus.LENGTH],
        RowStatus.RUNNING,
    )
    a.result[rows] = np.stack([token, status, a.logprobs[rows].view(np.int32)], axis=1)
    a.last_tokens[slot] = np.where(token == UNSOUND, a.last_tokens[slot], token)
    sound = token != UNSOUND
    counts, counted = a.output_counts.view(np.uint16), sound & (a.adjusts[slot] & Adjustment.PENALTIES != 0)
    at = slot[counted], token[counted]
    counts[at] = np.minimum(counts[at], 0xFFFE) + 1
    kept = sound & (a.adjusts[slot] & Adjustment.BAD_WORDS != 0)
    a.recent_tokens[slot[kept], length[kept] % a.recent_tokens.shape[1]] = token[kept]
    a.alive[slot[status != RowStatus.RUNNING]] = 0


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, block = a.slots.shape[0], 128
    of_rows = ("result", "tokens", "logprobs", "slots", "q_starts", "emits", "alive", "seq_lens")
    args: dict[str, op.Arg] = {**op.tensors(a, *of_rows, "last_tokens", *ADVANCE_FIELDS), "rows": rows}
    args |= {"stop_width": a.stop_ids.shape[1], "count_width": a.output_counts.shape[1]}
    args["recent"] = a.recent_tokens.shape[1]
    constants = {s.name: int(s) for s in RowStatus if RowStatus.RUNNING <= s <= RowStatus.FAILED}
    constants |= {"PENALTIES": int(Adjustment.PENALTIES), "BAD_WORDS": int(Adjustment.BAD_WORDS)}
    constants |= {"BLOCK": block, "UNSOUND": UNSOUND}
    yield op.launch(_MODULE, "advance", (-(-rows // block),), args, constants)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(workload.rows * 4 * (18 + a.stop_ids.shape[1]), 0)


advance = Op("advance", _Args[Tensor], _check, _reference, _launches, _cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AcceptArgs(Generic[T]):
    """Find the rows that accept draft number `place` (1, 2, ...), after `advance` has added the token before it.

    Row r has num_drafts[r] drafts (int32 [R]) and is the sequence in slot slots[r]; emits int32 [R] says which rows
    sampled that token. drafts int32 [S, L], L a power of two, has the token that was proposed for position p at p % L.
    A row accepts the draft if it sampled, its slot is alive, it has a draft of this number, and
    drafts[slot, seq_lens[slot] % L] is last_tokens[slot]. seq_lens, last_tokens, alive int32 [S].

    follows int32 [R] gets 1 for these rows and 0 for the others; it may be `emits`. starts int32 [R + 1] gets 0 and the
    running sums of `follows`: the q_starts of a step in which these rows have one token each. accepted int32 [S] gets
    the row's number of accepted drafts up to this one. Number 1 overwrites what it held. result int32 [R, 3] is
    `advance`'s: the status STOP of a row whose token is its draft becomes DRAFTED_STOP, and RUNNING becomes UNTRIED
    where that draft is negative, which stands for no draft. Slots of live rows must be distinct; alive of the padding
    slot 0, which may repeat, must be 0.
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


def _accept_check(a: _AcceptArgs[Tensor]) -> None:
    rows, size = a.slots.shape[0], a.seq_lens.shape[0]
    op.expect_each(a, (rows,), int32, "follows", "slots", "emits", "num_drafts")
    op.expect("starts", a.starts, (rows + 1,), int32)
    op.expect("result", a.result, (rows, 3), int32)
    op.expect_each(a, (size,), int32, "seq_lens", "last_tokens", "alive", "accepted")
    op.expect("drafts", a.drafts, (size, -1), int32)
    width = a.drafts.shape[1]
    op.require(width == op.power_of_two(width), f"drafts has {width} columns; it must have a power of two")
    op.require(1 <= a.place < width, f"place is {a.place}; it must be in [1, {width})")


def _accept_reference(a: _AcceptArgs[Array]) -> None:
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


def _accept_launches(target: Target, a: _AcceptArgs[Tensor]) -> Iterator[Command]:
    rows = a.slots.shape[0]
    states = (RowStatus.RUNNING, RowStatus.STOP, RowStatus.DRAFTED_STOP, RowStatus.UNTRIED)
    args: dict[str, op.Arg] = {**op.tensors(a), "rows": rows, "width": a.drafts.shape[1], "place": a.place}
    constants = {"BLOCK": op.power_of_two(rows), **{s.name: int(s) for s in states}}
    yield op.launch(_MODULE, "accept", (1,), args, constants)


def _accept_cost(workload: Workload, a: _AcceptArgs[Tensor]) -> Cost:
    return Cost(workload.rows * 4 * 10, 0)


accept = Op("accept", _AcceptArgs[Tensor], _accept_check, _accept_reference, _accept_launches, _accept_cost)
