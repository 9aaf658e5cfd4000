"""Steps of DeepSeek-V4-Flash, predicted with three speeds for all ops, and with three for each op.

    python benchmarks/predicted_ops.py

The plan has one time a kernel, one rate of bytes and one of FLOPs (`openinfer.kernels.GPUS`). The last column fits
these three to each op of V4 by itself, in the recorded times of single ops of one of four GPUs. No step was used. Steps
on two GPUs had dummy weights, whose routers favour some experts. HIT has how many, and the column counts their bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import predicted_rows

from openinfer.cli import tune_speed
from openinfer.cli.segments import Outline
from openinfer.kernels import GPUS, H200, Speed

LEDGER = "ops-deepseek_v4-flash-rank-of-4-2026-11-22-h200.json"
TWO = "V4-Flash, 43 layers, 2 ranks"
SHARED = ("norm_linear", "embed", "expand_rows", "select_rows", "sample", "top_logprobs", "advance")
"""Ops of other models too, whose steps the plan's speeds were fitted to."""
HIT = {1: 1.07, 8: 0.73, 32: 0.38, 128: 0.37}
"""By rows: the experts that dummy weights hit on the first of two GPUs, over those that even routing hits."""


def lines(made: Outline) -> dict[str, Speed]:
    """The speeds of each op: the least squares of logarithms on a grid. made: one of four GPUs. The ledger counted the
    bytes of experts for one GPU, so they come from the plan."""
    experts = {}
    for point in ("decode:1,4096", "decode:8,4096", "decode:32,4096", "decode:128,4096", "prefill:4096"):
        for calls, workload in tune_speed.point_steps(made, point):
            for call in calls:
                if call.op.name == "experts":
                    experts[call.args["x"].shape[0]] = call.cost(workload)
    measured = defaultdict(list)
    for row in json.loads((predicted_rows.RESULTS / LEDGER).read_text())["results"]:
        size, flops = row["bytes"], row["flops"]
        if row["op"] == "experts":
            cost = experts.get(int(row["key"].split("[")[1].split("x")[0]))
            size, flops = (size, flops / 4) if cost is None else (cost.bytes, cost.flops)
        if row["op"] not in SHARED:
            measured[row["op"]].append((row["us"] * 1e-6, size, flops))
    return {op: _line(np.array(rows).T) for op, rows in measured.items()}


def _line(rows: np.ndarray) -> Speed:
    seconds, size, flops = rows
    kernel = np.geomspace(0.8e-6, 30e-6, 60)[:, None, None, None]
    memory = size / np.geomspace(0.1e12, 4.6e12, 50)[:, None, None]
    compute = flops / np.geomspace(1e12, 1600e12, 60)[:, None]
    errors = (np.log((kernel + np.maximum(memory, compute)) / seconds) ** 2).sum(axis=-1)
    k, b, f = np.unravel_index(errors.argmin(), errors.shape)
    return Speed(
        float(np.geomspace(0.1e12, 4.6e12, 50)[b]),
        float(np.geomspace(1e12, 1600e12, 60)[f]),
        float(np.geomspace(0.8e-6, 30e-6, 60)[k]),
    )


def predicted(made: Outline, point: str, gpus: int, speeds: dict[str, Speed], *, hit: float = 1.0) -> float:
    """Milliseconds of a point. One GPU: without collectives. hit: part of the experts' bytes that are read."""
    fitted, link, total = GPUS[H200.gpu].fitted, GPUS[H200.gpu].link(gpus), 0.0
    for calls, workload in tune_speed.point_steps(made, point):
        for call in calls:
            cost = call.cost(workload)
            if cost.link and gpus == 1:
                continue
            speed = speeds.get(call.op.name)
            size = cost.bytes * (hit if call.op.name == "experts" else 1.0)
            kernels = 1 if speed is not None and not cost.link else len(call.commands)
            speed = fitted if speed is None or cost.link else speed
            total += call.times * max(size / speed.bytes_per_s, cost.flops / speed.flops_per_s)
            total += call.times * kernels * speed.kernel_s
            if cost.link:
                total += call.times * (max(0.0, link.call_s - fitted.kernel_s) + cost.link / link.bytes_per_s)
    return 1e3 * total


def steps() -> Iterator[tuple[str, str, float, float, float]]:
    """Each step: GPUs, point, predicted by the plan, predicted by op, measured."""
    flags = ("--max-num-seqs", "128")
    outlines = {gpus: predicted_rows.outline("deepseek_v4-Flash", gpus, flags) for gpus in (4, 8)}
    speeds = lines(outlines[4])
    results = predicted_rows.RESULTS
    model, gpus, flags = predicted_rows.STEP_RUNS[TWO]  # type: ignore[assignment]
    two = predicted_rows.outline(model, gpus, flags)
    for result in json.loads((results / predicted_rows.TWO_GPUS).read_text())["steps"][TWO]["results"]:
        if "device_ms" in result:
            point = result["point"]
            rows = int(point.split(":")[1].split(",")[0]) if point.startswith("decode") else 0
            plan = predicted_rows.predicted(two, point, gpus)
            by_op = predicted(two, point, gpus, speeds, hit=HIT.get(rows, 1.0))
            yield "2 GPUs", point, plan, by_op, result["device_ms"]
    for result in json.loads((results / predicted_rows.ONE_OF_SEVERAL).read_text())["figures"]:
        gpus, words = result["ranks"], result["step"].split()
        point = f"decode:{words[1]},{words[3]}" if words[0] == "decode" else f"prefill:{words[2]}"
        plan = predicted_rows.predicted(outlines[gpus], point, 1, links=False)
        by_op = predicted(outlines[gpus], point, 1, speeds)
        yield f"1 of {gpus} GPUs", point, plan, by_op, result["device_ms"]


def main() -> None:
    print("| V4-Flash | step | plan / measured (ms) | by op / measured (ms) |\n| --- | --- | --- | --- |")
    within = [0, 0]
    for gpus, point, plan, by_op, measured in steps():
        figures = [predicted_rows.Figure("step p50", guess, measured) for guess in (plan, by_op)]
        within = [held + figure.within for held, figure in zip(within, figures, strict=True)]
        print(f"| {gpus} | {point} | {figures[0]} | {figures[1]} |")
    print(f"\n{within[0]} and {within[1]} of 15 within 10 %")


if __name__ == "__main__":
    main()
