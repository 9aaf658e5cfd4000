"""The loop's integrity check: its books compared with each other, from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .sequence import Seq, SeqState

if TYPE_CHECKING:
    from .loop import StepLoop


def problems(loop: StepLoop[Any, Any]) -> Iterator[str]:
    """Every contradiction, in words. O(rows + waiting)."""
    launched, collected = loop._clock.launched, loop._clock.collected
    if [step.index for step in loop._in_flight] != list(range(collected + 1, launched + 1)):
        yield f"steps in flight are not {collected + 1}..{launched}"
    if loop._rows is not None and loop._rows != list(loop._decoding.values()):
        yield "the list of decode rows is stale"
    yield from _membership_problems(loop)
    yield from _slot_problems(loop)
    for seq in loop._running:
        for complaint in _row_problems(loop, seq):
            yield f"request {seq.id} ({seq.state.name}, slot {seq.slot}): {complaint}"


def _membership_problems(loop: StepLoop[Any, Any]) -> Iterator[str]:
    by_state: dict[SeqState, set[Seq[Any]]] = {state: set() for state in SeqState}
    for seq in loop._live.values():
        by_state[seq.state].add(seq)
    if by_state[SeqState.FINISHED]:
        yield "a finished sequence is among the live ones"
    if by_state[SeqState.PREFILL] != set(loop._prefilling):
        yield "the prefilling sequences are not those in state PREFILL"
    if by_state[SeqState.DECODE] != set(loop._decoding):
        yield "the decode rows are not those in state DECODE"
    if by_state[SeqState.PREFILL] | by_state[SeqState.DECODE] != set(loop._running):
        yield "the running sequences are not those that prefill or decode"
    if len(by_state[SeqState.WAITING]) != loop.stats.waiting or len(loop._running) != loop.stats.running:
        yield f"stats count {loop.stats.waiting} waiting and {loop.stats.running} running"
    if any(seq.lease is not None for seq in by_state[SeqState.WAITING]):
        yield "a waiting sequence holds a lease"


def _slot_problems(loop: StepLoop[Any, Any]) -> Iterator[str]:
    held = {slot for slot, seq in enumerate(loop._slots) if seq is not None}
    if sorted([*held, *loop._free_slots]) != list(range(1, loop.max_rows + 1)):
        yield f"slots held {sorted(held)} and free {sorted(loop._free_slots)} are not 1..{loop.max_rows}"
    if {seq for seq in loop._slots if seq is not None} != loop._leaving | set(loop._running):
        yield "the slots' holders are not those that run or leave"
    if {seq for fence in loop._fences.values() for seq in fence} != loop._leaving:
        yield "the fences do not hold exactly those that leave"
    if any(not loop._clock.collected < fence <= loop._clock.launched for fence in loop._fences):
        yield f"fences {sorted(loop._fences)} are not in flight"


def _row_problems(loop: StepLoop[Any, Any], seq: Seq[Any]) -> Iterator[str]:
    if seq.lease is None or loop._slots[seq.slot] is not seq:
        yield "runs without a lease or a slot"
        return
    room, most = seq.lease.num_tokens, seq.max_len - 1
    if not 0 <= seq.confirmed <= seq.bound <= min(room, most):
        yield f"confirmed {seq.confirmed} <= bound {seq.bound} <= room {room}, length {most} does not hold"
    if seq.state is SeqState.DECODE and room < most:
        if seq._crossing <= loop._clock.launched:
            yield f"needed a block for step {seq._crossing}, which was launched"
        if seq not in loop._crossings.by_step.get(seq._crossing, ()):
            yield f"is not in the calendar for step {seq._crossing}"
