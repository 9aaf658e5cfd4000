"""`openinfer bench step MODEL_DIR`: decode and prefill steps and offline throughput.

Steps are timed through the engine on the host's clock, and on the device by events. Token ids are random.
"""

import argparse
import itertools
import json
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer.cli import recipe_flags
from openinfer.cli.bench import points
from openinfer.cli.bench.record import add_record_arguments, percentile, progress, record, write
from openinfer.cli.recipe_flags import Asked, without_prefix_cache
from openinfer.frontend.errors import FlagError
from openinfer.tensor import Activity, ActivityRecorder

LIMIT_US = 5.0
"""The longest gap that is allowed."""
LISTED = 10
NAME_CHARS = 87
"""Names of kernels may have hundreds."""

Step = Sequence[Activity]


def measure_gaps(args: argparse.Namespace, asked: Asked) -> int:
    """Profile the decode points; returns 0, 1 if a gap is too long. Raises ActivityNotAvailable without CUPTI."""
    chosen = args.points or ["decode:1,1024"]
    parsed = [points.parse_points(point) for point in chosen]
    for text, (kind, _) in zip(chosen, parsed, strict=True):
        if kind != "decode":
            raise FlagError(f"--gaps of {text}: only decode steps are profiled")
    if asked.options.trace:
        raise FlagError("--gaps and --trace both record through CUPTI: give one of them")
    recorder = ActivityRecorder()  # before there is a context
    engine = without_prefix_cache(asked)
    results = []
    try:
        profiler = points.StepBench(engine, args.repeats)
        for text, point in zip(chosen, parsed, strict=True):
            profiler.check(point)
            recorder.pause()
            plain = profiler.decode(*point[1])["device_ms"]
            recorder.resume()
            for how, activities in (
                ("replayed alone", profiler.replays(recorder, *point[1])),
                ("through the engine", profiler.served(recorder, *point[1])),
            ):
                progress(f"{text}, {how}")
                results.append({"point": text, "how": how, "device_ms": plain, **gap_summary(activities)})
                print(gap_table(results[-1]), flush=True)
    finally:
        recorder.close()
        engine.close()
        if args.json:
            write(args.json, record("gaps", args, results, model=engine.info.model))
    return 1 if any(result["over_limit"] for result in results) else 0


def gaps(step: Step) -> list[float]:
    """Microseconds of idle time before each activity but the first; 0 where it overlaps what ran before."""
    found, end = [], step[0].end_ns
    for activity in step[1:]:
        found.append(max(0, activity.start_ns - end) / 1e3)
        end = max(end, activity.end_ns)
    return found


def alike(steps: Sequence[Step]) -> list[Step]:
    """The steps with the most common list of activities."""
    if not steps:
        return []
    names = [tuple(a.name for a in step) for step in steps]
    ((most, _),) = Counter(names).most_common(1)
    return [step for step, name in zip(steps, names, strict=True) if name == most]


