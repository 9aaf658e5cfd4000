"""`openinfer tune MODEL --from-trace FILE`: the speeds of a GPU, from steps that an engine or a benchmark has measured.

It needs no GPU. The speeds are those of predictions: `openinfer plan --speeds FILE` takes them.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openinfer.cli.bench import points
from openinfer.cli.bench.record import percentile
from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.cli.tune import ops
from openinfer.frontend.errors import FlagError
from openinfer.graph import Shape
from openinfer.kernels import GPUS, H200, Call, Figures, Speed, Target, Workload
from openinfer.kernels.measure.speed_fit import MeasuredStep, errors, fit_speed
from openinfer.kernels.measure.speeds import dump_lines, load_lines

FEWEST = 4
"""Fewer steps than this do not fix three speeds."""
CPU = dataclasses.replace(H200, gpu="CPU")
"""A CPU, whose ops are counted as a GPU's plan has them."""
TARGETS = {H200.gpu: SERVED, CPU.gpu: CPU}
"""The machines whose steps can be traced, by name."""
FIRST = Speed(20e9, 50e9, 50e-6)
"""Where the fit to the steps of a CPU begins."""
Traced = tuple[Shape, float, dict[str, Any]]
"""A step of a trace: its shape, microseconds, event."""
SCALES = (0.03, 0.1, 0.3)
"""It begins at these parts of FIRST too, because it finds the nearest minimum."""


def target(name: str) -> Target:
    """The machine of a `--gpu NAME`. Raises FlagError."""
    for known, found in TARGETS.items():
        if name in (known, known.removeprefix("NVIDIA ")):
            return found
    raise FlagError(f"--gpu {name}: the speed is known of {', '.join(TARGETS)}")


def target_figures(target: Target) -> Figures:
    """The figures of a machine. The speeds of a CPU are where a fit begins, and no more."""
    if target is not CPU:
        return GPUS[target.gpu]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Figures(memory, FIRST, FIRST, FIRST, math.inf)


def measured_steps(outline: Outline, path: Path) -> list[MeasuredStep]:
    """The steps of a file: of an engine's `--trace FILE`, or of `bench step --json FILE`. Raises FlagError, OSError."""
    try:
        data = json.loads(path.read_text())
        if "traceEvents" in data:
            found = list(_steps(outline, traced(outline, data)))
            on_cpu = ops.times_ops(data["traceEvents"])
        else:
            found = list(_points(outline, data))
            on_cpu = data["gpu"] is None
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(
            f"{path} is neither a file of --trace nor one of `openinfer bench step --json`: {error!r}"
        ) from None
    if on_cpu and outline.target is not CPU:
        raise FlagError(f"{path} has steps of a CPU, and the speeds are to be those of {outline.target.gpu}")
    if not found:
        raise FlagError(f"{path} has no timed step that {outline.target.gpu} runs with these flags")
    return found


def _steps(outline: Outline, found: Iterable[Traced]) -> Iterator[MeasuredStep]:
    for shape, us, event in found:
        facts = event["args"]
        workload = Workload(shape.tokens, facts["rows"], facts["kv_tokens"], facts["qk_pairs"])
        yield MeasuredStep([(outline.steps[shape], workload)], us / 1e6)


def traced(outline: Outline, data: dict[str, Any]) -> list[Traced]:
    """The timed steps of a trace, of each shape only the middle half by time."""
    found: dict[Shape, list[Traced]] = {}
    for one in _every(outline, data):
        found.setdefault(one[0], []).append(one)
    return [one for steps in found.values() for one in ops.middle(steps, lambda one: one[1])]


def _every(outline: Outline, data: dict[str, Any]) -> Iterator[Traced]:
    """All timed steps of a trace. On a CPU a decode step goes on from the end of the step before it."""
    shapes = {str(shape): shape for shape in outline.steps}
    before = math.inf
    for event in data["traceEvents"]:
        if event.get("pid") != ops.STEPS or "bucket" not in event.get("args", {}):
            continue
        facts, shape = event["args"], shapes.get(event["args"]["bucket"])
        us, begin, end = facts["device_us"], event["ts"], event["ts"] + event["dur"]
        if shape is not None and facts["timed"] and us > 0:
            follows = shape.longest == 1 and before < begin
            waited = outline.target is CPU and (follows or begin < before < end)
            yield shape, end - before if waited else us, event
        before = end


def _points(outline: Outline, data: dict[str, Any]) -> Iterator[MeasuredStep]:
    for result in data["results"]:
        if "device_ms" in result:
            yield MeasuredStep(point_steps(outline, result["point"]), result["device_ms"] / 1e3)


