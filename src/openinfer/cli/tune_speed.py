"""`openinfer tune MODEL --from-trace FILE`: the speeds of a GPU, from steps that an engine or a benchmark has measured.

It needs no GPU. The speeds are those of predictions: `openinfer plan --speeds FILE` takes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from openinfer.cli import steps as points
from openinfer.cli.bench_record import percentile
from openinfer.cli.segments import Outline
from openinfer.frontend.errors import FlagError
from openinfer.kernels import GPUS, H200, Call, Figures, Speed, Target, Workload
from openinfer.kernels.speed_fit import MeasuredStep, errors, fit_speed

FEWEST = 4
"""Fewer steps than this do not fix three speeds."""
CPU = dataclasses.replace(H200, gpu="CPU")
"""A CPU, whose ops are counted as a GPU's plan has them."""
TARGETS = {H200.gpu: H200, CPU.gpu: CPU}
"""The machines whose steps can be traced, by name."""
FIRST = Speed(20e9, 50e9, 50e-6)
"""Where the fit to the steps of a CPU begins."""
SCALES = (0.03, 0.1, 0.3)
"""It begins at these parts of FIRST too, because it finds the nearest minimum."""


def target(name: str) -> Target:
    """The machine of a `--gpu NAME`. Raises FlagError."""
    for known, found in TARGETS.items():
        if name in (known, known.removeprefix("NVIDIA ")):
            return found
    raise FlagError(f"--gpu {name}: the speed is known of {', '.join(TARGETS)}")


def figures(target: Target) -> Figures:
    """The figures of a machine. The speeds of a CPU are where a fit begins, and no more."""
    if target is not CPU:
        return GPUS[target.gpu]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Figures(memory, FIRST, FIRST, FIRST, math.inf)


def measured(outline: Outline, path: Path) -> list[MeasuredStep]:
    """The steps of a file: of an engine's `--trace FILE`, or of `bench step --json FILE`. Raises FlagError, OSError."""
    try:
        data = json.loads(path.read_text())
        found = list(_traced(outline, data) if "traceEvents" in data else _points(outline, data))
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(
            f"{path} is no file of --trace and none of `openinfer bench step --json`: {error!r}"
        ) from None
    if not found:
        raise FlagError(
            f"{path} has no timed step that {outline.target.gpu} is known to run with these flags"
        )
    return found


def _traced(outline: Outline, data: dict[str, Any]) -> Iterator[MeasuredStep]:
    """The timed steps of a trace. Of each shape only the middle half by time counts, because a busy machine holds up
    some steps. On a CPU the host's work for a step delays the next, so it counts too."""
    shapes = {str(shape): shape for shape in outline.steps}
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    before = -math.inf
    for event in data["traceEvents"]:
        facts = event.get("args", {})
        if facts.get("bucket", "") not in shapes or not facts["timed"] or facts["device_us"] <= 0:
            continue
        us = facts["device_us"]
        if outline.target is CPU:
            begin, end = event["ts"], event["ts"] + event["dur"]
            us = max(us, end - before) if begin < before else us  # launched before that one was read
            before = end
        found.setdefault(facts["bucket"], []).append((us, facts))
    for bucket, steps in found.items():
        shape, quarter = shapes[bucket], len(steps) // 4
        for us, facts in sorted(steps, key=lambda one: one[0])[quarter : len(steps) - quarter]:
            workload = Workload(shape.tokens, facts["rows"], facts["kv_tokens"], facts["qk_pairs"])
            yield MeasuredStep([(outline.steps[shape], workload)], us / 1e6)


def _points(outline: Outline, data: dict[str, Any]) -> Iterator[MeasuredStep]:
    """The decode, prompt and mixed points of `bench step`."""
    for result in data["results"]:
        if "device_ms" in result:
            yield MeasuredStep(point_steps(outline, result["point"]), result["device_ms"] / 1e3)


def point_steps(outline: Outline, point: str) -> list[tuple[Sequence[Call], Workload]]:
    """The steps of a point of `bench step`, each as its calls and its workload."""
    kind, numbers = points.parse(point)
    rows, context, tokens = {
        "decode": lambda: (*numbers, 0),
        "prefill": lambda: (0, 0, *numbers),
        "mixed": lambda: numbers,
    }[kind]()
    found: list[tuple[Sequence[Call], Workload]] = []
    for start in range(0, max(tokens, 1), outline.buckets.max_tokens):
        new = min(outline.buckets.max_tokens, tokens - start)
        count = rows + bool(new)
        shape = outline.buckets.choose(rows + new, count)
        pairs = rows * context + new * start + new * (new + 1) // 2
        read = rows * context + (start + new if new else 0)
        found.append((outline.steps[shape], Workload(shape.tokens, count, read, pairs)))
    return found


def fitted(outline: Outline, paths: Sequence[Path]) -> tuple[Speed, str]:
    """The speeds that the files give, and a text with the errors before and after. Raises FlagError, OSError."""
    found = [step for path in paths for step in measured(outline, path)]
    if len(found) < FEWEST:
        raise FlagError(f"{len(found)} steps are too few to fit three speeds; at least {FEWEST} are needed")
    known = figures(outline.target)
    first = known.fitted
    starts = [first, *(Speed(first[0] * x, first[1] * x, first[2]) for x in SCALES if outline.target is CPU)]
    speed = min(
        (fit_speed(found, known, one) for one in starts),
        key=lambda one: sum(e * e for e in errors(found, known.at(one))),
    )
    text = (
        f"{len(found)} steps: {speed.bytes_per_s / 1e9:,.0f} GB/s, {speed.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"{speed.kernel_s * 1e6:.2f} us a kernel\n"
        f"error of predictions: {_spread(errors(found, known.at(speed)))}, before {_spread(errors(found, known))}"
    )
    return speed, text


def _spread(found: list[float]) -> str:
    rms = math.sqrt(sum(one * one for one in found) / len(found))
    return f"{rms:.1%} rms, {percentile(map(abs, found), 100):.1%} at most"


def save(path: Path, target: Target, speed: Speed) -> None:
    """Write the speeds as JSON."""
    path.write_text(json.dumps({"gpu": target.gpu, **speed._asdict()}, indent=1) + "\n")


def load(path: Path, target: Target, figures: Figures) -> Figures:
    """The figures with the speeds of a file. Raises FlagError, OSError."""
    try:
        data = json.loads(path.read_text())
        gpu, speed = data["gpu"], Speed(*(float(data[name]) for name in Speed._fields))
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(f"{path} is no file of `openinfer tune --from-trace`: {error!r}") from None
    if gpu != target.gpu:
        raise FlagError(f"{path} has the speeds of {gpu}, and the plan is for {target.gpu}")
    return figures.at(speed)
