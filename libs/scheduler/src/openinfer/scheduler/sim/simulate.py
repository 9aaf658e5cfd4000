"""simulate(): a workload through the real StepLoop, in virtual time."""

import heapq
from array import array
from collections.abc import Sequence

from ..errors import Rejected, SchedulerError
from ..events import Event, Finished, Scheduled, Tokens
from ..loop import StepLoop
from ..policy import Policy
from ..pool import Pool
from ..sequence import Seq
from .cost import CostModel
from .report import Record, Report
from .runner import SimRunner, Snapshots, SteadyDrafts
from .tiers import SimTiers
from .workloads import Request


def simulate(
    workload: Sequence[Request],
    policy: Policy,
    pool: Pool,
    cost: CostModel,
    *,
    max_rows: int = 256,
    max_model_len: int = 32768,
    max_queued: int = 1024,
    max_headroom: float = 0.1,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    drafts: SteadyDrafts | None = None,
    tiers: SimTiers | None = None,
    snapshots: Snapshots | None = None,
    lone_tokens: Sequence[int] = (),
) -> Report:
    """Serve a workload and report. Policy, pool and loop are real, and must be new; `cost` models the time of the
    device. ttft_s, tpot_s: objectives of Report.goodput. drafts: the speculation; None: no row has drafts. tiers: the
    pool's, which get this clock. snapshots: see SimRunner. lone_tokens: see StepLoop.

    Raises SchedulerError if requests wait and the policy runs none. Exceptions of the parts pass through.
    """
    runner = SimRunner(cost, drafts, snapshots)
    if tiers is not None:
        tiers.clock = runner
    loop: StepLoop[Record, None] = StepLoop(
        runner, pool, policy, max_rows=max_rows, max_model_len=max_model_len, max_queued=max_queued,
        max_headroom=max_headroom, lone_tokens=lone_tokens, speculation=drafts, clock=lambda: runner.now,
    )  # fmt: skip
    return _Simulation(workload, loop, runner, drafts is not None).run(ttft_s, tpot_s)


class _Simulation:
    def __init__(
        self, workload: Sequence[Request], loop: StepLoop[Record, None], runner: SimRunner, drafts: bool
    ) -> None:
        self.workload, self.loop, self.runner, self.drafts = workload, loop, runner, drafts
        self.records: list[Record] = []
        self.gaps = array("d")
        self.coming = [(r.arrival, i) for i, r in enumerate(workload) if r.after is None]
        heapq.heapify(self.coming)
        self.followers: dict[int, list[int]] = {}
        for i, request in enumerate(workload):
            if request.after is not None:
                self.followers.setdefault(request.after, []).append(i)

    def run(self, ttft_s: float | None, tpot_s: float | None) -> Report:
        loop, runner = self.loop, self.runner
        idle = 0
        while self.coming or loop.has_work:
            while self.coming and self.coming[0][0] <= runner.now:
                self._submit(*heapq.heappop(self.coming))
            if not loop.has_work:
                if self.coming:
                    runner.now = max(runner.now, self.coming[0][0])
                continue
            wait = self.coming[0][0] - runner.now if self.coming else None
            before = loop.stats.steps, runner.now
            for event in loop.step(wait):
                self._note(event)
            stands_still = (loop.stats.steps, runner.now) == before and not loop.stats.in_flight
            if stands_still and self.coming:
                runner.now = max(runner.now, self.coming[0][0])
            idle = idle + 1 if stands_still and not self.coming else 0
            if idle > 3:
                raise SchedulerError(f"{len(loop.live)} requests wait, and the policy runs none of them")
        return Report.of(
            self.records, self.gaps, busy_s=runner.busy_s, steps=loop.stats.steps,
            preemptions=loop.stats.preemptions, ttft_s=ttft_s, tpot_s=tpot_s,
        )  # fmt: skip

    def _submit(self, arrival: float, number: int) -> None:
        request = self.workload[number]
        record = Record(request, arrival)
        seq = Seq(
            number,
            list(request.prompt),
            request.max_tokens,
            priority=request.priority,
            tenant=request.tenant,
            arrival=arrival,
            owner=record,
        )
        self.records.append(record)
        try:
            self.loop.submit(seq)
        except Rejected:
            record.rejected = True
            self._follow(number)

    def _note(self, event: Event[Record, None]) -> None:
        now = self.runner.now
        match event:
            case Tokens():
                gaps = self.gaps
                one_each = event.advanced is None and not self.drafts  # spares a call a row
                for position, seq in event.emitting():
                    record = seq.owner
                    for _ in (None,) if one_each else range(event.num_tokens(position)):
                        number = record.num_output
                        seq.tokens.append(record.request.output[number])
                        record.num_output = number + 1
                        if number:
                            gaps.append(now - record.last_token)
                        else:
                            record.first_token = now
                        record.last_token = now
            case Scheduled(seq, num_cached):
                seq.owner.num_cached = num_cached
            case Finished(seq):
                seq.owner.num_preemptions = seq.num_preemptions
                self._follow(seq.id)

    def _follow(self, number: int) -> None:
        """Schedule the requests that continue this one, also after a rejection."""
        for follower in self.followers.get(number, ()):
            heapq.heappush(self.coming, (self.runner.now + self.workload[follower].arrival, follower))
