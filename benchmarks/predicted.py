"""Predictions of `openinfer plan` and `explain`: `python benchmarks/predicted.py NAME [--write]`.

    rows     recorded rows of `openinfer bench serve` and steps of several GPUs beside their predictions, for
             docs/planning.md and benchmarks/README.md. The fit has seen none of them: speeds come from recorded
             steps, the time of an arrival from a run of 2026-11-21. Arrivals are the client's (same seeds).
    tiers    agents on a server with and without tiers, for docs/planning.md: the engine's own scheduler and pool in
             virtual time. No figure is measured but the speeds of the GPU and of its copies.
    plans    the time of some steps of each model, in predicted_steps.json: a plan that grows is seen without a GPU.
    speeds   the H200's speeds, from the newest recorded steps of each model (nothing to write)
    ops      the lines of single ops (`openinfer.kernels.GPUS`), fitted to ledgers: calls of one op, replayed alone.
             The steps of Qwen3-4B and Qwen3.5-4B give how much longer an op takes in a step than alone. An entry of
             a ledger has the mean time of all layers' calls, but the cost of the first.
    products the lines of attention's sublayer, and of products with packed weights, one for each format, from recorded
             steps of Qwen3-4B, and of Qwen3.5 in FP8
    mixtures the lines of experts_add by format, and of attention to latents, from calls of their kernels alone

Without --write the tables are printed, and plans says what changed. Tests compare files and page with this checkout.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.cli import recipe_flags
from openinfer.cli.bench.serve import OfferedLoad
from openinfer.cli.explain import ledger as bench_ledger
from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.cli.plan import tiers as plan_tiers
from openinfer.cli.plan.load import Agents, PlannedServer, Point
from openinfer.cli.plan.text import name_of
from openinfer.cli.tune import speed as tune_speed
from openinfer.kernels import (
    GPUS,
    H200,
    Cost,
    Figures,
    Lines,
    Parts,
    Speed,
    Target,
    Workload,
    attention_sublayer,
)
from openinfer.kernels.measure.speed_fit import MeasuredCalls, errors, fit_lines, fit_speed
from openinfer.kernels.measure.speeds import FOLDER, PRODUCT, dump_lines
from openinfer.recipes.engine import Source
from openinfer.recipes.qwen3.published import AWQ, FP8

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {"steps": ROOT / "benchmarks" / "README.md"}
"""Where a table is, if it is not in docs/planning.md."""
FEW_ROWS = ("--max-num-seqs", "128", "--max-model-len", "8192")
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "qwen3-4b/2026-11-23-h200-serve-one-commit.json": ("qwen3-4B", 1, ()),
    "qwen3_5-4b/2026-11-24-h200-serve-one-commit.json": ("qwen3_5-4B", 1, ()),
}
"""The model, GPUs and flags of each run of servers. Earlier runs had other kernels for steps of up to 128 tokens."""
TWO_GPUS, FOUR_GPUS = "two-gpus-2026-11-23-h200.json", "four-gpus-2026-11-28-h200.json"
ONE_OF_SEVERAL = "rank-deepseek_v4-flash-2026-11-29-h200.json"
STEP_RUNS = {
    (TWO_GPUS, "Qwen3-4B, 2 ranks"): ("qwen3-4B", 2, ()),
    (TWO_GPUS, "Qwen3-32B, 1 rank"): ("qwen3-32B", 1, ()),
    (TWO_GPUS, "Qwen3-32B, 2 ranks"): ("qwen3-32B", 2, ()),
    (FOUR_GPUS, "Qwen3-32B, 4 ranks"): ("qwen3-32B", 4, FEW_ROWS),
    (TWO_GPUS, "V4-Flash, 43 layers, 2 ranks"): ("deepseek_v4-Flash", 2, FEW_ROWS),
    (FOUR_GPUS, "V4-Flash, 43 layers, 4 ranks"): ("deepseek_v4-Flash", 4, FEW_ROWS),
    (FOUR_GPUS, "V4-Flash, 43 layers, 4 ranks, steps of 4,096 tokens"): (
        "deepseek_v4-Flash",
        4,
        (*FEW_ROWS, "--max-num-batched-tokens", "4096"),
    ),
}
"""The model, GPUs and flags of recorded steps, by their file and name there. V4's prompts were not dealt to ranks."""
ONE_RANK = ("--max-num-seqs", "128", "--max-num-batched-tokens", "4096", "--max-model-len", "4352")
"""The flags of the steps of ONE_OF_SEVERAL (benchmarks/deepseek_rank.py)."""
BEGIN, END = "<!-- {} of benchmarks/predicted.py -->\n", "<!-- end of {} -->"
"""Around a table of the page, by its name."""
LIMITS = {"p50": 0.10, "p99": 0.20}


