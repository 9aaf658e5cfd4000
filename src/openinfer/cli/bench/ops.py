"""`openinfer bench ops MODEL_DIR`: every op at every shape that the engine's recorded steps run.

An op's calls of one step (one a layer) are captured together in a CUDA graph and replayed. So weights and cache come
from memory, as in a step, and activations come from where the step leaves them. Sampling is greedy.
"""

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openinfer.cli import recipe_flags
from openinfer.cli.bench.record import add_record_arguments, percentile, progress, record, write
from openinfer.cli.explain import ledger
from openinfer.cli.explain.ledger import Machine, OpCall, entry_figures, machine, machine_flags
from openinfer.cli.explain.segments import Segment, engine_segments
from openinfer.cli.recipe_flags import Asked, without_prefix_cache
from openinfer.frontend.errors import FlagError
from openinfer.graph import StepGraphs
from openinfer.kernels import Pack, Workload
from openinfer.tensor import Event, Stream

CALLS = 32
"""The fewest calls in a graph, so that the start of the graph itself does not count."""
WARM_UP = 2
CPU_TOKENS = 8192
"""Tokens of the cache on a CPU. It fills them in about a minute for a small model; a GPU's cache would take hours."""


def main(argv: list[str]) -> int:
    """Measure; returns 0, 1 for what cannot be measured, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "bench ops", __doc__, _flags, _measure)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--context", type=int, default=1024, help="tokens of a decode row; default: %(default)s")
    add("--tokens", type=int, nargs="+", metavar="N", help="only steps of these recorded token counts")
    add("--repeats", type=int, default=10, help="replays an op and shape; default: %(default)s")
    add("--against", type=Path, metavar="FILE",
        help="name the ops that are slower or faster than in this ledger of an earlier --json; exit code 1 if one is "
        "slower")  # fmt: skip
    add("--ledger", type=Path, metavar="FILE",
        help="with --against: compare this ledger instead of measuring; needs no GPU")  # fmt: skip
    machine_flags(parser)
    add_record_arguments(parser)


def _measure(args: argparse.Namespace, asked: Asked) -> int:
    before = ledger.entries(args.against) if args.against else None
    if args.ledger is None:
        results = _measured(args, asked)
    elif before is None:
        raise recipe_flags.BadFlags("--ledger FILE is compared with --against FILE; one of them is missing")
    else:
        results = list(ledger.entries(args.ledger).values())
    if before is None:
        return 0
    text, slower = compared(before, {entry["key"]: entry for entry in results})
    print(text)
    return int(slower)


def _measured(args: argparse.Namespace, asked: Asked) -> list[dict[str, Any]]:
    if args.repeats < 1:
        raise recipe_flags.BadFlags(f"--repeats {args.repeats}: it must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    engine = without_prefix_cache(asked)
    rows = engine.runner.buckets.max_rows
    if engine.runner.stream.device.kind == "cpu" and rows * args.context > CPU_TOKENS:
        engine.close()
        raise recipe_flags.BadFlags(
            f"{rows} rows of {args.context} tokens take too long on a CPU: lower --max-num-seqs or --context to "
            f"{CPU_TOKENS} tokens in all, or run it on a GPU"
        )
    progress(f"{rows} rows get {args.context} tokens of cache each")
    limits, results, seen = machine(args), [], set[str]()
    try:
        runner = engine.runner
        for segment in engine_segments(engine, args.context, args.tokens):
            for entry in ledger_entries(segment, runner.pack, runner.stream, args.repeats, limits, seen):
                results.append(entry)
                print(line(entry), flush=True)
    finally:
        engine.close()
        if args.json:
            floor = {"bytes_per_s": limits.bytes_per_s, "flops_per_s": limits.flops_per_s}
            write(args.json, record("ops", args, results, model=engine.info.model, machine=floor))
    return results


def ledger_entries(
    segment: Segment, pack: Pack, stream: Stream, repeats: int, limits: Machine, seen: set[str]
) -> Iterator[dict[str, Any]]:
    """A ledger's entries for the calls of a segment that are not in `seen` yet; their keys are added to `seen`."""
    recorded = ledger.recorded_calls([segment], getattr(pack, "target", None))
    every = ledger.grouped(recorded, segment.workload)
    groups = {key: calls for key, calls in every.items() if key not in seen}
    progress(f"{segment.name}: {len(groups)} new of its ops and shapes")
    for name, calls in groups.items():
        seen.add(name)
        yield _entry(name, calls, segment.workload, _seconds(pack, stream, calls, repeats), limits)


