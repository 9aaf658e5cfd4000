"""Policies that rank sequences: Priority and Deadline."""

import math
from collections.abc import Iterator
from itertools import chain, count, dropwhile, islice, takewhile
from typing import Any

from ..errors import InvalidSetup
from ..policy import View
from ..runner import Step
from ..sequence import Seq
from .batching import Batching, SortedQueue


class Priority(Batching):
    """The lowest Seq.priority first. Each `ageing_s` seconds of waiting count as one level, so no sequence starves.

    All sequences age alike, so a rank is fixed at arrival. The policy needs Seq.arrival. Priority decides the order of
    the queue, of prefill, and of preemption when blocks run out. It does not take the slot of a running sequence.
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
            raise InvalidSetup(f"ageing_s must be positive, given {ageing_s}; math.inf: no ageing")

        def aged(seq: Seq[Any]) -> float:
            return seq.priority if math.isinf(ageing_s) else seq.priority * ageing_s + seq.arrival

        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s, rank=aged)


class Deadline(Batching):
    """Earliest deadline first. A request should get its first token ttft_s seconds after its arrival, and the next
    tokens tpot_s apart. Seq.ttft_s and Seq.tpot_s override these.

    Sequences are ordered by the latest time at which their prefill must start, which follows from measured step times.
    Under overload, this order alone would serve only sequences that just miss their deadline. So sequences that can
    still be in time go first, and every fourth admission takes the sequence that is late longest. The tightest tpot_s
    of the running sequences sets the pace of prefill. The policy needs Seq.arrival of the loop's clock.
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
        # Running sequences that have an objective of their own.
        self._objectives = SortedQueue(self._objective)
        self._admitted = 0
        # Recent means over steps with prompts: seconds of a step, seconds of a prompt token.
        self._step_s = self._token_s = 0.0

    def _deadline(self, seq: Seq[Any]) -> float:
        """Latest start of prefill. Preempted sequences, amid an answer, come first."""
        if seq.num_output:
            return -math.inf
        ttft_s = self._ttft_s if seq.ttft_s is None else seq.ttft_s
        return seq.arrival + ttft_s - len(seq.tokens) * self._token_s

    def _objective(self, seq: Seq[Any]) -> float:
        return math.inf if seq.tpot_s is None else seq.tpot_s

    def on_admit(self, seq: Seq[Any]) -> None:
        super().on_admit(seq)
        self._admitted += 1
        if seq.tpot_s is not None:
            self._objectives.push(seq)

    def on_preempt(self, seq: Seq[Any]) -> None:
        super().on_preempt(seq)
        self._objectives.discard(seq)

    def on_finish(self, seq: Seq[Any]) -> None:
        super().on_finish(seq)
        self._objectives.discard(seq)

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """Learn the time of prompts, and pace prefill by the tightest objective."""
        tokens = sum([row.num_tokens for row in step.rows[step.num_decode :]])
        if tokens:
            self._step_s += (seconds - self._step_s) / 16
            self._token_s += (seconds / max(tokens, 64) - self._token_s) / 16
        if self.pace is not None:
            tightest = map(self._objective, islice(self._objectives, 1))
            self.pace.objective_s = min([self._tpot_s, *tightest])
        super().on_step(step, seconds)

    def candidates(self, view: View) -> Iterator[Seq[Any]]:
        """Preempted ones, then those that can meet their deadline; every fourth place is for one that cannot."""
        # Two steps are in flight, and a prompt shares its step with others, so it must start this much earlier.
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
