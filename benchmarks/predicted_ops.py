"""The lines of single ops that plans take (`openinfer.kernels.GPUS`), from the recorded times of their calls.

    python benchmarks/predicted_ops.py [--write]     # steps with and without the lines beside measured ones; write them

A line is fitted for each op to ledgers: calls of one op, replayed alone. No server's row is among them, so rows
(`predicted_rows.py`) check the fit. V4-Flash's steps check it too. The steps of Qwen3-4B and Qwen3.5-4B give two
numbers: how much longer an op takes in a step than alone. Costs come from the plan of the same steps. An entry of a
ledger has the mean time of all layers' calls, but the cost of the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import predicted_rows
from predicted_rows import ONE_RANK, RESULTS, Figure

from openinfer.cli.explain import ledger as bench_ledger
from openinfer.cli.explain.segments import Outline
from openinfer.cli.tune import speed as tune_speed
from openinfer.kernels import GPUS, H200, Cost, Lines
from openinfer.kernels.measure.speed_fit import MeasuredCalls, fit_lines
from openinfer.kernels.measure.speeds import FOLDER, dump_lines

FILE = FOLDER / "nvidia_h200.json"


class Ledger(NamedTuple):
    """A file of benchmarks/results, the engine that it was measured in, and the steps that have its calls."""

    file: str
    model: str
    gpus: int
    flags: tuple[str, ...]
    points: tuple[str, ...]


RANK_POINTS = (
    "decode:1,4096",
    "decode:8,4096",
    "decode:32,4096",
    "decode:128,4096",
    "prefill:4096",
    "prefill:1024",
    "prefill:2048",
)
LEDGERS = (
    *(
        Ledger(f"ops-deepseek_v4-flash-rank-of-{ranks}.json", "deepseek_v4-Flash", gpus, ONE_RANK, points)
        for ranks, gpus, points in (
            ("2-2026-11-23-h200", 2, RANK_POINTS),
            ("2-mixed-2026-11-23-h200", 2, ("mixed:4,1088,1148",)),
            ("4-2026-11-22-h200", 4, RANK_POINTS),
            ("8-2026-11-22-h200", 8, RANK_POINTS),
        )
    ),
)
"""The points of V4-Flash are those of one rank of several."""
FEW_TOKENS = (
    *(f"decode:{rows},1024" for rows in (1, 2, 4, 8, 16, 32, 64, 128)),
    *(f"prefill:{tokens}" for tokens in (32, 64, 128)),
)
MANY_TOKENS = (
    "decode:256,1024",
    *(f"prefill:{tokens}" for tokens in (256, 512, 1024, 2048)),
    *(f"mixed:{rows - 1},1024,{tokens - rows + 1}" for rows in (8, 64, 256) for tokens in (512, 1024, 2048)),
)
DENSE_LEDGERS = tuple(
    Ledger(f"ops-{name}-2026-11-23-h200{day}.json", model, 1, (), points)
    for name, model in (("qwen3-4b", "qwen3-4B"), ("qwen3_5-4b", "qwen3_5-4B"))
    for day, points in (("-one-commit", FEW_TOKENS), ("", MANY_TOKENS))
)
"""Steps of up to 128 tokens have other kernels since the older ledgers."""
DENSE_STEPS = {
    "qwen3-4B": ("qwen3-4b/2026-11-23-h200-step-one-commit.json",),
    "qwen3_5-4B": ("qwen3_5-4b/2026-11-23-h200-step-one-commit.json",),
}
"""Recorded steps of these kernels. Ops in a step take longer than alone; lines of Qwen's ops have that too (`Pace`)."""


class Group(NamedTuple):
    """The calls of a step that are one entry of a ledger: number, kernels and cost in sum."""

    kind: str
    key: str
    tokens: int
    calls: int
    kernels: int
    cost: Cost


class Pace(NamedTuple):
    """Ops take `factor` of their time alone in a step, and `gap_s` seconds more for each kernel."""

    factor: float = 1.0
    gap_s: float = 0.0

    def seconds(self, alone_s: float, kernels: int) -> float:
        """The time of calls that take `alone_s` alone."""
        return self.factor * alone_s + self.gap_s * kernels


