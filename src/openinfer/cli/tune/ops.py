"""The lines of single ops, from the trace of an engine on a CPU, which times each op."""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from openinfer.cli.explain.segments import Outline
from openinfer.graph import Shape
from openinfer.kernels import Call, Cost, Lines, Speed, Workload
from openinfer.kernels.measure.speed_fit import MeasuredCalls, fit_lines
from openinfer.sampler.gpu import greedy, sample, top_logprobs

Event = dict[str, Any]
T = TypeVar("T")
HOST, STEPS = 0, 1
"""Processes of a trace: what the host does, and steps. Steps that are kept as outliers are in others."""
CHOOSING = {sample.name, top_logprobs.name}
"""Ops of a plan in whose place a step of greedy rows has `greedy`."""


OpTimes = Mapping[str, Sequence[MeasuredCalls]]
"""The calls of a trace by op."""


def lines(times: Sequence[OpTimes], usual: Speed) -> dict[str, Lines]:
    """The lines of the ops that were timed."""
    calls: dict[str, dict[float, list[MeasuredCalls]]] = defaultdict(lambda: defaultdict(list))
    for one in times:
        for op, found in one.items():
            for call in found:
                calls[op][call.tokens].append(call)
    return {
        op: fit_lines(
            [call for alike in sizes.values() for call in middle(alike, attrgetter("seconds"))], usual
        )
        for op, sizes in calls.items()
    }


def middle(found: Sequence[T], time: Callable[[T], float]) -> list[T]:
    """The middle half by time, because a busy machine holds up some."""
    quarter = len(found) // 4
    return sorted(found, key=time)[quarter : len(found) - quarter]


def times_ops(events: Sequence[Event]) -> bool:
    """Whether the trace is of an engine on a CPU, which times the ops of its steps."""
    names = (greedy.name, sample.name)
    return any(event.get("pid") == HOST and event.get("name") in names for event in events)


def of_trace(
    outline: Outline, steps: Sequence[tuple[Shape, float, Event]], events: Sequence[Event]
) -> OpTimes:
    """The op times of these steps. steps: the shape, the microseconds and the event of each; events: all of the trace.
    A step whose ops are not those of the outline does not count."""
    begins = sorted(
        one["ts"] for one in events if one.get("pid") == STEPS and "bucket" in one.get("args", {})
    )
    bars = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["pid"] == HOST and "args" not in event:
            bars[bisect_right(begins, event["ts"])].append(event)
    calls: dict[str, list[MeasuredCalls]] = defaultdict(list)
    for shape, _, step in steps:
        facts = step["args"]
        workload = Workload(shape.tokens, facts["rows"], facts["kv_tokens"], facts["qk_pairs"])
        for op, measured in _op_calls(outline.steps[shape], workload, bars[bisect_right(begins, step["ts"])]):
            calls[op] += measured
    return calls


def _op_calls(
    calls: Sequence[Call], workload: Workload, bars: Sequence[Event]
) -> Iterator[tuple[str, list[MeasuredCalls]]]:
    """The calls of each op of a step, those of one number of tokens together."""
    times = defaultdict(list)
    for bar in bars:
        times[bar["name"]].append(bar["dur"] / 1e6)
    by_op = defaultdict(list)
    for call in calls:
        if call.op.name not in CHOOSING or not times[greedy.name]:
            by_op[call.op.name].append(call)
    if any(len(times[op]) != sum(call.times for call in group) for op, group in by_op.items()):
        return
    for op, group in by_op.items():
        seconds, found = iter(times[op]), []
        for tokens, alike in itertools.groupby(group, key=lambda call: call.tokens):
            costs = [(call.times, call.cost(workload)) for call in alike]
            count = sum(number for number, _ in costs)
            total = Cost(sum(n * cost.bytes for n, cost in costs), sum(n * cost.flops for n, cost in costs))
            found.append(MeasuredCalls(tokens, count, total, sum(itertools.islice(seconds, count))))
        yield op, found