def point_steps(outline: Outline, point: str) -> list[tuple[Sequence[Call], Workload]]:
    """The steps of a point of `bench step`, each as its calls and its workload."""
    kind, numbers = points.parse_points(point)
    rows, context, tokens = {"decode": (*numbers, 0), "prefill": (0, 0, *numbers), "mixed": numbers}[kind]
    found: list[tuple[Sequence[Call], Workload]] = []
    chunks = list(outline.buckets.chunks(tokens)) if not rows else [(0, tokens)]
    for start, new in chunks:
        count = rows + bool(new)
        shape = outline.buckets.choose(rows + new, count)
        pairs = rows * context + new * start + new * (new + 1) // 2
        read = rows * context + (start + new if new else 0)
        found.append((outline.steps[shape], Workload(shape.tokens, count, read, pairs)))
    return found


def fitted_figures(outline: Outline, paths: Sequence[Path]) -> tuple[Figures, str]:
    """The figures with the speeds of the files, and the errors before and after. Raises FlagError, OSError."""
    found = [step for path in paths for step in measured_steps(outline, path)]
    if len(found) < FEWEST:
        raise FlagError(f"{len(found)} steps are too few to fit three speeds; at least {FEWEST} are needed")
    known = target_figures(outline.target)
    first = known.fitted
    starts = [first, *(Speed(first[0] * x, first[1] * x, first[2]) for x in SCALES if outline.target is CPU)]
    tried = (known.at(fit_speed(found, known, one)) for one in starts)
    best = min(tried, key=lambda one: sum(e * e for e in errors(found, one)))
    speed = best.fitted
    text = (
        f"{len(found)} steps: {speed.bytes_per_s / 1e9:,.0f} GB/s, {speed.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"{speed.kernel_s * 1e6:.2f} us a kernel\n"
        f"error of predictions: {_spread(errors(found, best))}, before {_spread(errors(found, known))}"
    )
    if outline.target is CPU and (own := _by_op(outline, paths, best)).ops:
        best = own
        text += (
            f"\n{len(own.ops)} ops have lines of their own; a step waits {own.host_s * 1e3:.2f} ms besides, for the "
            "host and for other programs"
        )
    return best, text


def _by_op(outline: Outline, paths: Sequence[Path], known: Figures) -> Figures:
    """The figures with lines of the ops that an engine on a CPU timed in its steps. `host_s` is the mean of what steps
    took besides. Steps that were held up count there, because a busy machine will hold up a server too."""
    found = {path: json.loads(path.read_text()) for path in paths}
    data, times = {path: one for path, one in found.items() if "traceEvents" in one}, []
    for path, one in data.items():
        times.append(ops.of_trace(outline, traced(outline, one), one["traceEvents"]))
        if ops.times_ops(one["traceEvents"]) and not times[-1]:
            raise FlagError(f"{path}: no step has the ops of this model; it is the trace of another one")
    own = known._replace(ops=ops.lines(times, known.fitted))
    steps = [step for one in data.values() for step in _steps(outline, _every(outline, one))]
    besides = [-error * step.seconds for step, error in zip(steps, errors(steps, own), strict=True)]
    return own._replace(host_s=max(0.0, statistics.fmean(besides)))


def _spread(found: list[float]) -> str:
    rms = math.sqrt(sum(one * one for one in found) / len(found))
    return f"{rms:.1%} rms, {percentile(map(abs, found), 100):.1%} at most"


def save_figures(path: Path, target: Target, figures: Figures) -> None:
    own = {"host_s": figures.host_s, "ops": json.loads(dump_lines(figures.ops))} if target is CPU else {}
    path.write_text(json.dumps({"gpu": target.gpu, **figures.fitted._asdict(), **own}, indent=1) + "\n")


def load_figures(path: Path, target: Target, figures: Figures) -> Figures:
    """The figures with the speeds of a file. Raises FlagError, OSError."""
    try:
        data = json.loads(path.read_text())
        gpu, speed = data["gpu"], Speed(*(float(data[name]) for name in Speed._fields))
        ops, host_s = load_lines(json.dumps(data.get("ops", {}))), float(data.get("host_s", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(f"{path} is no file of `openinfer tune --from-trace`: {error!r}") from None
    if gpu != target.gpu:
        raise FlagError(f"{path} has the speeds of {gpu}, and the plan is for {target.gpu}")
    found = figures.at(speed)
    return found._replace(ops=ops, host_s=host_s) if ops else found
