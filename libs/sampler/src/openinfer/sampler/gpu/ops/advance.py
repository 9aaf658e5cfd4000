"""advance: the end of a step, in place on the state of its rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import Command, Cost, Op, Target, Workload, expect, launch
from openinfer.sampler.gpu.ops.rows import NO_TOKEN, UNSOUND, Adjustment, Array, RowStatus
from openinfer.sampler.gpu.ops.state import ADVANCE_FIELDS, expect_state
from openinfer.sampler.gpu.ops.step import expect_step
from openinfer.tensor import Tensor, int32


def _contract(
    *,
    result: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    emits: Tensor,
    alive: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    **state: Tensor,
) -> None:
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
    by_slot = {"alive": alive, "seq_lens": seq_lens, "last_tokens": last_tokens}
    rows, size = expect_step(
        tokens=tokens, logprobs=logprobs, slots=slots, q_starts=q_starts, emits=emits, **by_slot
    )
    expect("result", result, (rows, 3), int32)
    expect_state(state, ADVANCE_FIELDS, size)


def _reference(
    *,
    result: Array,
    tokens: Array,
    logprobs: Array,
    slots: Array,
    q_starts: Array,
    emits: Array,
    alive: Array,
    seq_lens: Array,
    last_tokens: Array,
    **state: Array,
) -> None:
    limits, min_lens, stop_ids, adjusts, output_counts, recent_tokens = (state[n] for n in ADVANCE_FIELDS)
    result[:] = NO_TOKEN, RowStatus.IDLE, 0
    q_lens = np.diff(q_starts)
    rows = np.flatnonzero((alive[slots] != 0) & (q_lens > 0))
    seq_lens[slots[rows]] += q_lens[rows]
    result[rows, 1] = RowStatus.RUNNING

    rows = rows[emits[rows] != 0]
    slot, token = slots[rows], tokens[rows]
    length = seq_lens[slot]
    stopped = (stop_ids[slot] == token[:, None]).any(axis=1) & (length >= min_lens[slot])
    status = np.select(
        [token == UNSOUND, stopped, length + 1 >= limits[slot]],
        [RowStatus.FAILED, RowStatus.STOP, RowStatus.LENGTH],
        RowStatus.RUNNING,
    )
    result[rows] = np.stack([token, status, logprobs[rows].view(np.int32)], axis=1)
    last_tokens[slot] = np.where(token == UNSOUND, last_tokens[slot], token)
    sound = token != UNSOUND
    counts, counted = output_counts.view(np.uint16), sound & (adjusts[slot] & Adjustment.PENALTIES != 0)
    at = slot[counted], token[counted]
    counts[at] = np.minimum(counts[at], 0xFFFE) + 1
    kept = sound & (adjusts[slot] & Adjustment.BAD_WORDS != 0)
    recent_tokens[slot[kept], length[kept] % recent_tokens.shape[1]] = token[kept]
    alive[slot[status != RowStatus.RUNNING]] = 0


def _launches(
    target: Target,
    *,
    result: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    slots: Tensor,
    q_starts: Tensor,
    emits: Tensor,
    alive: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    **state: Tensor,
) -> Iterator[Command]:
    rows, block = slots.shape[0], 128
    yield launch(
        "openinfer.sampler.gpu.device.advance",
        "advance",
        (-(-rows // block),),
        {
            "result": result,
            "tokens": tokens,
            "logprobs": logprobs,
            "slots": slots,
            "q_starts": q_starts,
            "emits": emits,
            "alive": alive,
            "seq_lens": seq_lens,
            "last_tokens": last_tokens,
            **{name: state[name] for name in ADVANCE_FIELDS},
            "rows": rows,
            "stop_width": state["stop_ids"].shape[1],
            "count_width": state["output_counts"].shape[1],
            "recent": state["recent_tokens"].shape[1],
        },
        {
            "BLOCK": block,
            "UNSOUND": UNSOUND,
            **{s.name: int(s) for s in RowStatus if s not in (RowStatus.IDLE, RowStatus.DRAFTED_STOP)},
            "PENALTIES": int(Adjustment.PENALTIES),
            "BAD_WORDS": int(Adjustment.BAD_WORDS),
        },
    )


def _cost(workload: Workload, *, stop_ids: Tensor, **_: Tensor) -> Cost:
    return Cost(workload.rows * 4 * (18 + stop_ids.shape[1]), 0)


advance = Op("advance", _contract, reference=_reference, launches=_launches, cost=_cost)
