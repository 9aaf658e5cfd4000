"""The loop's integrity check: compares its books with each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .decoding import DecodeRows
from .events import Stats
from .loading import Loads
from .runner import Step
from .sequence import Clock, Seq, SeqState


@dataclass(slots=True)
class Books:
    """The state of a loop that check() compares."""

    clock: Clock
    stats: Stats
    in_flight: Sequence[Step[Any]]
    live: Mapping[int, Seq[Any]]
    running: Mapping[Seq[Any], None]
    prefilling: Mapping[Seq[Any], None]
    decode: DecodeRows[Any]
    loads: Loads[Any]
    slots: Sequence[Seq[Any] | None]
    free_slots: Sequence[int]
    fences: Mapping[int, Sequence[Seq[Any]]]
    leaving: set[Seq[Any]]


def problems(books: Books) -> Iterator[str]:
    """Every contradiction in the books, in words. O(rows + waiting)."""
    launched, collected = books.clock.launched, books.clock.collected
    if [step.index for step in books.in_flight] != list(range(collected + 1, launched + 1)):
        yield f"steps in flight are not {collected + 1}..{launched}"
    if books.decode.listed is not None and books.decode.listed != list(books.decode.rows.values()):
        yield "the list of decode rows is stale"
    yield from _membership_problems(books)
    yield from _slot_problems(books)
    for seq in books.running:
        for complaint in _row_problems(books, seq):
            yield f"request {seq.id} ({seq.state.name}, slot {seq.slot}): {complaint}"


def _membership_problems(books: Books) -> Iterator[str]:
    by_state: dict[SeqState, set[Seq[Any]]] = {state: set() for state in SeqState}
    for seq in books.live.values():
        by_state[seq.state].add(seq)
    if by_state[SeqState.FINISHED]:
        yield "a finished sequence is among the live ones"
    if by_state[SeqState.PREFILL] != set(books.prefilling):
        yield "the prefilling sequences are not those in state PREFILL"
    if by_state[SeqState.DECODE] != set(books.decode.rows):
        yield "the decode rows are not those in state DECODE"
    if by_state[SeqState.PREFILL] | by_state[SeqState.DECODE] != set(books.running):
        yield "the running sequences are not those that prefill or decode"
    waiting = len(by_state[SeqState.WAITING]) + len(by_state[SeqState.LOADING])
    if waiting != books.stats.waiting or len(books.running) != books.stats.running:
        yield f"stats count {books.stats.waiting} waiting and {books.stats.running} running"
    if {seq for seq in by_state[SeqState.WAITING] if seq.lease is not None} != set(books.loads.ended):
        yield "a waiting sequence holds a lease that was not loaded, or a loaded one has none"
    loading = {seq: lease for lease, seq in books.loads.under_way.items() if seq is not None}
    if by_state[SeqState.LOADING] != {seq for seq, lease in loading.items() if seq.lease is lease}:
        yield "the sequences that load are not those in state LOADING"
    if len(loading) != books.stats.loading:
        yield f"stats count {books.stats.loading} loading"


def _slot_problems(books: Books) -> Iterator[str]:
    held = {slot for slot, seq in enumerate(books.slots) if seq is not None}
    if sorted([*held, *books.free_slots]) != list(range(1, len(books.slots))):
        yield f"slots held {sorted(held)} and free {sorted(books.free_slots)} are not 1..{len(books.slots) - 1}"
    if {seq for seq in books.slots if seq is not None} != books.leaving | set(books.running):
        yield "the slots' holders are not those that run or leave"
    if {seq for fence in books.fences.values() for seq in fence} != books.leaving:
        yield "the fences do not hold exactly those that leave"
    if any(not books.clock.collected < fence <= books.clock.launched for fence in books.fences):
        yield f"fences {sorted(books.fences)} are not in flight"


def _row_problems(books: Books, seq: Seq[Any]) -> Iterator[str]:
    if seq.lease is None or books.slots[seq.slot] is not seq:
        yield "runs without a lease or a slot"
        return
    room, most = seq.lease.num_tokens, seq.max_len - 1
    if not 0 <= seq.confirmed <= seq.bound <= min(room, most):
        yield f"confirmed {seq.confirmed} <= bound {seq.bound} <= room {room}, length {most} does not hold"
    if seq not in books.decode.rows:
        return
    row, drafts = books.decode.rows[seq], books.decode.drafts.get(seq, 0)
    if row.num_tokens != 1 + drafts:
        yield f"has {drafts} drafts, and a row of {row.num_tokens} tokens"
    flying = sum(step.drafts.get(seq, 0) for step in books.in_flight)
    if seq.ahead != flying:
        yield f"has {flying} drafts in flight, and counts {seq.ahead}"
    if room < most and not drafts:
        if seq.crossing <= books.clock.launched:
            yield f"needed a block for step {seq.crossing}, which was launched"
        if seq not in books.decode.calendar.get(seq.crossing, ()):
            yield f"is not in the calendar for step {seq.crossing}"
