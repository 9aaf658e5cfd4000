"""Policies that give each sequence a rank: by priority, by deadline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, count, dropwhile, takewhile
from typing import Any

from ..errors import InvalidSetup
from ..policy import View
from ..runner import Step
from ..sequence import Seq
from .batching import Batching
from .queues import SortedQueue


class Priority(Batching):
    """The lowest Seq.priority first; waiting `ageing_s` seconds is worth one level, so nobody starves.

    Since all age alike, a sequence's rank is fixed at arrival. It needs Seq.arrival. A higher priority goes ahead in
    the queue, in prefill and when blocks run out; it does not take the slot of someone who runs.
    """

    uses_priority = True

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
        ageing_s: float = 10.0,
    ) -> None:
        if ageing_s <= 0:
            raise InvalidSetup(f"ageing_s must be positive, given {ageing_s}; math.inf: nobody ages")
        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s, rank=self._aged)
        self._ageing_s = ageing_s

    def _aged(self, seq: Seq[Any]) -> float:
        if math.isinf(self._ageing_s):
            return seq.priority
        return seq.priority * self._ageing_s + seq.arrival


class Deadline(Batching):
    """Earliest deadline first: a request should have its first token ttft_s seconds after its arrival, and the others
    tpot_s apart (Seq.ttft_s and Seq.tpot_s where given).

    The order is by the latest time at which prefill must start, from the time that steps were seen to take. Under
    overload that alone would serve only those who are just too late. So who can no longer be in time goes behind who
    can, except that every fourth admission is of who is late longest. tpot_s sets the pace of
    prefill; of several objectives among those that run, the tightest. Needs Seq.arrival of the loop's clock.
    """

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        ttft_s: float = 0.5,
        tpot_s: float = 0.05,
    ) -> None:
        if ttft_s <= 0:
            raise InvalidSetup(f"ttft_s must be positive, given {ttft_s}")
        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s, rank=self._deadline)
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self.waiting = self._deadlines = SortedQueue(self._deadline)
        self._objectives = SortedQueue(self._objective)  # of those that run with one of their own
        self._admitted = 0
        self._step_s = self._token_s = (
            0.0  # recent means over steps with prompts: of a step, of a prompt token
        )

    def _deadline(self, seq: Seq[Any]) -> float:
        """When prefill must start. Preempted ones are in the middle of their answer: before all others."""
        if seq.num_output:
            return -math.inf
        ttft_s = self._ttft_s if seq.ttft_s is None else seq.ttft_s
        return seq.arrival + ttft_s - len(seq.tokens) * self._token_s

    def _objective(self, seq: Seq[Any]) -> float:
        return math.inf if seq.tpot_s is None else seq.tpot_s

    def on_admit(self, seq: Seq[Any]) -> None:
        """Count it; heed its objective."""
        super().on_admit(seq)
        self._admitted += 1
        if seq.tpot_s is not None:
            self._objectives.push(seq)

    def on_preempt(self, seq: Seq[Any]) -> None:
        """Its objective rests."""
        super().on_preempt(seq)
        self._objectives.discard(seq)

    def on_finish(self, seq: Seq[Any]) -> None:
        """Forget it."""
        super().on_finish(seq)
        self._objectives.discard(seq)

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """Learn how long prompts take; pace by the tightest objective."""
        tokens = sum([row.num_tokens for row in step.rows[step.num_decode :]])
        if tokens:
            self._step_s += (seconds - self._step_s) / 16
            self._token_s += (seconds / max(tokens, 64) - self._token_s) / 16
        if self.pace is not None:
            tightest = next(iter(self._objectives), None)
            self.pace.objective_s = self._tpot_s
            if tightest is not None:
                self.pace.objective_s = min(self._tpot_s, self._objective(tightest))
        super().on_step(step, seconds)

    def candidates(self, view: View) -> Iterator[Seq[Any]]:
        """Resumed ones, then those in time, with every fourth place for one who is late."""
        # Two steps are launched already, and a prompt shares its own with others: some slack pays.
        start = view.now + 4 * self._step_s
        resumed = takewhile(lambda seq: seq.num_output, self._deadlines)
        late = dropwhile(lambda seq: seq.num_output, self._deadlines.before(start))
        return chain(resumed, self._interleaved(self._deadlines.since(start), late))

    def _interleaved(self, in_time: Iterator[Seq[Any]], late: Iterator[Seq[Any]]) -> Iterator[Seq[Any]]:
        for place in count(self._admitted):
            first, second = (late, in_time) if place % 4 == 3 else (in_time, late)
            seq = next(first, None) or next(second, None)
            if seq is None:
                return
            yield seq