class Figure(NamedTuple):
    """A predicted figure in milliseconds beside the measured one."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured figure."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether the error is within the limit of its percentile."""
        return abs(self.error) <= LIMITS[self.name[-3:]]

    def __str__(self) -> str:
        text = f"{self.predicted:.4g} / {self.measured:.4g} ({100 * self.error:+.0f} %)"
        return text if self.within else f"**{text}**"


def rows() -> Iterator[tuple[str, Point, float, list[Figure]]]:
    """Each recorded row: its model, the predicted point, the measured requests a second, the figures."""
    for file, (model, gpus, flags) in RUNS.items():
        _, asked = recipe_flags.parse([model, *flags], "plan", __doc__, lambda parser: None, named=True)
        server = PlannedServer(asked, H200, GPUS[H200.gpu], gpus)
        for result in json.loads((RESULTS / file).read_text())["results"]:
            rate = float(result["request_rate"])
            names = ("num_prompts", "max_concurrency", "input_len", "output_len", "seed")
            point = server.serve(OfferedLoad(rate, *(result[name] for name in names)))
            found = [
                Figure(f"{what.upper()} {p}", getattr(point, f"{what}_ms")[p], result[f"{what}_ms"][p])
                for what in ("ttft", "tpot")
                for p in LIMITS
            ]
            name = model if gpus == 1 else f"{model}, {gpus} GPUs"
            yield name, point, result["requests_per_s"], found


def rows_table() -> str:
    """The table in Markdown, and how many figures are within the limits."""
    names = [f"{what} {p} (ms)" for what in ("TTFT", "TPOT") for p in LIMITS]
    lines = [
        f"| server | load | req/s | {' | '.join(names)} |",
        "| --- " * (3 + len(names)) + "|",
    ]
    figures: list[Figure] = []
    for model, point, measured, found in rows():
        figures += found
        load = f"{name_of(point)}, {point.load.input_len:,} in"
        cells = [model, load, f"{point.requests_per_s:.2f} / {measured:.2f}", *map(str, found)]
        lines.append("| " + " | ".join(cells) + " |")
    held = ", ".join(
        f"{sum(f.within for f in figures if f.name.endswith(p))} of "
        f"{sum(f.name.endswith(p) for f in figures)} {p} within {limit:.0%}"
        for p, limit in LIMITS.items()
    )
    return "\n".join([*lines, "", f"Predicted / measured; {held}; others are bold.", ""])


def steps(figures: Figures = GPUS[H200.gpu]) -> Iterator[tuple[str, str, float, float]]:
    """Each recorded step of several GPUs: its run, point, predicted and measured milliseconds. figures: of the GPU."""
    for (file, name), (model, gpus, flags) in STEP_RUNS.items():
        made = outline(model, gpus, flags)
        for result in json.loads((RESULTS / file).read_text())["steps"][name]["results"]:
            if "device_ms" in result and not (model == "deepseek_v4-Flash" and "prefill" in result["point"]):
                found = predicted(made, result["point"], gpus, figures)
                yield name, result["point"], found, result["device_ms"]
    made = {gpus: outline("deepseek_v4-Flash", gpus, ONE_RANK) for gpus in (2, 4, 8)}
    for result in json.loads((RESULTS / ONE_OF_SEVERAL).read_text())["figures"]:
        gpus, words = result["ranks"], result["step"].split()
        if words[0] == "mixed":
            continue
        point = f"decode:{words[1]},{words[3]}" if words[0] == "decode" else f"prefill:{words[2]}"
        name = f"V4-Flash, one of {gpus} ranks alone, no collectives"
        yield name, point, predicted(made[gpus], point, 1, figures, links=False), result["device_ms"]


@functools.cache
def outline(model: str, gpus: int, flags: tuple[str, ...], target: Target = H200) -> Outline:
    """The engine of a published model on GPUs that share it. Most steps here were recorded before attention's sublayer
    was one launch, so the default is without kernels of CUDA C++."""
    _, asked = recipe_flags.parse([model, *flags], "plan", __doc__, lambda parser: None, named=True)
    return Outline(asked.recipe, asked.source(), asked.options, target, ranks=gpus)