def gap_summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The median of each gap over steps with the same activities, place by place. `repeats` has every step's sum and
    longest gap. Raises FlagError if no kernel was recorded."""
    steps = [step for step in alike(steps) if len(step) > 1]
    if not steps:
        raise FlagError("CUPTI recorded no kernels: a profile cannot be made here")
    columns = list(zip(*map(gaps, steps), strict=True))
    medians = [statistics.median(column) for column in columns]
    names = list(itertools.pairwise(a.name for a in steps[0]))
    longest = sorted(range(len(medians)), key=lambda at: -medians[at])[:LISTED]
    return {
        "steps": len(steps),
        "activities_a_step": len(steps[0]),
        "kernels_a_step": sum(a.kind == "kernel" for a in steps[0]),
        "span_us": statistics.median((max(a.end_ns for a in s) - s[0].start_ns) / 1e3 for s in steps),
        "idle_us": sum(medians),
        "longest_gap_us": max(medians),
        "over_limit": sum(gap > LIMIT_US for gap in medians),
        "overlapped": sum(gap == 0 for gap in medians),
        "gap_p50_us": percentile(medians, 50),
        "gap_p99_us": percentile(medians, 99),
        "kernels": _times(steps, medians),
        "longest": [
            {"after": names[at][0], "before": names[at][1], "p50_us": medians[at], "max_us": max(columns[at])}
            for at in longest
        ],
        "repeats": {
            "idle_us": [sum(gaps(step)) for step in steps],
            "longest_gap_us": [max(gaps(step)) for step in steps],
        },
    }


def _times(steps: Sequence[Step], gaps_us: Sequence[float]) -> list[dict[str, Any]]:
    """Kernels, copies and memsets of a step by name, the longest first. Each has its number, and the sums of the
    medians of its times and of the gaps before it."""
    found: dict[str, dict[str, Any]] = {}
    for column, gap in zip(zip(*steps, strict=True), (0.0, *gaps_us), strict=True):
        name = column[0].name
        entry = found.setdefault(name, {"name": name, "calls": 0, "us": 0.0, "gaps_us": 0.0})
        entry["calls"] += 1
        entry["us"] += statistics.median((a.end_ns - a.start_ns) / 1e3 for a in column)
        entry["gaps_us"] += gap
    return sorted(found.values(), key=lambda entry: -float(entry["us"]))


def gap_table(result: dict[str, Any]) -> str:
    head = (
        f"{result['point']} {result['how']}: {result['kernels_a_step']} kernels in {result['span_us']:.0f} us "
        f"({result['device_ms'] * 1e3:.0f} us when nothing is recorded),\n"
        f"  {result['idle_us']:.1f} us idle, {result['overlapped']} of {result['activities_a_step'] - 1} starts "
        f"overlap, longest gap {result['longest_gap_us']:.2f} us, {result['over_limit']} over {LIMIT_US:g} us"
    )
    lines = [
        f"  {gap['p50_us']:8.2f} us (at most {gap['max_us']:.2f})\n"
        f"      after {gap['after'][:NAME_CHARS]}\n      before {gap['before'][:NAME_CHARS]}"
        for gap in result["longest"]
    ]
    kernels = [
        f"  {k['us']:9.1f} us, {k['calls']:4d} of {k['us'] / k['calls']:8.2f} us, {k['name'][: NAME_CHARS - 24]}"
        for k in result["kernels"][:LISTED]
    ]
    return "\n".join([head, *kernels, *lines])


def main(argv: list[str]) -> int:
    """Measure; returns 0, 1 for what cannot be measured, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "bench step", __doc__, _flags, _measure)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--points", nargs="+", metavar="POINT",
        help="decode:ROWS,CONTEXT prefill:TOKENS mixed:ROWS,CONTEXT,TOKENS offline:REQUESTS,IN,OUT; "
        "default: those of the published targets")  # fmt: skip
    add("--repeats", type=int, default=20, help="timed steps a point; default: %(default)s")
    add("--records", type=Path, metavar="FILE",
        help="write the steps' times with their workloads, for the scheduler's simulator; "
        "this adds default points")  # fmt: skip
    add("--gaps", action="store_true",
        help="instead: the kernels of decode points (default: decode:1,1024) and the gaps between them, through CUPTI; "
        "exit code 1 if one is longer than 5 us")  # fmt: skip
    add_record_arguments(parser)


def _measure(args: argparse.Namespace, asked: Asked) -> int:
    chosen = args.points or [*points.POINTS, *(points.RECORD_POINTS if args.records else ())]
    for point in chosen:
        points.parse_points(point)
    if args.repeats < 1:
        raise recipe_flags.BadFlags(f"--repeats {args.repeats}: it must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if args.gaps:
        return measure_gaps(args, asked)
    engine = without_prefix_cache(asked)
    results = []
    progress(f"{len(chosen)} points: {' '.join(chosen)}")
    try:
        for result in points.measure_points(engine, chosen, repeats=args.repeats):
            progress(_line(result))
            results.append(result)
        compiles = engine.stats().compiles_after_ready
    finally:
        engine.close()
        records = [r for result in results for r in result.pop("records")]
        if args.json:
            write(args.json, record("step", args, results, model=engine.info.model))
        if args.records:
            args.records.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            progress(f"wrote {args.records}")
    print("\n".join(map(_line, results)))
    if compiles:
        raise FlagError(f"{compiles} kernels were compiled while measuring: the figures do not count")
    return 0


def _line(result: dict[str, object]) -> str:
    names = {
        "wall_ms": "ms through the engine",
        "device_ms": "ms on the device",
        "output_tokens_per_s": "tokens/s",
    }
    found = [f"{result[name]:10.3f} {unit}" for name, unit in names.items() if name in result]
    return f"{result['point']:>22} " + "".join(found)
