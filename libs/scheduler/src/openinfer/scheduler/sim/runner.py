"""SimRunner: a device that computes nothing and takes time."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..policy import View
from ..runner import Step, StepResult
from ..sequence import FinishReason, Seq
from ..worth import Worth
from .cost import CostModel, StepWork
from .report import Record

Snapshots = Callable[[int, int, int], Sequence[int]]


@dataclass(slots=True)
class SteadyDrafts:
    """A Speculation: each step has as many drafts a row as pay (Worth), as far as a step of `max_tokens` tokens has
    room. A draft is accepted with the chance `acceptance`, if those before it were.

    levels: see Worth. cost(rows, drafts): seconds of a step of these decode rows with this number of drafts each.
    """

    levels: Sequence[int]
    max_tokens: int
    acceptance: float
    cost: Callable[[int, int], float]
    seed: int = 0
    rest_until: int = 0
    worth: Worth = field(init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random, self.worth = random.Random(self.seed), Worth(self.levels)

    def num_drafts(self, view: View) -> Mapping[Seq[Record], int]:
        """See Speculation. One token of a step is left for prompts."""
        rows, wanted = len(view.decoding), {}
        most = self.worth.choose([self.levels[-1]] * rows, rows, partial(self.cost, rows))
        room = self.max_tokens - 1 - rows
        for seq in view.decoding:
            count = min(most, room)
            if count <= 0:
                break
            wanted[seq] = count
            room -= count
        return wanted

    def accepted(self, drafts: int) -> int:
        """How many of a row's drafts are accepted."""
        chance, found = self._random.random, 0
        while found < drafts and chance() < self.acceptance:
            found += 1
        self.worth.saw({(drafts, found): 1})
        return found


class SimRunner:
    """A Runner in virtual time. Steps run one after the other; the cost model gives their time. A row ends after the
    output of its request (Seq.owner is a Record).

    now: seconds. Time passes while the caller waits for a result, and when the caller sets it. drafts: says how many
    of a row's drafts are accepted. snapshots: positions where a prompt's chunk (start, end, tokens of the prompt) keeps
    the state in the pool, whose leases are then those of `openinfer.kvpool`.
    """

    def __init__(
        self, cost: CostModel, drafts: SteadyDrafts | None = None, snapshots: Snapshots | None = None
    ) -> None:
        self.now = 0.0
        self.busy_s = 0.0
        self._cost, self._drafts, self._snapshots = cost, drafts, snapshots
        self._free_at = 0.0  # when the device is done with all that was launched
        self._running: deque[tuple[float, StepResult[None]]] = deque()
        # By step, with num_preemptions at the time.
        self._endings: dict[int, list[tuple[Seq[Record], int]]] = {}
        self._last: dict[Seq[Record], int] = {}  # step in which a row ends; accepted drafts bring it closer
        self._context = 0

    def launch(self, step: Step[Record]) -> None:
        work = self._work(step)
        for row in step.rows[step.num_decode :]:
            if row.emits:
                # It yields a token in this step and in each later one.
                said = row.seq.target - row.seq.prompt_len
                self._end_at(row.seq, step.index + self._length(row.seq) - said - 1)
            if self._snapshots is not None and row.start is not None:
                lease: Any = row.seq.lease
                for end in self._snapshots(row.start, row.start + row.num_tokens, row.seq.target):
                    lease.snapshot(end)
        accepted, advanced = self._advance(step)
        finished = []
        for seq, preemptions in self._endings.pop(step.index, ()):
            due = self._last.get(seq) == step.index and seq.num_preemptions == preemptions
            if due and seq.finish_reason is None:
                at_limit = self._length(seq) == seq.max_len - seq.prompt_len
                finished.append((seq.slot, FinishReason.LENGTH if at_limit else FinishReason.STOP))
                del self._last[seq]
        seconds = self._cost(work)
        drafts, rows = self._drafts, work.decode_rows
        if drafts is not None and step.joined:
            drafts.worth.joined(len(step.joined) / len(step.rows))
        if drafts is not None and rows and not work.prefill_tokens:
            drafts.worth.spent(rows, accepted, seconds, drafts.cost(rows, 0))
        self.busy_s += seconds
        self._free_at = max(self._free_at, self.now) + seconds
        result: StepResult[None] = StepResult(step.index, finished, advanced=advanced, seconds=seconds)
        self._running.append((self._free_at, result))

    def _work(self, step: Step[Record]) -> StepWork:
        if step.changed:
            seqs = [row.seq for row in step.rows[: step.num_decode]]
            # Seq.bound of each, whose clock is the loop's; because a call for each row took longest here.
            launched = seqs[0].clock.launched if seqs and seqs[0].clock is not None else 0
            self._context = sum([min(s.base - s.entered + launched, s.max_len - 1) for s in seqs])
        else:
            self._context += step.num_decode
        tokens = context = 0
        for _, num_tokens, _, start in step.rows[step.num_decode :]:
            tokens += num_tokens
            context += num_tokens * (start or 0) + num_tokens * (num_tokens + 1) // 2
        return StepWork(step.num_decode, self._context, tokens, context, sum(step.drafts.values()))

    def _advance(self, step: Step[Record]) -> tuple[int, dict[int, int] | None]:
        """Accept drafts. Returns their number, and StepResult.advanced."""
        advanced, total = {}, 0
        for seq, count in step.drafts.items():
            left = self._last.get(seq, -1) - step.index
            if self._drafts is None or left < 0:
                continue  # the row has ended, and the loop does not know yet
            accepted = min(self._drafts.accepted(count), left)
            total += accepted
            if accepted < count:
                advanced[seq.slot] = 1 + accepted
            if accepted:
                self._end_at(seq, self._last[seq] - accepted)
        self._context += total
        return total, advanced or None

    def _end_at(self, seq: Seq[Record], last: int) -> None:
        self._last[seq] = last
        self._endings.setdefault(last, []).append((seq, seq.num_preemptions))

    def _length(self, seq: Seq[Record]) -> int:
        return min(len(seq.owner.request.output), seq.max_len - seq.prompt_len)

    def collect(self, wait_s: float | None) -> StepResult[None] | None:
        """The oldest result, if it comes within wait_s seconds. The time passes."""
        done_at, result = self._running[0]
        if wait_s is not None and done_at > self.now + wait_s:
            self.now += wait_s
            return None
        self.now = max(self.now, done_at)
        self._running.popleft()
        return result