def predicted(made: Outline, point: str, gpus: int, figures: Figures, *, links: bool = True) -> float:
    """Milliseconds of a point. links: with the collectives."""
    found = 0.0
    for calls, workload in tune_speed.point_steps(made, point):
        # hc_post is more than its sum of ranks, which one GPU leaves out.
        kept = [call for call in calls if links or call.op.name == "hc_post" or not call.cost(workload).link]
        parts = Parts.of(kept, workload, figures, gpus)
        found += sum(parts) - (0.0 if links else parts.link_s)
    return 1e3 * found


STEPS = {
    "decode:1,": "1 row",
    **{f"decode:{rows},": f"{rows} rows" for rows in (8, 32, 128)},
    **{f"prefill:{tokens}": f"prompt of {tokens:,}" for tokens in (1024, 2048, 4096)},
}
"""Columns of the table of steps, by how a point begins."""


def steps_table() -> str:
    """The steps in Markdown, a row for each run, and how many are within the limit."""
    table, within = defaultdict[str, dict[str, str]](dict), []
    for name, point, guess, measured in steps():
        figure = Figure("step p50", guess, measured)
        within.append(figure.within)
        (column,) = (column for start, column in STEPS.items() if point.startswith(start))
        table[name][column] = str(figure)
    lines = [f"| ms | {' | '.join(STEPS.values())} |", "| --- " * (1 + len(STEPS)) + "|"]
    for name, cells in table.items():
        lines.append("| " + " | ".join([name, *(cells.get(column, "-") for column in STEPS.values())]) + " |")
    held = f"{sum(within)} of {len(within)} within {LIMITS['p50']:.0%}"
    return "\n".join([*lines, "", f"Predicted / measured; {held}; others are bold.", ""])


TIERED = "Qwen3-32B"
RATES, REQUESTS = (0.75, 1.5), 600
INPUT, OUTPUT, TURNS, SYSTEM, THINK_S = 1500, 300, 20, 4000, 10.0
TIERS = {
    "device only": "",
    "+ 64 GB of host memory": "--kv-offload-gb 64",
    "+ 512 GB of host memory": "--kv-offload-gb 512",
    "+ 64 GB of host memory, 4 TB of disk": "--kv-offload-gb 64 --kv-offload-dir /data/kv --kv-offload-disk-gb 4000",
}


def tiered() -> Iterator[tuple[str, Point]]:
    """Each server under each load."""
    parser = argparse.ArgumentParser()
    plan_tiers.flags(parser)
    agents = Agents(TURNS, SYSTEM, THINK_S, plan_tiers.speeds(parser.parse_args([])))
    for name, flags in TIERS.items():
        words = [TIERED, "--max-model-len", "40960", *flags.split()]
        _, asked = recipe_flags.parse(words, "plan", __doc__, lambda parser: None, named=True)
        server = PlannedServer(asked, H200, GPUS[H200.gpu], 1, agents=agents)
        for rate in RATES:
            yield name, server.serve(OfferedLoad(rate, REQUESTS, 0, INPUT, OUTPUT, 1))


