"""Plans of servers beside each other: the knee of each, and which flags to take."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from openinfer.cli.plan.load import PlannedServer, Point

STEPS = (512, 1024, 2048, 4096)
"""Token budgets of a step that are compared."""
PACES = (1.5, 3.0)
"""Paces of decode rows that are compared, in TPOTs of one request alone."""
WORTH = 1.02
"""Other flags must be better than those asked for by this factor."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Milliseconds that 99 of 100 requests must keep; None: no objective."""

    ttft_ms: float | None
    tpot_ms: float | None

    def met(self, point: Point) -> bool:
        """Whether the point keeps both, and refuses no request."""
        pairs = ((self.ttft_ms, point.ttft_ms), (self.tpot_ms, point.tpot_ms))
        return not point.rejected and all(limit is None or found["p99"] <= limit for limit, found in pairs)

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True, slots=True)
class Variant:
    """A server by the flags that it differs in, and its points: all at once, one request at a time, the rates."""

    flags: str
    server: PlannedServer
    points: list[Point]

    @property
    def most(self) -> float:
        """Requests a second that it completes when all requests wait."""
        return self.points[0].requests_per_s

    @property
    def rated(self) -> list[Point]:
        """The points with a finite rate."""
        return [point for point in self.points if math.isfinite(point.load.request_rate)]

    @property
    def knee(self) -> Point:
        """The load with the most throughput for its latency."""
        return max(self.rated, key=lambda point: point.power)

    def score(self, objectives: Objectives) -> float:
        """With objectives, the largest load that keeps them, in requests a second. Else the power at the knee."""
        if not objectives:
            return self.knee.power
        return max((point.requests_per_s for point in self.rated if objectives.met(point)), default=0.0)

    def as_dict(self, objectives: Objectives) -> dict[str, Any]:
        return {
            "flags": self.flags,
            "score": self.score(objectives),
            "knee": self.knee.load.request_rate,
            "memory": {**self.server.outline.memory, "cache": self.server.cache_bytes},
            "points": [point.as_dict() for point in self.points],
        }


def alternatives(asked: Variant, args: argparse.Namespace) -> list[str]:
    """Flags to compare with those asked for: other token budgets of a step, and paced decode rows. Given flags stay."""
    found, options = [], asked.server.asked.options
    if options.max_num_batched_tokens is None:
        own = asked.server.outline.buckets.max_tokens
        found += [f"--max-num-batched-tokens {n}" for n in STEPS if n != own and n >= options.max_num_seqs]
    if options.scheduling_policy == "fcfs":
        alone = asked.points[1].tpot_ms["p50"]
        paces = [args.tpot_ms] if args.tpot_ms else [pace * alone for pace in PACES]
        found += [f"--scheduling-policy fcfs,tpot_s={pace / 1e3:.4f}" for pace in paces]
    return found


def choice(variants: list[Variant], objectives: Objectives) -> Variant:
    """The one that serves the largest load within the objectives; the first unless another is better by WORTH. Without
    objectives the first, because power alone would trade throughput for latency."""
    first = variants[0]
    if not objectives:
        return first
    best = max(variants, key=lambda one: one.score(objectives))
    return best if best.score(objectives) > WORTH * first.score(objectives) else first