def _seconds(pack: Pack, stream: Stream, calls: list[OpCall], repeats: int) -> list[float]:
    rounds = max(1, CALLS // len(calls))
    graphs = StepGraphs(stream.device, stream, capture=True)

    def enqueue() -> None:
        for op, args in calls * rounds:
            pack.run(op, args)

    graphs.record("calls", enqueue)
    for _ in range(WARM_UP):
        graphs.launch("calls")
    marks = [Event(stream.device, timing=True) for _ in range(2 * repeats)]
    for before, after in zip(marks[::2], marks[1::2], strict=True):
        before.record(stream)
        graphs.launch("calls")
        after.record(stream)
    stream.synchronize()
    times = [a.elapsed_s(b) / (rounds * len(calls)) for b, a in zip(marks[::2], marks[1::2], strict=True)]
    for mark in marks:
        mark.close()
    graphs.close()
    return times


def _entry(
    name: str, calls: list[OpCall], workload: Workload, times: list[float], limits: Machine
) -> dict[str, Any]:
    op, args = calls[0]
    cost, us = op.cost(workload, args), percentile(times, 50) * 1e6
    floor_us = limits.floor_us(cost)
    return {
        "key": name,
        "op": op.name,
        "calls_a_step": len(calls),
        "us": us,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "floor_us": floor_us,
        "of_floor": floor_us / us,
        "repeats": {"us": [t * 1e6 for t in times]},
    }


def line(entry: dict[str, Any]) -> str:
    return f"{entry['calls_a_step']:3} x {entry['key']}\n{entry_figures(entry)}"


WORTH = 1.03
"""A smaller change is noise, whatever the repeats say."""

Entries = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """An op and shape whose time changed. us: medians. calls: of one step."""

    key: str
    calls: int
    before_us: float
    after_us: float

    @property
    def slower(self) -> bool:
        return self.after_us > self.before_us

    @property
    def step_us(self) -> float:
        """Microseconds that a step changes by."""
        return self.calls * (self.after_us - self.before_us)

    def __str__(self) -> str:
        word = "slower" if self.slower else "faster"
        return (
            f"{self.after_us / self.before_us:6.2f} x  {self.before_us:9.2f} -> {self.after_us:9.2f} us  "
            f"{self.step_us:+10.1f} us a step  {word}: {self.calls} x {self.key}"
        )


def changes(before: Entries, after: Entries) -> list[Change]:
    """The entries of both whose times differ by WORTH, and whose repeats do not overlap between the quartiles."""
    found = [
        Change(key, new["calls_a_step"], before[key]["us"], new["us"])
        for key, new in after.items()
        if key in before and _differ(before[key], new)
    ]
    return sorted(found, key=lambda change: -abs(change.step_us))


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    ratio = after["us"] / before["us"]
    if 1 / WORTH < ratio < WORTH:
        return False
    slow, fast = (after, before) if ratio > 1 else (before, after)
    return _quartile(slow, 1) > _quartile(fast, 3)


def _quartile(entry: Mapping[str, Any], number: int) -> float:
    ordered: Sequence[float] = sorted(entry["repeats"]["us"])
    return ordered[(len(ordered) - 1) * number // 4]


def compared(before: Entries, after: Entries) -> tuple[str, bool]:
    """The changes as text, and whether there is a regression. Raises FlagError for ledgers without a common op."""
    if not set(before) & set(after):
        raise FlagError(
            "the ledgers have no op and shape in common: they are of two models, or of other flags; measure both alike"
        )
    found = changes(before, after)
    slower = sum(change.slower for change in found)
    new, gone = sorted(set(after) - set(before)), sorted(set(before) - set(after))
    both = len(set(after) & set(before))
    lines = [f"{both} ops in both ledgers: {slower} slower, {len(found) - slower} faster"]
    lines += map(str, found)
    lines += [f"only in the new ledger: {key}" for key in new]
    lines += [f"only in the old ledger: {key}" for key in gone]
    return "\n".join(lines), slower > 0
