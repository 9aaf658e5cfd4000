"""A server under loads, simulated: the engine's own scheduler and pool in virtual time, with predicted steps."""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openinfer.cli.bench.client import arrivals
from openinfer.cli.bench.record import percentile
from openinfer.cli.bench.serve import OfferedLoad
from openinfer.cli.explain.segments import Outline
from openinfer.cli.plan.tiers import tiers_of
from openinfer.cli.recipe_flags import Asked
from openinfer.graph import Buckets, Shape
from openinfer.kernels import Call, Figures, Parts, Prediction, Target, Workload
from openinfer.kvpool import Pool
from openinfer.scheduler import Policy, make_policy
from openinfer.scheduler.sim import Request, SteadyDrafts, StepWork, TierSpeeds, chats, simulate

PROMPT_STEP_S = 0.4e-3
"""Host seconds that a step with a prompt takes besides its time on the device, where nothing hides it. It is the median
of wall less device time of `bench step`'s prompts."""
ARRIVAL_S = 1.5e-3
"""Seconds from a client to the engine's queue and from the first token back: HTTP, JSON and the engine's process."""


@dataclass(slots=True)
class StepCost:
    """Seconds of a step (a sim.CostModel), padded as the engine pads it. It also keeps what the steps were made of.

    steps: the calls of every recorded step by its shape. ranks: GPUs that share a step. most_rows: of a step so far.
    """

    steps: Mapping[Shape, Sequence[Call]]
    buckets: Buckets
    figures: Figures
    ranks: int = 1
    most_rows: int = 0
    prompt_steps: int = 0
    context: int = 0
    """Tokens that the decode rows of the last step attended to, on average."""
    _totals: dict[Shape, Counter[str]] = field(default_factory=dict)
    """Of the steps of each shape: "steps", their "rows", cached "tokens", and "pairs" of query and key."""
    _predictions: dict[Shape, Prediction] = field(default_factory=dict)

    def decode_s(self, rows: int, drafts: int) -> float:
        """Seconds of a step in which each of `rows` decode rows has `drafts` drafts."""
        rows = min(rows, self.buckets.max_tokens // (1 + drafts))
        shape = self.buckets.choose(rows * (1 + drafts), rows, drafts=drafts, chunks=False)
        read = rows * self.context
        return self._prediction(shape).seconds(read, read * (1 + drafts), rows)

    def __call__(self, work: StepWork) -> float:
        new = work.prefill_tokens
        self.context = work.decode_context // max(1, work.decode_rows)
        rows = work.decode_rows + (new > 0)
        tokens = work.decode_rows + work.drafts + new
        drafts = math.ceil(work.drafts / max(1, work.decode_rows))
        shape = self.buckets.choose(tokens, rows, drafts=drafts, chunks=not drafts or new > 0)
        # A chunk of n tokens after m has n * m + n * (n + 1) / 2 pairs and reads m + n tokens.
        read = round(work.prefill_context / new + (new - 1) / 2) if new else 0
        queries = 1 + work.drafts / max(1, work.decode_rows)  # of a decode row
        kv_tokens = work.decode_context + read
        qk_pairs = round(queries * work.decode_context) + work.prefill_context
        total = self._totals.setdefault(shape, Counter())
        total.update(steps=1, rows=rows, tokens=kv_tokens, pairs=qk_pairs)
        self.most_rows = max(self.most_rows, rows)
        self.prompt_steps += new > 0
        host_s = self.figures.host_s + (PROMPT_STEP_S if new else 0.0)
        return self._prediction(shape).seconds(kv_tokens, qk_pairs, rows) + host_s

    def _prediction(self, shape: Shape) -> Prediction:
        if shape not in self._predictions:
            calls, (tokens, rows, *_) = self.steps[shape], shape
            self._predictions[shape] = Prediction.of(calls, tokens, rows, self.figures, self.ranks)
        return self._predictions[shape]

    def shares(self) -> dict[str, float]:
        """The parts of all steps' time by what binds, the largest first; they add up to 1."""
        steps = sum(total["steps"] for total in self._totals.values())
        seconds = {"host": self.prompt_steps * PROMPT_STEP_S + steps * self.figures.host_s}
        for shape, total in self._totals.items():
            means = (total[one] // total["steps"] for one in ("rows", "tokens", "pairs"))
            mean = Workload(shape.tokens, *means)
            for name, one in Parts.of(self.steps[shape], mean, self.figures, self.ranks).names.items():
                seconds[name] = seconds.get(name, 0.0) + total["steps"] * one
        whole = sum(seconds.values())
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: one / whole for name, one in largest if one}


FULL = 0.97
"""A part of the pool, or of the most that a server completes, that counts as all of it."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one load. Latencies in milliseconds, as p50, p99 and mean.

    busy: part of the time in which a step ran. binds: shares of the steps' time by what they wait for. limits: "rows"
    and "KV room", as far as none was left. rows: the most rows at once. cache: the largest used part of the cache."""

    load: OfferedLoad
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Json
    tpot_ms: Json
    e2el_ms: Json
    busy: float
    binds: dict[str, float]
    limits: list[str]
    rows: int
    cache: float
    preemptions: int
    rejected: int
    hits: float = 0.0
    """Part of the prompts' tokens that was cached."""

    def as_dict(self) -> Json:
        """For JSON. An infinite rate is "inf", as in the results of bench serve."""
        rate = self.load.request_rate
        load = dataclasses.asdict(self.load) | {"request_rate": "inf" if math.isinf(rate) else rate}
        own = dataclasses.asdict(self)
        del own["load"]
        return load | own

    @property
    def power(self) -> float:
        """Kleinrock's power: throughput over latency. The load with the largest is the knee."""
        return self.requests_per_s / float(self.e2el_ms["mean"])


@dataclass(frozen=True, slots=True)
class Agents:
    """Clients that go on: each prompt is all that was said, and the load's input_len tokens more. They all begin with
    the same `system` tokens, take `turns` turns, and think `think_s` seconds on average. speeds: of the tiers."""

    turns: int
    system: int
    think_s: float
    speeds: TierSpeeds


@dataclass
class PlannedServer:
    """An engine with these options on GPUs that need not be here. acceptance: the chance that a draft is accepted where
    those before it were. agents None: prompts share nothing, so there is no prefix cache and no tier. cache_bytes: the
    memory of each GPU that is left for the cache.

    To make one traces its steps and plans its memory. Raises SetupError."""

    asked: Asked
    target: Target
    figures: Figures
    gpus: int
    acceptance: float = 0.0
    agents: Agents | None = None

    def __post_init__(self) -> None:
        options = dataclasses.replace(self.asked.options, enable_prefix_caching=self.agents is not None)
        recipe, source, memory = self.asked.recipe, self.asked.source(), self.figures.memory_bytes
        self.outline = Outline(recipe, source, options, self.target, ranks=self.gpus, memory_bytes=memory)
        room = int(memory * options.gpu_memory_utilization) - self.outline.fixed_bytes
        wanted = options.kv_cache_memory_bytes
        self.cache_bytes = room if wanted is None else wanted
        self.outline.cache(self.cache_bytes)  # too little room is said before the work

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.outline.max_model_len, self.outline.cache(self.cache_bytes).capacity_tokens)

    def policy(self) -> Policy:
        """A new policy, as the flags want it. Raises InvalidSetup."""
        asked = self.asked.options.scheduling_policy
        if not isinstance(asked, str):
            return asked
        return make_policy(asked, max_batched_tokens=self.outline.buckets.max_tokens)

    def _drafts(self, cost: StepCost, seed: int) -> SteadyDrafts | None:
        levels, most = self.outline.buckets.draft_levels, self.outline.buckets.max_tokens
        return SteadyDrafts(levels, most, self.acceptance, cost.decode_s, seed) if levels else None

    def serve(self, load: OfferedLoad) -> Point:
        """Simulate one load. Raises SchedulerError."""
        options, pool = self.asked.options, self.outline.cache(self.cache_bytes)
        tiers = None
        if self.agents is not None:
            tiers = tiers_of(options, pool.groups, self.outline.parts, self.agents.speeds)
            pool = Pool(pool.groups, loader=tiers, saver=tiers)
        snapshots = self.outline.model.states.snapshots if self.agents is not None else None
        cost, most_used = StepCost(self.outline.steps, self.outline.buckets, self.figures, self.gpus), 0.0

        def timed(work: Any) -> float:
            nonlocal most_used
            most_used = max(most_used, pool.used_tokens / pool.capacity_tokens)
            return cost(work)

        report = simulate(
            requests(load, self.agents), self.policy(), pool, timed, max_rows=options.max_num_seqs,
            max_model_len=self.max_model_len,
            max_queued=options.max_num_queued_reqs, drafts=self._drafts(cost, load.seed), tiers=tiers,
            lone_tokens=self.outline.buckets.lone_tokens,
            snapshots=snapshots,
        )  # fmt: skip
        done = [record for record in report.records if record.num_output]
        full = most_used > FULL or report.preemptions > 0
        limits = ["KV room"] * full + ["rows"] * (cost.most_rows >= options.max_num_seqs)
        ttft = _figures([one.ttft + ARRIVAL_S for one in done])
        e2el = _figures([one.last_token - one.arrival + ARRIVAL_S for one in done])
        return Point(
            load, report.requests_per_s, report.output_tokens_per_s, ttft,
            _figures([one.tpot or 0.0 for one in done]), e2el, report.busy, cost.shares(), limits, cost.most_rows,
            most_used, report.preemptions, report.rejected, report.hit_rate,
        )  # fmt: skip


def requests(load: OfferedLoad, agents: Agents | None = None) -> list[Request]:
    """The requests of a load. Without agents, at the times at which `bench serve` sends them."""
    if agents is not None:
        found = chats(
            load.num_prompts, load.request_rate, (load.input_len,) * 2, (load.output_len,) * 2, turns=agents.turns,
            system_tokens=agents.system, think_s=agents.think_s, seed=load.seed,
        )  # fmt: skip
        for number, request in enumerate(found if load.max_concurrency else ()):
            request.arrival, request.after = ARRIVAL_S, number - 1 if number else None
        return found
    times = arrivals(load.num_prompts, load.request_rate, random.Random(load.seed))
    limit = load.max_concurrency
    found = []
    for number, time in enumerate(times):
        after = number - limit if limit and number >= limit else None
        prompt, output = [1] * load.input_len, [1] * load.output_len
        found.append(Request(time if after is None else ARRIVAL_S, prompt, output, load.output_len, after))
    return found


def _figures(seconds: list[float]) -> Json:
    mean = sum(seconds) / len(seconds) if seconds else math.nan
    percentiles = {f"p{p}": percentile(seconds, p) * 1e3 for p in (50, 99)}
    return {"mean": mean * 1e3, **percentiles}