def tiers_table() -> str:
    """The table, and a line that says what it is."""
    about = (
        f"{TIERED} on one H200. {REQUESTS // TURNS} agents take {TURNS} turns each: {INPUT:,} tokens in, {OUTPUT} out, "
        f"{THINK_S:g} s between.\nAll begin with the same {SYSTEM:,} tokens. Agents come at the offered rate over "
        f"{TURNS}; later turns wait for answers.\n"
    )
    rows = [
        about,
        "| tiers | req/s offered | done | tokens cached | TTFT p50 (ms) | TTFT p99 (ms) | TPOT p50 (ms) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, point in tiered():
        rows.append(
            f"| {name} | {point.load.request_rate:g} | {point.requests_per_s:.2f} | {point.hits:.0%} | "
            f"{point.ttft_ms['p50']:,.0f} | {point.ttft_ms['p99']:,.0f} | {point.tpot_ms['p50']:.1f} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n\n**These figures are predicted, not measured.**\n"


PLANS = ROOT / "benchmarks" / "predicted_steps.json"
MODELS = ("qwen3-4B", "qwen3-8B", "qwen3_5-4B", "qwen3_5-4B-FP8", "qwen3_5-35B-A3B", "deepseek_v4-Flash")
POINTS = (
    "decode:1,1024",
    "decode:8,1024",
    "decode:64,1024",
    "decode:256,512",
    "prefill:1024",
    "prefill:4096",
    "mixed:64,1024,1024",
)
RECORDED = {
    "qwen3-4B": "qwen3-4b/2026-11-22-h200-step.json",
    "qwen3-8B": "qwen3-8b/2026-11-21-h200-step.json",
    "qwen3_5-4B": "qwen3_5-4b/2026-11-22-h200-step.json",
}


def plans() -> dict[str, dict[str, dict[str, Any]]]:
    """Microseconds, kernels, MB and GFLOP of each model's points."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model in MODELS:
        made = outline(model, 1, ())
        found[model] = {point: figures_of(made, point) for point in POINTS}
    return found


def figures_of(made: Outline, point: str) -> dict[str, Any]:
    """The figures of one point."""
    seconds, kernels, size, flops = 0.0, 0, 0, 0
    for calls, workload in tune_speed.point_steps(made, point):
        seconds += sum(Parts.of(calls, workload, GPUS[H200.gpu]))
        for call in calls:
            cost = call.cost(workload)
            kernels += call.times * len(call.commands)
            size += call.times * cost.bytes
            flops += call.times * cost.flops
    return {
        "us": round(seconds * 1e6, 1),
        "kernels": kernels,
        "MB": round(size / 1e6, 1),
        "GFLOP": round(flops / 1e9, 1),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each figure that changed."""
    return [
        f"{model} {point}: {name} {before.get(model, {}).get(point, {}).get(name)} -> {value}"
        for model, points in after.items()
        for point, found in points.items()
        for name, value in found.items()
        if before.get(model, {}).get(point, {}).get(name) != value
    ]


def fitted_speed() -> tuple[Speed, list[float]]:
    """The speeds that the newest recorded steps give, and the relative error of each step."""
    recorded = []
    for model, file in RECORDED.items():
        # Prompts were cut so when they were recorded.
        made = outline(model, 1, ("--max-num-batched-tokens", "2048"))
        recorded += tune_speed.measured_steps(made, RESULTS / file)
    own = GPUS[H200.gpu]._replace(ops={})
    speed = fit_speed(recorded, own)
    return speed, errors(recorded, own.at(speed))


LINES = FOLDER / "nvidia_h200.json"


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
            ("2-2026-11-29-h200", 2, RANK_POINTS),
            ("4-2026-11-29-h200", 4, RANK_POINTS),
            ("8-2026-11-29-h200", 8, RANK_POINTS),
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


RENAMED = (
    (r"(sample|advance) (?:logits|result)\[(\d+)x\d+\]", r"\1 tokens[\2]"),
    (r"(index_topk .*\])$", r"\1, window 4"),
    (r"(q_kv_write qr|gate_up_clamped out)(\[)", r"\1.codes\2"),
)
"""What keys of these ledgers are called today. The last two wrote bf16, where others made the codes."""


def _microseconds(ledger: Ledger) -> dict[str, float]:
    """A call's time by key."""
    found = {row["key"]: row["us"] for row in json.loads((RESULTS / ledger.file).read_text())["results"]}
    for old, new in RENAMED:
        found = {re.sub(old, new, key): us for key, us in found.items()}
    return found


def fitted(ledgers: Iterable[Ledger], pace: Pace = ALONE) -> dict[str, Lines]:
    """The lines of the ops in these ledgers."""
    found = defaultdict(list)
    for ledger in ledgers:
        us, seen = _microseconds(ledger), set[str]()
        made = outline(ledger.model, ledger.gpus, ledger.flags)
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
            name = call.kind, bench_ledger.ledger_key(call.op, call.args, workload), call.tokens
            one, (count, kernels, total) = call.cost(workload), found.get(name, (0, 0, Cost(0, 0)))
            cost = Cost(total.bytes + call.times * one.bytes, total.flops + call.times * one.flops)
            found[name] = count + call.times, kernels + call.times * len(call.commands), cost
    for name, sums in found.items():
        yield Group(*name, *sums)


def pace() -> tuple[Pace, list[float]]:
    """The pace of recorded steps whose ops are all in a ledger, and the relative error of each of these steps."""
    alone = []
    for ledger in DENSE_LEDGERS:
        us, made = _microseconds(ledger), outline(ledger.model, ledger.gpus, ledger.flags)
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


class Packed(NamedTuple):
    """Recorded steps of a model in a packed format, {point: milliseconds}. `alone`: microseconds of a layer's four
    products by themselves, for a number of tokens, by the format's kernels or by the nearest that were measured; None
    where only their sum is known."""

    format: str
    quantization: dict[str, Any]
    steps: dict[str, float]
    alone: Callable[[int], list[float]] | None
    model: str = "qwen3-4B"


LAYER = ("qkv", "o", "gate_up", "down")
"""A layer's products in their order."""


FEW_BITS = "few-bits-drafts-mixtures-2026-11-29-h200.json", "few-bits-2026-12-01-h200.json"
OLDER, FOUR_BITS = "{}/2026-11-24-h200-step.json", "four-bits-2026-11-30-h200.json"
INTEGERS = {"symmetric": True, "num_bits": 8, "type": "int"}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INTEGERS, "strategy": "channel"},
            "input_activations": {**INTEGERS, "strategy": "token", "dynamic": True},
        }
    },
}


