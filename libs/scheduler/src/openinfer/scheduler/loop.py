"""StepLoop: plans and launches one step ahead of what it has read, and reconciles what comes back.

Host work is O(changes). Decode rows are in every step, so their counters follow from the step index (sequence.Clock),
and a calendar keyed by step says which rows need a block when. A steady step touches no row.

The hard cases are kept few. Rows that end on the device while a step is in flight stay in that step as dead rows; slot
and lease go back when it is collected (the fence); a step of such rows alone is not launched where their length tells.
Preemption happens only with nothing in flight, when every token is known; a dry pool therefore drains first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic

from .admission import Headroom, lease_for, num_cached, refusal, room_for
from .audit import problems
from .crossings import Crossings, grow
from .errors import ContractError, IntegrityError, InvalidSetup
from .events import Event, Finished, Scheduled, Tokens
from .policy import Decision, Policy, View
from .pool import Pool
from .runner import BlockWrite, Row, Runner, Step, StepResult
from .sequence import Clock, FinishReason, Owner, Payload, Seq, SeqState
from .stats import Stats

_NOBODY: frozenset[Seq[Any]] = frozenset()


class StepLoop(Generic[Owner, Payload]):
    """Drives a runner: who runs, with which blocks, and what came of it.

    Single-threaded; the owner calls submit, abort and step. max_rows: slots of the batch. max_model_len: tokens a
    sequence may have, prompt and output. max_queued: sequences that may wait. depth: steps in flight at most (2 keeps
    the device busy while the host reads). max_headroom: part of the pool that admissions may leave free after
    preemptions, 0..1 (admission.Headroom). clock: seconds; the one that Seq.arrival is taken from, if the policy
    compares the two. The loop owns the leases; pool, runner and policy stay the caller's. Raises InvalidSetup.
    """

    def __init__(
        self,
        runner: Runner[Owner, Payload],
        pool: Pool,
        policy: Policy,
        *,
        max_rows: int,
        max_model_len: int,
        max_queued: int = 1024,
        depth: int = 2,
        max_headroom: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(max_rows, max_queued, depth) < 1 or max_model_len < 2 or not 0 <= max_headroom <= 1:
            raise InvalidSetup(
                "max_rows, max_queued and depth must be at least 1, max_model_len at least 2 and max_headroom in "
                f"0..1, given {max_rows}, {max_queued}, {depth}, {max_model_len} and {max_headroom}"
            )
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.max_queued, self.depth = max_queued, depth
        self.stats = Stats()
        self._runner, self._pool, self._policy = runner, pool, policy
        self._clock, self._now = Clock(), clock
        self._look_up = partial(num_cached, pool)
        self._headroom = Headroom(max_headroom)
        self._collected_at = 0.0  # when the last result was read
        self._live: dict[int, Seq[Owner]] = {}  # by request id, until Finished
        self._running: dict[Seq[Owner], None] = {}  # in order of admission
        self._prefilling: dict[Seq[Owner], None] = {}
        self._decoding: dict[Seq[Owner], Row[Owner]] = {}
        self._rows: list[Row[Owner]] | None = []  # the decode rows as a list; None: to be rebuilt
        self._horizon = 0  # by this step all of them have ended
        self._last_rows: Sequence[Row[Owner]] = ()
        self._slots: list[Seq[Owner] | None] = [None] * (max_rows + 1)
        self._free_slots = list(range(max_rows, 0, -1))
        self._in_flight: deque[Step[Owner]] = deque()
        self._crossings = Crossings()
        self._fences: dict[
            int, list[Seq[Owner]]
        ] = {}  # step -> ended sequences to let go once it is collected
        self._leaving: set[Seq[Owner]] = set()  # all in _fences
        self._left: list[int] = []  # for the next step
        self._blocks: list[BlockWrite[Owner]] = []  # likewise
        self._events: list[Event[Owner, Payload]] = []  # for the next step() to return
        self._changed = False  # something happened that the policy has not been asked about
        self._failure: Exception | None = None  # what ended the loop
        self._blocked = False  # no room for who is next; looked up again only after something happened

    # -- the owner's side --

    def submit(self, seq: Seq[Owner]) -> None:
        """Queue a new sequence. Raises Rejected, and then the sequence is the caller's again."""
        problem = refusal(self, seq)
        if problem is not None:
            self.stats.rejected[problem.reason] += 1
            raise problem
        seq.max_len = min(self.max_model_len, seq.prompt_len + seq.max_tokens)
        seq._clock = self._clock
        self._live[seq.id] = seq
        self.stats.submitted += 1
        self.stats.waiting += 1
        self._changed = True
        self._policy.on_submit(seq)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence from outside; `reason` STOP for a stop string. False if no such sequence is live.

        The next step() reports Finished and no token more; what is in flight runs out unseen.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        if seq.state is not SeqState.WAITING:
            self._left.append(seq.slot)
        self._end(seq, reason, self._events)
        return True

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do or to report."""
        return bool(self._live or self._in_flight or self._events)

    @property
    def live(self) -> Sequence[Seq[Owner]]:
        """All sequences without a terminal event so far."""
        return list(self._live.values())

    def step(self, wait_s: float | None = 0.0) -> list[Event[Owner, Payload]]:
        """One turn: launch a step if there is one to launch, then read what is ready.

        Waits for a result, up to wait_s seconds (None: as long as it takes), only when there is nothing to
        report and the pipeline is full or nothing could be launched. Returns at once when idle.

        Raises what the runner raises, after telling what happened before. The loop is lost then, and says so
        at every call; `live` are those who wait for a terminal event in vain.
        """
        if self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        try:
            self._turn(wait_s, events)
        except Exception as error:
            self._failure = error
            if not events:
                raise
        self.stats.in_flight = len(self._in_flight)
        return events

    def _turn(self, wait_s: float | None, events: list[Event[Owner, Payload]]) -> None:
        launched = len(self._in_flight) < self.depth and self._launch(events)
        full = len(self._in_flight) >= self.depth
        wait = wait_s if not events and (full or not launched) else 0.0
        while self._in_flight:
            result = self._runner.collect(wait)
            if result is None:
                break
            self._reconcile(result, events)
            wait = 0.0

    def drain(self) -> list[Event[Owner, Payload]]:
        """Launch nothing more, wait for all that is in flight, and report it."""
        events, self._events = self._events, []
        while self._in_flight:
            result = self._runner.collect(None)
            if result is not None:
                self._reconcile(result, events)
        self.stats.in_flight = 0
        return events

    # -- launching --

    def _launch(self, events: list[Event[Owner, Payload]]) -> bool:
        index = self._clock.launched + 1
        preemptions = self.stats.preemptions
        if not grow(self, index):
            self.stats.dry += 1
            return False
        chunks: list[Row[Owner]] = []
        joined: list[Seq[Owner]] = []
        short = False  # a chunk is smaller than the policy wants, for want of blocks
        # The step that preempts for want of blocks admits nobody: they were taken for those who run.
        stuck = self.stats.waiting > 0 and not self._running
        if preemptions == self.stats.preemptions and (self._changed or self._prefilling or stuck):
            self._blocked = self._blocked and not self._changed and bool(self._running)
            decision = self._policy.plan(self._view(index))
            if decision.preempt and self._in_flight:
                return False
            self._changed = False
            for seq in decision.preempt:
                self._preempt(seq)
            for seq, num_tokens in decision.chunks.items():
                if seq in self._prefilling and num_tokens > 0:
                    chunk = self._chunk(seq, num_tokens)
                    short = short or chunk.num_tokens < min(num_tokens, seq.remaining)
                    if chunk.num_tokens > 0:
                        chunks.append(chunk)
            if not short:  # who runs goes first
                self._admit(decision, chunks, joined, events)
        if self._rows is None:
            self._rows = list(self._decoding.values())
            self._horizon = max([seq._last_step for seq in self._decoding], default=0)
        rows = self._rows + chunks if chunks else self._rows
        if short and not rows and not self._in_flight:
            self.stats.dry += 1
            self._preempt(self._policy.victim(self._view(index)))
        if not rows or (self._in_flight and not chunks and index > self._horizon):
            return False  # nobody runs, or only rows that end in the step under way
        changed = rows is not self._last_rows
        step = Step(index, rows, changed, len(self._rows), self._left, joined, self._blocks, self._now())
        self._left, self._blocks = [], []
        self._last_rows, self._clock.launched = rows, index
        self._in_flight.append(step)
        self.stats.steps += 1
        for row in chunks:
            self._advance_prefill(row, index)
        self._runner.launch(step)
        return True

    def _view(self, index: int) -> View:
        return View(
            index, self._now(), self.max_rows, len(self._free_slots), self._pool.num_free, len(self._decoding),
            self._prefilling, self._running, self._look_up,
        )  # fmt: skip

    def _chunk(self, seq: Seq[Owner], num_tokens: int) -> Row[Owner]:
        end = room_for(seq, min(seq._bound + num_tokens, seq.target), self._blocks)
        return Row(seq, end - seq._bound, end == seq.target, seq._bound)

    def _admit(
        self,
        decision: Decision,
        chunks: list[Row[Owner]],
        joined: list[Seq[Owner]],
        events: list[Event[Owner, Payload]],
    ) -> None:
        budget = decision.admit_tokens
        for seq in decision.admit:
            if budget <= 0 or not self._free_slots or self._blocked:
                break
            if seq.state is not SeqState.WAITING or self._live.get(seq.id) is not seq:
                raise ContractError(f"the policy admits request {seq.id}, which is not waiting here")
            wanted = min(budget, decision.chunks.get(seq, budget))
            lease = lease_for(seq, self._pool, wanted, self._headroom.level if self._running else 0.0)
            if lease is None:
                self._blocked = True
                break
            seq.lease, seq.slot, seq.target = lease, self._free_slots.pop(), len(seq.tokens)
            seq.state = SeqState.PREFILL
            seq._bound = seq._confirmed = lease.num_cached
            self._slots[seq.slot] = seq
            self._running[seq] = self._prefilling[seq] = None
            self.stats.running += 1
            self.stats.waiting -= 1
            for group in range(self._pool.num_groups):
                self._blocks.append(BlockWrite(seq, group, 0, list(lease.block_table(group))))
            chunk = self._chunk(seq, min(wanted, lease.num_tokens - lease.num_cached))
            budget -= chunk.num_tokens
            chunks.append(chunk)
            joined.append(seq)
            self._policy.on_admit(seq)
            if not seq.num_preemptions:
                events.append(Scheduled(seq, lease.num_cached))

    def _advance_prefill(self, row: Row[Owner], index: int) -> None:
        """A chunk was launched; if it was the last, the row decodes from the next step on."""
        seq = row.seq
        seq._bound += row.num_tokens
        self.stats.prefill_tokens += row.num_tokens
        if row.emits:
            del self._prefilling[seq]
            self._changed = True  # its share of the next step's tokens is free
            seq.state = SeqState.DECODE
            seq._base, seq._entered, seq._last_step = seq.target, index, index + seq.max_len - 1 - seq.target
            self._decoding[seq] = Row(seq, 1, True, None)
            self._rows = None
            self._crossings.schedule(seq)

    # -- reconciling --

    def _reconcile(self, result: StepResult[Payload], events: list[Event[Owner, Payload]]) -> None:
        step = self._in_flight.popleft()
        if result.index != step.index:
            raise ContractError(
                f"the runner returned step {result.index}, the oldest launched is {step.index}"
            )
        self._clock.collected = step.index
        began, self._collected_at = max(step.launched_at, self._collected_at), self._now()
        self._policy.on_step(step, self._collected_at - began if result.seconds is None else result.seconds)
        ended, gone, failed = [], _NOBODY, _NOBODY
        if self._leaving:
            gone = frozenset(self._leaving)  # what they yield is nobody's
        if result.finished:
            ended = [(self._seq_at(slot, step.index), reason) for slot, reason in result.finished]
            failed = frozenset(seq for seq, reason in ended if reason is FinishReason.ERROR)
        emits, computed = step.num_decode > 0, []
        for row in step.rows[step.num_decode :]:
            emits = emits or row.emits
            if row.seq not in gone and row.seq not in failed and row.start is not None:
                row.seq._confirmed = row.start + row.num_tokens
                computed.append(row.seq)
        if computed and self._gives_back(computed):
            self._blocked = False
        for slot, count in (result.advanced or {}).items():
            seq = self._seq_at(slot, step.index)
            if seq not in gone:
                seq._base, seq._last_step = seq._base - 1 + count, seq._last_step + 1 - count
                self._horizon = max(self._horizon, seq._last_step)
        if emits:
            events.append(Tokens(step.index, step.rows, gone | failed, result.payload, result.advanced))
        for seq, reason in ended:
            if seq not in gone:
                self._end(seq, reason, events)
        for seq in self._fences.pop(step.index, ()):
            self._leaving.discard(seq)
            self._let_go(seq)

    def _seq_at(self, slot: int, index: int) -> Seq[Owner]:
        seq = self._slots[slot] if 0 < slot <= self.max_rows else None
        if seq is None:
            raise ContractError(f"the result of step {index} names slot {slot}, which no sequence holds")
        return seq

    def _commit(self, seq: Seq[Owner]) -> None:
        # The owner may not have appended the newest tokens yet; they are committed next time.
        if seq.lease is not None:
            seq._committed = min(seq.confirmed, len(seq.tokens))
            seq.lease.commit(seq.tokens, seq._committed)

    def _gives_back(self, seqs: Iterable[Seq[Owner]]) -> bool:
        """Commit what is confirmed of them: whether blocks come back, because windows have moved on."""
        free = self._pool.num_free
        for seq in seqs:
            self._commit(seq)
        return self._pool.num_free > free

    def _end(self, seq: Seq[Owner], reason: FinishReason, events: list[Event[Owner, Payload]]) -> None:
        """The one terminal of a sequence. Slot and lease stay until no launched step uses them."""
        if reason is not FinishReason.ERROR:
            self._commit(seq)
        del self._live[seq.id]
        waiting = seq.state is SeqState.WAITING
        self._stop(seq, SeqState.FINISHED)
        seq.finish_reason = reason
        self.stats.finished += 1
        self._headroom.on_finish()
        self._policy.on_finish(seq)
        events.append(Finished(seq, reason))
        if waiting:
            self.stats.waiting -= 1
        elif self._in_flight:
            self._fences.setdefault(self._clock.launched, []).append(seq)
            self._leaving.add(seq)
        else:
            self._let_go(seq)

    def _stop(self, seq: Seq[Owner], state: SeqState) -> None:
        """Take a sequence out of everything that is launched from now on."""
        seq._confirmed, seq._bound, seq._crossing = seq.confirmed, seq.bound, 0
        self._changed = True
        if seq.state is not SeqState.WAITING:
            del self._running[seq]
            self._prefilling.pop(seq, None)
            self.stats.running -= 1
            if self._decoding.pop(seq, None) is not None:
                self._rows = None
            if self._blocks:
                self._blocks = [write for write in self._blocks if write.seq is not seq]
        seq.state = state

    def _let_go(self, seq: Seq[Owner]) -> None:
        if seq.lease is not None:
            seq.lease.release()
            seq.lease = None
            self._slots[seq.slot] = None
            self._free_slots.append(seq.slot)
            self._changed = True

    def _preempt(self, seq: Seq[Owner]) -> None:
        """Back to waiting, to be recomputed. Nothing is in flight, so the owner knows all its tokens."""
        if seq not in self._running:
            raise ContractError(f"the policy preempts request {seq.id}, which is not running")
        if seq.state is SeqState.DECODE and len(seq.tokens) != seq.confirmed + 1:
            raise ContractError(
                f"request {seq.id} has {len(seq.tokens)} tokens where {seq.confirmed + 1} were reported; "
                "append to Seq.tokens what Tokens events bring before calling step() again"
            )
        self._commit(seq)
        self._stop(seq, SeqState.WAITING)
        self._left.append(seq.slot)
        self._let_go(seq)
        seq._confirmed = seq._bound = 0
        seq.num_preemptions += 1
        self.stats.waiting += 1
        self.stats.preemptions += 1
        self._headroom.on_preempt()
        self._policy.on_preempt(seq)

    def check(self) -> None:
        """Compare the books with each other, O(rows). Raises IntegrityError."""
        found = list(problems(self))
        if found:
            raise IntegrityError(found)
