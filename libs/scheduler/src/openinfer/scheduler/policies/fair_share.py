"""FairShare: tenants get equal shares of the device, whatever number of requests they send."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..policy import View
from ..runner import Step
from ..sequence import Seq
from .batching import ArrivalQueue, Batching

OUTPUT_WEIGHT = 2.0
"""Cost of an output token relative to a prompt token, roughly, in a full batch."""
MAX_IDLE = 4096
"""Number of idle tenants whose counters are kept."""


@dataclass(slots=True)
class _Tenant:
    served: float = 0.0  # weighted tokens; of running sequences, only the prompt tokens
    running: int = 0
    admitted_at: int = 0  # sum of the admission steps of its running sequences
    waiting: ArrivalQueue = field(default_factory=ArrivalQueue)

    def counter(self, step: int) -> float:
        """Weighted tokens served up to a step. A running row counts as one token a step, also with drafts."""
        return self.served + OUTPUT_WEIGHT * (self.running * step - self.admitted_at)


class FairShare(Batching):
    """The tenant (Seq.tenant) with the lowest virtual token counter goes first.

    Computed prompt tokens count when a sequence is admitted. Output tokens count twice, as they come. A tenant that was
    idle starts at the lowest counter of the active tenants, so it has saved nothing up. When blocks run out, the tenant
    with the highest counter gives up its latest sequence.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A plan is O(active tenants).
    """

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
    ) -> None:
        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s)
        self._active: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # counters, least recently active first
        self._since: dict[Seq[Any], int] = {}  # admission step of each running sequence
        self._step = 0
        self._level = 0.0  # counter of the tenant that was active last

    def on_submit(self, seq: Seq[Any]) -> None:
        """Queue it. Raise the counter of a tenant that was idle to the lowest of the active tenants."""
        tenant = self._active.get(seq.tenant)
        if tenant is None:
            least = min((other.counter(self._step) for other in self._active.values()), default=self._level)
            tenant = self._active[seq.tenant] = _Tenant(max(least, self._idle.pop(seq.tenant, 0.0)))
        tenant.waiting.push(seq)

    def on_admit(self, seq: Seq[Any]) -> None:
        """Charge the prompt tokens that must be computed. Recomputation after a preemption is not charged."""
        tenant = self._active[seq.tenant]
        tenant.waiting.discard(seq)
        tenant.running += 1
        tenant.admitted_at += self._step
        self._since[seq] = self._step
        if not seq.num_preemptions:
            tenant.served += seq.remaining

    def on_preempt(self, seq: Seq[Any]) -> None:
        self._stop(seq)
        self._active[seq.tenant].waiting.push(seq)

    def on_finish(self, seq: Seq[Any]) -> None:
        """Charge its output, and forget a tenant without requests."""
        tenant = self._active[seq.tenant]
        if seq in self._since:
            self._stop(seq)
        tenant.waiting.discard(seq)
        if not tenant.running and not tenant.waiting:
            del self._active[seq.tenant]
            self._level = self._idle[seq.tenant] = tenant.served
            if len(self._idle) > MAX_IDLE:
                self._idle.popitem(last=False)

    def _stop(self, seq: Seq[Any]) -> None:
        tenant, since = self._active[seq.tenant], self._since.pop(seq)
        tenant.running -= 1
        tenant.admitted_at -= since
        tenant.served += OUTPUT_WEIGHT * max(0, self._step - since)

    def on_step(self, step: Step[Any], seconds: float) -> None:
        self._step = step.index
        super().on_step(step, seconds)

    def candidates(self, view: View) -> Iterator[Seq[Any]]:
        """Sequences of the tenant with the lowest counter first. Each one adds its prompt to the counter at once."""
        heap = [
            (tenant.counter(self._step), name, iter(tenant.waiting))
            for name, tenant in self._active.items()
            if tenant.waiting
        ]
        heapq.heapify(heap)
        while heap:
            counter, name, waiting = heap[0]
            seq = next(waiting, None)
            if seq is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (counter + len(seq.tokens), name, waiting))
            yield seq

    def victim(self, view: View) -> Seq[Any]:
        """The latest admitted sequence of the tenant with the highest counter."""
        return max(reversed(view.running), key=lambda seq: self._active[seq.tenant].counter(self._step))