ALONE = Pace()


def _microseconds(ledger: Ledger) -> dict[str, float]:
    """A call's time by key."""
    return {row["key"]: row["us"] for row in json.loads((RESULTS / ledger.file).read_text())["results"]}


def fitted(ledgers: Iterable[Ledger], pace: Pace = ALONE) -> dict[str, Lines]:
    """The lines of the ops in these ledgers."""
    found = defaultdict(list)
    for ledger in ledgers:
        us, seen = _microseconds(ledger), set[str]()
        made = predicted_rows.outline(ledger.model, ledger.gpus, ledger.flags)
        for group in (group for point in ledger.points for group in groups(made, point)):
            if group.key in us and group.key not in seen:
                seconds = pace.seconds(group.calls * us[group.key] * 1e-6, group.kernels)
                found[group.kind].append(MeasuredCalls(group.tokens, group.calls, group.cost, seconds))
            seen.add(group.key)
    return {kind: fit_lines(calls, GPUS[H200.gpu].fitted) for kind, calls in found.items()}


def groups(made: Outline, point: str) -> Iterator[Group]:
    """The calls of a point's steps."""
    found: dict[tuple[str, str, int], tuple[int, int, Cost]] = {}
    for step, workload in tune_speed.point_steps(made, point):
        for call in step:
            name = call.kind, bench_ledger.key(call.op, call.args, workload), call.tokens
            one, (count, kernels, total) = call.cost(workload), found.get(name, (0, 0, Cost(0, 0)))
            cost = Cost(total.bytes + call.times * one.bytes, total.flops + call.times * one.flops)
            found[name] = count + call.times, kernels + call.times * len(call.commands), cost
    for name, sums in found.items():
        yield Group(*name, *sums)


def pace() -> tuple[Pace, list[float]]:
    """The pace of recorded steps whose ops are all in a ledger, and the relative error of each of these steps."""
    alone = []
    for ledger in DENSE_LEDGERS:
        us, made = _microseconds(ledger), predicted_rows.outline(ledger.model, ledger.gpus, ledger.flags)
        files = [json.loads((RESULTS / file).read_text()) for file in DENSE_STEPS[ledger.model]]
        for step in (step for file in files for step in file["results"] if "device_ms" in step):
            calls = list(groups(made, step["point"]))
            if all(group.key in us for group in calls):
                seconds = sum(group.calls * us[group.key] for group in calls) * 1e-6
                kernels = sum(group.kernels for group in calls)
                alone.append((1e3 * seconds / step["device_ms"], 1e3 * kernels / step["device_ms"]))
    shares = np.array(alone)
    scale = np.array([1, 1e-6])
    found, *_ = np.linalg.lstsq(shares * scale, np.ones(len(alone)), rcond=None)
    return Pace(*map(float, found * scale)), [float(one) for one in shares @ (found * scale) - 1]


def lines() -> dict[str, Lines]:
    """The lines by op."""
    return {**fitted(LEDGERS), **fitted(DENSE_LEDGERS, pace()[0])}


def main() -> int:
    """Print the steps, or write the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args().write:
        FILE.write_text(dump_lines(lines()))
        return 0
    factor, gap_s = pace()[0]
    print(f"ops of Qwen take {factor:.3f} x their time alone in a step, and {1e6 * gap_s:.2f} us a kernel\n")
    own, within = GPUS[H200.gpu], [0, 0]
    print(
        "| model | step | one line for all / measured (ms) | a line an op / measured (ms) |\n| --- | --- | --- | --- |"
    )
    every = [
        list(predicted_rows.steps(figures)) for figures in (own._replace(ops={}), own._replace(ops=lines()))
    ]
    for (model, point, plan, measured), (_, _, by_op, _) in zip(*every, strict=True):
        figures = [Figure("step p50", guess, measured) for guess in (plan, by_op)]
        within = [held + figure.within for held, figure in zip(within, figures, strict=True)]
        print(f"| {model} | {point} | {figures[0]} | {figures[1]} |")
    print(f"\n{within[0]} and {within[1]} of {len(every[0])} within 10 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
