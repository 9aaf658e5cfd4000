"""The lines of single ops that plans take (`openinfer.kernels.GPUS`), from the recorded times of their calls.

    python benchmarks/predicted_ops.py [--write]     # steps with and without the lines beside measured ones; write them

A line is fitted for each op to ledgers: calls of one op, replayed alone. No step and no server's row is among them, so
steps and rows (`predicted_rows.py`) check the fit. Costs come from the plan of the same steps. An entry of a ledger has
the mean time of all layers' calls, but the cost of the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator

import predicted_rows
from predicted_rows import RESULTS, Figure

from openinfer.cli import bench_ledger, tune_speed
from openinfer.cli.segments import Outline
from openinfer.kernels import GPUS, H200, Cost, Lines
from openinfer.kernels.speed_fit import MeasuredCalls, fit_lines
from openinfer.kernels.speeds import FOLDER, dump_lines

FILE = FOLDER / "nvidia_h200.json"
LEDGERS = {
    2: "ops-deepseek_v4-flash-rank-of-2-2026-11-23-h200.json",
    4: "ops-deepseek_v4-flash-rank-of-4-2026-11-22-h200.json",
    8: "ops-deepseek_v4-flash-rank-of-8-2026-11-22-h200.json",
}
"""Files of benchmarks/results, by the GPUs that share V4-Flash."""
SHARED = ("norm_linear", "embed", "expand_rows", "select_rows", "sample", "top_logprobs", "advance")
"""Ops of other models too. They have the one line for all ops, which was fitted to steps of those models."""
POINTS = (
    "decode:1,4096",
    "decode:8,4096",
    "decode:32,4096",
    "decode:128,4096",
    "prefill:4096",
    "prefill:1024",
    "prefill:2048",
)


def calls() -> dict[str, list[MeasuredCalls]]:
    """The recorded calls by op."""
    found = defaultdict(list)
    for gpus, file in LEDGERS.items():
        us = {row["key"]: row["us"] for row in json.loads((RESULTS / file).read_text())["results"]}
        made = predicted_rows.outline("deepseek_v4-Flash", gpus, predicted_rows.ONE_RANK)
        for point in POINTS:
            for op, name, tokens, count, cost in _grouped(made, point):
                if name in us and op not in SHARED:
                    found[op].append(MeasuredCalls(tokens, count, cost, count * us[name] * 1e-6))
    return found


def _grouped(made: Outline, point: str) -> Iterator[tuple[str, str, int, int, Cost]]:
    """The calls of a step that are one entry of a ledger: op, key, tokens, number, cost in sum."""
    groups: dict[tuple[str, str, int], tuple[int, Cost]] = {}
    for step, workload in tune_speed.point_steps(made, point):
        for call in step:
            name = call.op.name, bench_ledger.key(call.op, call.args, workload), call.tokens
            one, (count, total) = call.cost(workload), groups.get(name, (0, Cost(0, 0)))
            cost = Cost(total.bytes + call.times * one.bytes, total.flops + call.times * one.flops)
            groups[name] = count + call.times, cost
    for (op, key, tokens), (count, cost) in groups.items():
        yield op, key, tokens, count, cost


def lines() -> dict[str, Lines]:
    """The lines by op."""
    return {op: fit_lines(found, GPUS[H200.gpu].fitted) for op, found in calls().items()}


def main() -> int:
    """Print the steps, or write the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args().write:
        FILE.write_text(dump_lines(lines()))
        return 0
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
