"""StepLoop: plans and launches a step before it has read the step before, and reconciles the results.

Host work is O(changes). Decode rows run in every step, so their counters follow from the step index (sequence.Clock).
A calendar lists the rows that need blocks by step. A steady step touches no row without drafts. The advance of a row
with drafts is known only from the step's result.

A row that ends on the device while a step is in flight stays in that step as a dead row. The loop gives its slot and
lease back when it has read the last step that has the row (the fence). It launches no step whose rows all end earlier
by their length. It drains before it preempts, when every token is known.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic

from .admission import Headroom, num_cached, promise, refusal, room_for
from .audit import Books, problems
from .decoding import DecodeRows
from .errors import ContractError, IntegrityError, InvalidSetup, Rejected, RejectReason
from .events import Event, Finished, Scheduled, Stats, Tokens
from .loading import Loads
from .policy import Decision, Policy, Speculation, View
from .pool import Lease, Pool
from .runner import BlockWrite, Row, Runner, Step, StepResult
from .sequence import Clock, FinishReason, Owner, Payload, Seq, SeqState

LOOK_AHEAD = 48  # a decode row reserves this many tokens more than it needs, to ask the pool less often,
ROOMY = 16  # if the pool has more free blocks a row than this
COMMIT_EVERY = 256  # a decode row commits this many tokens at a time, and the rest when it ends
_NOBODY: frozenset[Seq[Any]] = frozenset()


class StepLoop(Generic[Owner, Payload]):
    """Drives a runner: chooses the rows of each step, reserves their blocks, and reports the results. The loop is
    single-threaded. The engine calls submit, abort and step.

    max_rows: slots of the batch. max_model_len: tokens of a sequence, prompt and output. max_queued: sequences that may
    wait. depth: steps in flight at most; 2 keeps the device busy while the host reads. lone_tokens: see View.
    max_headroom: part of the pool that admissions may leave free after preemptions, 0..1 (admission.Headroom).
    speculation: chooses the drafts of decode rows. clock: seconds. Seq.arrival is of this clock if the policy uses it.

    The loop owns the leases. Pool, runner, policy and speculation stay the caller's. Raises InvalidSetup.
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
        lone_tokens: Sequence[int] = (),
        max_headroom: float = 0.1,
        speculation: Speculation[Owner] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(max_rows, max_queued, depth) < 1 or max_model_len < 2 or not 0 <= max_headroom <= 1:
            raise InvalidSetup(
                "max_rows, max_queued and depth must be at least 1, max_model_len at least 2 and max_headroom in "
                f"0..1, given {max_rows}, {max_queued}, {depth}, {max_model_len} and {max_headroom}"
            )
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.max_queued, self.depth, self.lone_tokens = max_queued, depth, lone_tokens
        self.stats = Stats()
        self._runner, self._pool, self._policy = runner, pool, policy
        self._speculation = speculation
        self._clock, self._now = Clock(), clock
        self._look_up = partial(num_cached, pool)
        self._headroom = Headroom(max_headroom)
        self._collected_at = 0.0  # time of reading the last result
        self._live: dict[int, Seq[Owner]] = {}  # by request id, until Finished
        self._running: dict[Seq[Owner], None] = {}  # in order of admission
        self._prefilling: dict[Seq[Owner], None] = {}
        self._decode: DecodeRows[Owner] = DecodeRows()
        self._last_rows: Sequence[Row[Owner]] = ()
        self._slots: list[Seq[Owner] | None] = [None] * (max_rows + 1)
        self._free_slots = list(range(max_rows, 0, -1))
        self._loads: Loads[Owner] = Loads(pool, self.stats)
        self._in_flight: deque[Step[Owner]] = deque()
        self._fences: dict[int, list[Seq[Owner]]] = {}  # ended sequences, by the last step with their rows
        self._leaving: set[Seq[Owner]] = set()  # the sequences of _fences
        self._left: list[int] = []  # slots that the next step must end
        self._blocks: list[BlockWrite[Owner]] = []  # table writes of the next step
        self._events: list[Event[Owner, Payload]] = []  # the next step() returns these
        self._changed = False  # the policy must be asked again
        self._failure: Exception | None = None  # the exception that ended the loop
        self._blocked = False  # no room for the next admission: do not look again until something changes

    # -- for the engine --

    def submit(self, seq: Seq[Owner]) -> None:
        """Queue a new sequence. Raises Rejected; the loop then keeps nothing of the sequence."""
        problem = refusal(seq, self.max_model_len, self._pool.capacity_tokens)
        if seq.id in self._live or seq.clock is not None:
            why = f"request {seq.id} was submitted before; make a new Seq, with an id of its own"
            problem = Rejected(RejectReason.INVALID, why)
        elif problem is None and self.stats.waiting >= self.max_queued:
            why = f"{self.stats.waiting} requests wait already (max_queued); try later"
            problem = Rejected(RejectReason.QUEUE_FULL, why)
        if problem is not None:
            self.stats.rejected[problem.reason] += 1
            raise problem
        seq.max_len = min(self.max_model_len, seq.prompt_len + seq.max_tokens)
        seq.clock = self._clock
        self._live[seq.id] = seq
        self.stats.submitted += 1
        self.stats.waiting += 1
        self._changed = True
        self._policy.on_submit(seq)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence. `reason`: STOP for a stop string. False: no live sequence has this id.

        The next step() reports Finished. The loop drops the tokens of steps in flight.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        if seq in self._running:
            self._left.append(seq.slot)
        self._end(seq, reason, self._events)
        return True

    @property
    def has_work(self) -> bool:
        """Whether step() has work to do or an event to report. A load is work until it ends, also after an abort."""
        return bool(self._live or self._in_flight or self._events or self._loads.under_way)

    @property
    def live(self) -> Sequence[Seq[Owner]]:
        """All sequences that have no terminal event yet."""
        return list(self._live.values())

    def step(self, wait_s: float | None = 0.0) -> list[Event[Owner, Payload]]:
        """One turn: launch a step if possible, then read the results that are ready.

        Waits up to wait_s seconds (None: no limit) for a result or the end of a load. It waits only if there is nothing
        to report and no further step can be launched. Returns at once when idle.

        Raises the exceptions of the runner, after it has returned the events before. The loop has then failed, and
        every later call raises the same. `live` has the sequences without a terminal event.
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
        loads = self._loads
        if loads.under_way:
            self._changed = loads.poll(0.0) or self._changed
        launched = len(self._in_flight) < self.depth and self._launch(events)
        self._changed = loads.begin_wanted() or self._changed
        wait = wait_s if not events and (not launched or len(self._in_flight) >= self.depth) else 0.0
        while self._in_flight:
            result = self._runner.collect(wait)
            if result is None:
                break
            self._reconcile(result, events)
            wait = 0.0
        if loads.under_way and not (launched or events or self._in_flight):
            self._changed = loads.poll(wait_s) or self._changed

    def drain(self) -> list[Event[Owner, Payload]]:
        """Wait for all steps in flight and report their events. Launches nothing."""
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
        decode = self._decode
        if self._speculation is not None and decode.rows:
            asked = index >= self._speculation.rest_until
            decode.draft(self._speculation.num_drafts(self._view(index)) if asked else {}, index)
        if (decode.drafts or index in decode.calendar) and not self._grow(index):
            self.stats.dry += 1
            return False
        chunks: list[Row[Owner]] = []
        joined: list[Seq[Owner]] = []
        short = False  # a chunk is smaller than the policy wants, because blocks are short
        # A step that preempts admits no sequence: the running rows need the blocks.
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
            if not short:  # running sequences get blocks before admissions
                self._admit(decision, chunks, joined, events)
        decode_rows = decode.rebuild() if decode.listed is None else decode.listed
        rows = decode_rows + chunks if chunks else decode_rows
        if short and not rows and not self._in_flight and not self._loads.drop_latest():
            self.stats.dry += 1
            self._preempt(self._policy.victim(self._view(index)))
        if not rows or (self._in_flight and not chunks and index > decode.horizon):
            return False  # no row runs, or all rows end in a step that is in flight
        changed = rows is not self._last_rows
        num_decode = len(decode_rows)
        step = Step(
            index, rows, changed, num_decode, self._left, joined, self._blocks, decode.drafts, self._now()
        )
        self._left, self._blocks = [], []
        self._last_rows, self._clock.launched = rows, index
        self._in_flight.append(step)
        self.stats.steps += 1
        if decode.drafts:
            decode.launched()
        for row in chunks:
            self._advance_prefill(row, index)
        self._runner.launch(step)
        return True

    def _grow(self, index: int) -> bool:
        """Reserve blocks for the decode rows that need some in step `index`. False: too few are free, drain first."""
        decode = self._decode
        ahead = LOOK_AHEAD if self._pool.num_free > ROOMY * self.max_rows else 0
        for seq, count in decode.drafts.items():
            lease, needed = seq.lease, min(seq.base + index - seq.entered + count, seq.max_len - 1)
            if lease is None or needed <= lease.num_tokens:
                continue
            if not (self._reserve(seq, lease, needed, ahead) or self._reserve(seq, lease, needed, 0)):
                decode.undraft(seq)  # the loop preempts no row for drafts
        due = decode.calendar.pop(index, [])
        while due:
            seq, lease = due[-1], due[-1].lease
            if seq.crossing != index or lease is None:
                due.pop()  # a stale entry
            elif self._reserve(seq, lease, seq.base + index - seq.entered, ahead):
                due.pop()
                decode.schedule(seq)
            elif ahead:
                ahead = 0  # many blocks are free, but not in every group
            elif self._gives_back((seq,) if self._in_flight else self._running) or self._loads.drop_latest():
                pass
            elif self._in_flight:
                decode.calendar[index] = due
                return False
            else:
                self._preempt(self._policy.victim(self._view(index)))
        return True

    def _reserve(self, seq: Seq[Owner], lease: Lease, num_tokens: int, ahead: int) -> bool:
        """Reserve a decode row's num_tokens tokens, and `ahead` more. False: no room."""
        if num_tokens - seq.committed >= COMMIT_EVERY:
            self._commit(seq)  # before the reserve, because the window may give blocks back
        grown = lease.reserve(min(num_tokens + ahead, seq.max_len - 1))
        if grown is None:
            return False
        self._blocks += (BlockWrite(seq, *part) for part in grown)
        return True

    def _view(self, index: int) -> View:
        return View(
            index, self._now(), self.max_rows, len(self._free_slots), self._pool.num_free, self._decode.num_tokens,
            self._decode.rows, self._prefilling, self._running, self.stats.loading, self._look_up,
            self.lone_tokens,
        )  # fmt: skip

    def _chunk(self, seq: Seq[Owner], num_tokens: int) -> Row[Owner]:
        end = room_for(seq, min(seq.scheduled + num_tokens, seq.target), self._blocks)
        return Row(seq, end - seq.scheduled, end == seq.target, seq.scheduled)

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
            if seq.state not in (SeqState.WAITING, SeqState.LOADING) or self._live.get(seq.id) is not seq:
                raise ContractError(f"the policy admits request {seq.id}, which is not waiting here")
            wanted = min(budget, decision.chunks.get(seq, budget))
            lease = self._lease(seq, wanted)
            if lease is None:
                continue
            seq.slot, seq.target = self._free_slots.pop(), len(seq.tokens)
            seq.state = SeqState.PREFILL
            seq.scheduled = seq.prefilled = lease.num_cached
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

    def _lease(self, seq: Seq[Owner], num_tokens: int) -> Lease | None:
        """The lease of a waiting sequence, with room for its first chunk. None: it loads, or there is no room."""
        if seq.state is SeqState.LOADING:
            return None
        loads, leave = self._loads, self._headroom.level if self._running else 0.0
        if seq.lease is None:
            seq.lease = self._pool.acquire(seq.tokens, seq.salt, seq.hashes)
            if seq.lease.num_loadable:
                if len(loads.under_way) + len(loads.wanted) >= len(self._free_slots):
                    self._blocked = True  # without a free row, loaded blocks would only occupy the pool
                    loads.drop(seq)
                    return None
                if loads.want(seq, seq.lease, leave):
                    return None
        fits = promise(seq.lease, seq, num_tokens, leave)
        while not fits and not self._running and loads.drop_latest(spared=seq):
            fits = promise(seq.lease, seq, num_tokens, leave)
        if fits:
            loads.ended.pop(seq, None)
            return seq.lease
        self._blocked = True
        if seq not in loads.ended:
            loads.drop(seq)
        return None

    def _advance_prefill(self, row: Row[Owner], index: int) -> None:
        """Count a launched chunk. After the last chunk the row decodes from the next step on."""
        seq = row.seq
        seq.scheduled += row.num_tokens
        self.stats.prefill_tokens += row.num_tokens
        if row.emits:
            del self._prefilling[seq]
            self._changed = True  # the next step has tokens for other prompts
            seq.state = SeqState.DECODE
            self._decode.enter(seq, index)

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
            gone = frozenset(self._leaving)  # the loop drops the tokens of these rows
        if step.drafts or result.advanced:
            advanced = {self._seq_at(slot, step.index): n for slot, n in (result.advanced or {}).items()}
            self._decode.advance(step, advanced, gone)
        if result.finished:
            ended = [(self._seq_at(slot, step.index), reason) for slot, reason in result.finished]
            drew = result.advanced or {}  # before a row with drafts failed
            failed = frozenset(
                seq for seq, reason in ended if reason is FinishReason.ERROR and not drew.get(seq.slot)
            )
        emits, computed = step.num_decode > 0, []
        for row in step.rows[step.num_decode :]:
            emits = emits or row.emits
            if row.seq not in gone and row.seq not in failed and row.start is not None:
                row.seq.prefilled = row.start + row.num_tokens
                computed.append(row.seq)
        if computed and self._gives_back(computed):
            self._blocked = False
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
        # The engine may not have appended the newest tokens yet; the next commit takes them.
        if seq.lease is not None:
            seq.committed = min(seq.confirmed, len(seq.tokens))
            seq.lease.commit(seq.tokens, seq.committed)

    def _gives_back(self, seqs: Iterable[Seq[Owner]]) -> bool:
        """Commit the confirmed tokens of these sequences. Returns whether windows gave blocks back."""
        free = self._pool.num_free
        for seq in seqs:
            self._commit(seq)
        return self._pool.num_free > free

    def _end(self, seq: Seq[Owner], reason: FinishReason, events: list[Event[Owner, Payload]]) -> None:
        """End a sequence. It keeps slot and lease until no step in flight has its row."""
        waiting = seq not in self._running
        if waiting:
            self._loads.drop(seq)
        elif reason is not FinishReason.ERROR:
            self._commit(seq)
        del self._live[seq.id]
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
        """Take a sequence out of all later steps."""
        seq.prefilled, seq.scheduled = seq.confirmed, seq.bound
        self._changed = True
        if seq in self._running:
            del self._running[seq]
            self._prefilling.pop(seq, None)
            self.stats.running -= 1
            self._decode.discard(seq)
            if self._blocks:
                self._blocks = [write for write in self._blocks if write.seq is not seq]
        seq.state = state

    def close(self) -> None:
        """Release the blocks of all sequences. No step may be under way, and none may follow."""
        for seq in (*self._live.values(), *self._leaving):
            self._let_go(seq)

    def _let_go(self, seq: Seq[Owner]) -> None:
        if seq.lease is not None:
            seq.lease.release()
            seq.lease = None
            self._slots[seq.slot] = None
            self._free_slots.append(seq.slot)
            self._changed = True

    def _preempt(self, seq: Seq[Owner]) -> None:
        """Send a running sequence back to waiting, to be recomputed. Nothing is in flight."""
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
        seq.prefilled = seq.scheduled = 0
        seq.num_preemptions += 1
        self.stats.waiting += 1
        self.stats.preemptions += 1
        self._headroom.on_preempt()
        self._policy.on_preempt(seq)

    def check(self) -> None:
        """Check the loop's books against each other. O(rows). Raises IntegrityError."""
        books = Books(
            self._clock, self.stats, self._in_flight, self._live, self._running, self._prefilling, self._decode,
            self._loads, self._slots, self._free_slots, self._fences, self._leaving,
        )  # fmt: skip
        if found := list(problems(books)):
            raise IntegrityError(found)
