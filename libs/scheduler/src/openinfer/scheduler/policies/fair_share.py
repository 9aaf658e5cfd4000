"""FairShare: tenants get equal shares of the work, whoever sends more."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..policy import View
from ..runner import Step
from ..sequence import Seq
from .batching import Batching
from .queues import ArrivalQueue

OUTPUT_WEIGHT = 2.0
"""An output token's share of the device's time over a prompt token's, roughly, in a full batch."""
MAX_IDLE = 4096
"""Tenants without requests whose counters are kept."""


@dataclass(slots=True)
class _Tenant:
    served: float = 0.0  # tokens, weighted; of those that run, the prompts only
    running: int = 0
    admitted_at: int = 0  # steps at which the running ones were admitted, in sum
    waiting: ArrivalQueue = field(default_factory=ArrivalQueue)

    def counter(self, step: int) -> float:
        """Tokens served up to a step. A row yields one token a step, which saves counting them."""
        return self.served + OUTPUT_WEIGHT * (self.running * step - self.admitted_at)


class FairShare(Batching):
    """The tenant (Seq.tenant) that was served least goes first: a virtual token counter for each.

    Prompt tokens that had to be computed count when a sequence is admitted, output tokens twice, as they come. A
    tenant that comes back from idleness starts at the least counter of those that are active: it has saved up
    nothing, and owes nothing that it did not take from them. When blocks run out, the tenant served most gives up its
    latest sequence.

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
        self._since: dict[Seq[Any], int] = {}  # step of admission, of who runs
        self._step = 0
        self._level = 0.0  # the counter of whoever was active last

    def on_submit(self, seq: Seq[Any]) -> None:
        """Queue it; a tenant that was idle is brought up to the others."""
        tenant = self._active.get(seq.tenant)
        if tenant is None:
            least = min((other.counter(self._step) for other in self._active.values()), default=self._level)
            tenant = self._active[seq.tenant] = _Tenant(max(least, self._idle.pop(seq.tenant, 0.0)))
        tenant.waiting.push(seq)

    def on_admit(self, seq: Seq[Any]) -> None:
        """Charge what is computed of its prompt. What a preemption makes it compute again is not the tenant's fault."""
        tenant = self._active[seq.tenant]
        tenant.waiting.discard(seq)
        tenant.running += 1
        tenant.admitted_at += self._step
        self._since[seq] = self._step
        if not seq.num_preemptions:
            tenant.served += seq.remaining

    def on_preempt(self, seq: Seq[Any]) -> None:
        """Queue it at the head of its tenant's."""
        self._stop(seq)
        self._active[seq.tenant].waiting.push(seq)

    def on_finish(self, seq: Seq[Any]) -> None:
        """Settle its account."""
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
        """Time goes on."""
        self._step = step.index
        super().on_step(step, seconds)

    def candidates(self, view: View) -> Iterator[Seq[Any]]:
        """From the tenant served least, each as if its prompt were computed already."""
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
        """The latest admitted of the tenant that was served most."""
        return max(reversed(view.running), key=lambda seq: self._active[seq.tenant].counter(self._step))