def packed() -> Iterator[Packed]:
    """What was measured of each format. INT4 and FP4 share rings and clusters; INT8 has FP8's kernels by token."""
    files = [json.loads((RESULTS / name).read_text()) for name in FEW_BITS]
    recorded = [file["qwen3_4b_ms"] for file in files]
    for name, quantization, key, older, alone in (
        ("INT4", AWQ, "int4", "qwen3-4b-int4", _clusters),
        ("FP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "", _clusters),
        ("INT8", INT8, "int8 (W8A8)", "", functools.partial(_codes, "token", 8)),
        ("FP8", FP8, "fp8", "qwen3-4b-fp8", functools.partial(_codes, "block", 1)),
    ):
        steps = _device_ms(OLDER.format(older)) if older else {}
        steps |= _four_bits("Qwen3-4B-FP8, cache in bf16") if name == "FP8" else {}
        for newer in recorded:
            steps |= {point: ms["device"] for point, ms in newer.get(key, {}).items()}
        if name == "FP4":  # no longer prompt was recorded: bf16's, and what a prompt of 1,024 takes more
            more = steps["prefill:1024"] - recorded[0]["bf16"]["prefill:1024"]["device"]
            steps["prefill:4096"] = _device_ms(DENSE_STEPS["qwen3-4B"][0])["prefill:4096"] + more
        yield Packed(name, quantization, steps, alone)
    newest = {point: ms["device"] for point, ms in files[1]["qwen3_5_4b_ms"]["fp8"].items()}
    yield Packed("FP8", FP8, _device_ms(OLDER.format("qwen3_5-4b-fp8")) | newest, None, "qwen3_5-4B")
    yield Packed("FP8", FP8, _four_bits("Qwen3.5-27B-FP8"), None, "qwen3_5-27B")


def _device_ms(file: str) -> dict[str, float]:
    """The steps of a file by their points."""
    found = json.loads((RESULTS / file).read_text())["results"]
    return {step["point"]: step["device_ms"] for step in found if "device_ms" in step}


def _four_bits(name: str) -> dict[str, float]:
    """The steps of a model of FOUR_BITS by their points, which stand behind its name, or above all."""
    found = json.loads((RESULTS / FOUR_BITS).read_text())["steps"]
    own = next((each for each in found if each.startswith(f"{name} decode")), name)
    points = re.findall(r"decode:\S+", own) or found["columns"]
    return dict(zip(points, found[own], strict=True))


def _codes(kind: str, fewest: int, tokens: int) -> list[float]:
    """The best of each product in a table of tiles; fewest: the least tokens with kernels of this kind. The table ends
    with 1,024 tokens; 2 and 4 have the shares of 8."""
    tokens = 8 if tokens in (2, 4) else tokens
    rows = json.loads((RESULTS / "kernels-codes-qwen3-4b-2026-11-23-h200.json").read_text())["results"]
    best = {row["name"]: min(us for us, _ in row["found"]) for row in rows
            if (row["kind"], row["tokens"]) == (kind, min(max(fewest, tokens), 1024))}  # fmt: skip
    return [best[name] for name in LAYER]


def _clusters(tokens: int) -> list[float]:
    """INT4's, by a ring for one token, by clusters for up to 256; 4 tokens have the shares of 8."""
    if tokens == 1:
        rings = json.loads((RESULTS / "ring-codes-int4-qwen3-4b-2026-11-23-h200.json").read_text())["alone"]
        return [min(ring["early"] for key, ring in rings.items() if key.split()[0] == name and "early" in ring)
                for name in LAYER]  # fmt: skip
    tokens = 8 if tokens == 4 else tokens
    for day in ("2026-11-23", "many-2026-11-24"):
        found = json.loads((RESULTS / f"packed-clusters-int4-{day}-h200.json").read_text())
        if clusters := found.get(f"{tokens} clusters"):
            return [clusters[name]["us"] for name in LAYER]
    return _codes("int4", 1, tokens)


@functools.cache
def packed_outline(format: str, model: str = "qwen3-4B") -> Outline:
    """A model in a format, as engines take it now."""
    _, asked = recipe_flags.parse([model], "plan", __doc__, lambda parser: None, named=True)
    quantization = next(one.quantization for one in packed() if one.format == format)
    source = Source({**asked.source().config, "quantization_config": quantization})
    return Outline(asked.recipe, source, asked.options, SERVED)


def packed_lines() -> dict[str, Lines]:
    """The lines of attention's sublayer, from steps in bf16, and of products with packed weights. What other ops leave
    of each step is theirs; products have the shares that they have alone, so the time of a call and that of its bytes
    are told apart. Where the sublayer is one launch, they are the MLP's."""
    own, calls = GPUS[H200.gpu], defaultdict[str, list[MeasuredCalls]](list)
    sublayer, made = attention_sublayer.name, outline("qwen3-4B", 1, (), SERVED)
    for point, ms in _four_bits("Qwen3-4B").items():
        (group,), seconds = _left(made, point, ms, sublayer, own)
        calls[sublayer].append(MeasuredCalls(group.tokens, group.calls, group.cost, seconds))
    own = own._replace(ops={**own.ops, sublayer: fit_lines(calls[sublayer], own.fitted)})
    for format, _, steps, alone, model in packed():
        for point, ms in steps.items():
            products, seconds = _left(packed_outline(format, model), point, ms, f", {format}", own)
            if alone is None:
                total = functools.reduce(operator.add, (group.cost for group in products))
                count = sum(group.calls for group in products)
                calls[PRODUCT + format].append(MeasuredCalls(products[0].tokens, count, total, seconds))
                continue
            shares = alone(products[0].tokens)[-len(products) :]
            for group, share in zip(products, shares, strict=True):
                one = MeasuredCalls(group.tokens, group.calls, group.cost, seconds * share / sum(shares))
                calls[PRODUCT + format].append(one)
    return {name: fit_lines(found, own.fitted) for name, found in calls.items()}


def _left(made: Outline, point: str, ms: float, kind: str, own: Figures) -> tuple[list[Group], float]:
    """The calls of a step whose kind ends so, and the seconds that the others leave them."""
    found = [group for group in groups(made, point) if group.kind.endswith(kind)]
    for step, workload in tune_speed.point_steps(made, point):
        others = [call for call in step if not call.kind.endswith(kind)]
        ms -= 1e3 * sum(Parts.of(others, workload, own))
    return found, 1e-3 * ms


def packed_table() -> str:
    """Steps beside what the lines that there are give, in Markdown."""
    table = ["| model | step | predicted / measured (ms) |", "| --- | --- | --- |"]
    every = [
        (f"{one.model} {one.format}", packed_outline(one.format, one.model), one.steps) for one in packed()
    ]
    every.append(("qwen3-4B", outline("qwen3-4B", 1, (), SERVED), _four_bits("Qwen3-4B")))
    for name, made, steps in every:
        for point, ms in steps.items():
            guess = predicted(made, point, 1, GPUS[H200.gpu])
            table.append(f"| {name} | {point} | {Figure('step p50', guess, ms)} |")
    return "\n".join(table)


class Mixture(NamedTuple):
    """Microseconds of an evenly routed call of experts_add by its tokens, or of its two products. `few`: the most rows
    of an expert with tiles for few; `places`: of the tiles for many, 0 where chunks are as large as they are."""

    kind: str
    made: Outline
    few: int
    places: int
    calls: dict[int, float]
    products: dict[int, float]


CODES, MANY_PAIRS = "codes-of-mixtures-v32-2026-11-29-h200.json", "many-pairs-2026-12-01-h200.json"
LAUNCH_S = 1.2e-6
"""What a small kernel takes that starts early, as `spread` and `embed` do."""


def mixtures() -> Iterator[Mixture]:
    """What was measured of each format: in bf16 whole calls, of codes the two products, but for many rows in FP8."""
    whole, bf16 = json.loads((RESULTS / FEW_BITS[0]).read_text())["experts_add_us"], dict[int, float]()
    for row in (*whole["few"], *whole["many"]):
        format, tokens, times = re.match(r"(\w+) (\d+) (.*)", row).groups()
        if format == "bf16":  # "now": tiles of three stages; few programs have five since
            bf16[int(tokens)] = min(float(us) for us in re.findall(r"(?:now|64/5): +([\d.]+)", times))
    yield Mixture("experts_add", outline("qwen3_5-35B-A3B", 1, ()), 32, 128, bf16, {})
    fp8, fp4 = _two_products("35 kind 8", 3), _two_products("30 kind 4", 2)
    few = {tokens: us for tokens, us in fp8.items() if tokens <= 256}  # 8 rows of an expert
    many = json.loads((RESULTS / MANY_PAIRS).read_text())["experts_add"]
    for model, sizes, own in (("qwen3_5-35B-A3B", (1024, 2048, 4096), few), ("qwen3-30B-A3B", (4096,), {})):
        us = many[f"{model.partition('-')[2]} FP8, experts_many"][-len(sizes) :]
        calls = dict(zip(sizes, us, strict=True))
        yield Mixture("experts_add, FP8 experts", packed_outline("FP8", model), 8, 0, calls, own)
    yield Mixture("experts_add, FP4 experts", packed_outline("FP4", "qwen3-30B-A3B"), 8, 64, {}, fp4)


def _two_products(name: str, stages: int) -> dict[int, float]:
    """Both products with the tiles that the op has, by tokens; stages: of those for many. The best three tiles were
    recorded; where the op's is none of them it counts as the third. That of 256 tokens was not tried."""
    rows, found = json.loads((RESULTS / CODES).read_text())["experts_us"], defaultdict[int, float](float)
    for head, *times in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        tokens = int(head.split("T=")[1].split()[0])
        if head.startswith(name) and tokens != 256:
            large = f"64, 64, 4, {stages}" if "first" in head else f"64, 128, 8, {stages}"
            us = {tile: float(us) for us, tile in re.findall(r"'([\d.]+) \((.*?)\)", times[tokens > 32])}
            found[tokens] += us.get(large if tokens > 32 else "16, 64, 4, 3", max(us.values()))
    return found


def mixture_calls(one: Mixture) -> Iterator[MeasuredCalls]:
    """The calls, each with its rows of an expert in place of the tokens."""
    call = next(call for step in one.made.steps.values() for call in step if call.op.name == "experts_add")
    chosen, (experts, hidden, _) = call.args.expert_ids.shape[1], call.args.down.shape
    for tokens, us in (*one.calls.items(), *one.products.items()):
        seconds = us * 1e-6
        if tokens in one.products:  # the norm, the sort, columns arranged for large tiles, and the sum
            moved = (chosen + 6) * tokens * hidden * 2
            seconds += 4 * LAUNCH_S + moved / GPUS[H200.gpu].fitted.bytes_per_s
        yield MeasuredCalls(tokens * chosen / experts, 1, call.cost(Workload(tokens, tokens, 0, 0)), seconds)


def experts_lines(ones: Sequence[Mixture]) -> Lines:
    """Few rows: the bytes of the experts that are hit, at one speed, and the time of a call. Many: half a tile of each
    expert is padding, in the mean, and the tiles are multiplied at one speed; without tiles, at that of each call."""
    one, calls = ones[0], sorted(call for one in ones for call in mixture_calls(one))
    few = [call._replace(tokens=one.few) for call in calls if call.tokens <= one.few]
    ((_, speed),) = fit_lines(few, GPUS[H200.gpu].fitted)
    if not one.places:
        rates = [
            (call.tokens, call.cost.flops / (call.seconds - speed.kernel_s)) for call in calls[len(few) :]
        ]
        own = ((rows, speed._replace(flops_per_s=rate)) for rows, rate in rates)
        return (calls[0].tokens, speed), (one.few, speed), *own
    many = [
        (1 + one.places / 2 / call.tokens) * call.cost.flops / (call.seconds - speed.kernel_s)
        for call in calls[len(few) :]
    ]
    rate = math.exp(sum(map(math.log, many)) / len(many))
    return (calls[0].tokens, speed), (one.few, speed), *(
        (size, speed._replace(flops_per_s=rate / (1 + one.places / 2 / size)))
        for size in (one.places * times / 2 for times in (1, 2, 4, 32))
    )  # fmt: skip


def latents_lines() -> dict[str, Lines]:
    """Attention to latents at 8,192 tokens, by the kernel that it has. From 32 rows on the programs fill the GPU: one
    line."""
    us, found = list[tuple[int, int, bool, float]](), defaultdict(list)
    lines = json.loads((RESULTS / CODES).read_text())["latents_us"]
    for line in lines:
        if case := re.match(r"rows (\d+) heads (\d+) most (\d+)", line):
            rows, heads, most = map(int, case.groups())
        elif time := re.match(r" +hopper 64 .*?: ([\d.]+) us", line):
            us.append((rows, heads, most > 0, float(time[1])))
    us += [(rows, 16, False, float(line.split()[0])) for rows, line in zip((32, 1), lines[-2:], strict=True)]
    best = {case: min(each[-1] for each in us if each[:-1] == case) for case in (each[:-1] for each in us)}
    for (rows, heads, chosen), time in best.items():
        made = outline("DeepSeek-V3.2" if chosen else "DeepSeek-V3", 128 // heads, ())
        call = next(call for step in made.steps.values() for call in step if call.op.name == "latent_attend")
        cost = call.cost(Workload.decode(rows, 8192))
        found[call.kind].append(MeasuredCalls(min(rows, 32), 1, cost, time * 1e-6))
    return {kind: fit_lines(calls, GPUS[H200.gpu].fitted) for kind, calls in found.items()}


def mixture_lines() -> dict[str, Lines]:
    """The lines of mixtures, and of attention to latents."""
    kinds = itertools.groupby(mixtures(), key=lambda one: one.kind)
    return {**{kind: experts_lines([*ones]) for kind, ones in kinds}, **latents_lines()}


def mixtures_table() -> str:
    """Calls of experts_add beside what the lines that there are give, in Markdown."""
    table = ["| op | rows of an expert | predicted / measured (ms) |", "| --- | --- | --- |"]
    for one in mixtures():
        for call in mixture_calls(one):
            speed = GPUS[H200.gpu].speed(one.kind, call.tokens, 5)
            guess = call.cost.floor_s(speed.bytes_per_s, speed.flops_per_s) + speed.kernel_s
            figure = Figure("call p50", 1e3 * guess, 1e3 * call.seconds)
            table.append(f"| {one.kind} | {call.tokens:g} | {figure} |")
    return "\n".join(table)


def lines() -> dict[str, Lines]:
    """The lines by op."""
    return {**fitted(LEDGERS), **fitted(DENSE_LEDGERS, pace()[0])}


def ops_table() -> str:
    """Steps with and without the lines beside measured ones, in Markdown."""
    factor, gap_s = pace()[0]
    own, within = GPUS[H200.gpu], [0, 0]
    table = [
        f"ops of Qwen take {factor:.3f} x their time alone in a step, and {1e6 * gap_s:.2f} us a kernel\n",
        "| model | step | one line for all / measured (ms) | a line an op / measured (ms) |",
        "| --- | --- | --- | --- |",
    ]
    every = [list(steps(figures)) for figures in (own._replace(ops={}), own._replace(ops=lines()))]
    for (model, point, plan, measured), (_, _, by_op, _) in zip(*every, strict=True):
        figures = [Figure("step p50", guess, measured) for guess in (plan, by_op)]
        within = [held + figure.within for held, figure in zip(within, figures, strict=True)]
        table.append(f"| {model} | {point} | {figures[0]} | {figures[1]} |")
    return "\n".join([*table, f"\n{within[0]} and {within[1]} of {len(every[0])} within 10 %"])


FITS: dict[str, tuple[Callable[[], dict[str, Lines]], Callable[[], str]]] = {
    "ops": (lines, ops_table),
    "products": (packed_lines, packed_table),
    "mixtures": (mixture_lines, mixtures_table),
}
"""What fits lines, and the table beside measurements."""


def page(name: str) -> Path:
    return PAGES.get(name, ROOT / "docs" / "planning.md")


def part_of_page(name: str) -> str:
    """A table as its page has it."""
    _, _, rest = page(name).read_text().partition(BEGIN.format(name))
    return rest.partition(END.format(name))[0].strip()


def main() -> int:
    """Print, compare or write; 1 if a plan differs from its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("rows", "tiers", "plans", "speeds", *FITS))
    parser.add_argument("--write", action="store_true", help="write it where it belongs")
    args = parser.parse_args()
    if args.name == "speeds":
        speed, found = fitted_speed()
        print(f"{speed}\nerrors from {min(found):+.1%} to {max(found):+.1%}")
    elif args.name == "plans":
        after = plans()
        changed = differences(json.loads(PLANS.read_text()), after)
        print("\n".join(changed) or "no figure has changed")
        if args.write:
            PLANS.write_text(json.dumps(after, indent=1) + "\n")
        return int(bool(changed) and not args.write)
    elif args.name in FITS:
        made_lines, table = FITS[args.name]
        if args.write:
            LINES.write_text(dump_lines({**GPUS[H200.gpu].ops, **made_lines()}))
        else:
            print(table())
    else:
        made = {"rows": rows_table, "steps": steps_table} if args.name == "rows" else {"tiers": tiers_table}
        for name, table in made.items():
            text = table()
            print(text)
            if args.write:
                before, begin, rest = page(name).read_text().partition(BEGIN.format(name))
                end = END.format(name)
                page(name).write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
