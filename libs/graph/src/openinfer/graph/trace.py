"""StepTrace: the last steps, host phases and device work side by side, as a file that Chrome and Perfetto show."""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from openinfer.tensor import Activity, ActivityNotAvailable, ActivityRecorder

log = logging.getLogger("openinfer.graph")

PHASES_KEPT, OPS_KEPT = 64, 4096
"""The most host phases and ops between two results."""
CPU_EVERY = 4
"""Results from one reading of the thread's CPU time to the next."""
BETWEEN = "between turns"
"""The phase in which the engine is not asked for a step although one is under way."""
WAITING = "read back"
"""The phase in which the host waits for the device."""
LOOKING = "look at a slow step"
"""The phase in which the host writes down why something was slow. It is no work for a step."""

LOOK_EVERY_NS = 1_000_000_000
"""The least time between two looks at outliers, because a look holds up the engine."""
_HOST, _STEPS, _DEVICE, _OUTLIERS = range(4)  # processes of the trace

Event = dict[str, Any]
Bar = tuple[str, int, int]
"""Name, begin and end."""


@dataclass(slots=True)
class TracedStep:
    """A step from its launch to its result. Times are time.perf_counter_ns(), 0 for events that are still to come."""

    index: int
    facts: dict[str, Any]
    launched_ns: int
    begun_ns: int = 0
    """When the host began to work for it, where no other step was under way."""
    read_ns: int = 0
    seconds: float = 0.0
    """Device time."""
    phases: Collection[Bar] = ()
    """Phases of the host since the step before was read; so they may be the work for the next step."""
    ops: Collection[Bar] = ()
    """Ops that ran on the host in that time."""

    def work(self) -> list[Bar]:
        """The phases in which the host worked for this step or the next, rather than waited."""
        return [p for p in self.phases if p[0] not in (WAITING, LOOKING) and p[1] >= self.begun_ns]

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Whether something happened while this step was under way."""
        return end_ns > self.launched_ns and start_ns < self.read_ns


@dataclass(slots=True)
class Outlier:
    """A step that is kept when the ring has moved on, with the work of host and device during it."""

    step: TracedStep
    phases: list[Bar]
    activities: list[Activity] = field(default_factory=list)


class StepTrace:
    """Keeps the last `steps` steps and the last `outliers` outliers. With a path it writes them there at `close`.

    With a path, open it before the first context is made, because CUPTI must be attached before. Without CUPTI the
    device is one bar a step, as long as the events around it say, and `source` says why. Without a path CUPTI is not
    attached, because it slows steps down. One thread uses it.
    """

    def __init__(self, path: Path | None = None, *, steps: int = 256, outliers: int = 8) -> None:
        self._path = path
        self.steps: deque[TracedStep] = deque(maxlen=steps)
        """The steps that were read, the newest last."""
        self._under_way: deque[TracedStep] = deque()
        self._outliers: deque[Outlier] = deque(maxlen=outliers)
        self._phases: deque[Bar] = deque(maxlen=PHASES_KEPT)  # since the last result, as are the ops
        self._ops: deque[Bar] = deque(maxlen=OPS_KEPT)
        self._phase, self._since, self._turn = "", 0, 0
        self._results, self._cpu_ns = 0, (0, 0)  # the thread's CPU time at the last two readings
        self._next_look = 0
        self._recorder: ActivityRecorder | None = None
        self.source = "events around each step"
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")  # a path that cannot be written is said now
        try:
            self._recorder = ActivityRecorder()
            self.source = "CUPTI"
        except ActivityNotAvailable as error:
            self.source += f" ({error})"
        log.info("tracing steps into %s, the device by %s", path, self.source)

    def mark(self, phase: str) -> None:
        """End the host's current phase and begin `phase`; "" for no phase."""
        now = time.perf_counter_ns()
        if self._phase:
            self._phases.append((self._phase, self._since, now))
        elif self._under_way:
            self._phases.append((BETWEEN, self._since, now))
        self._phase, self._since = phase, now
        if not phase:
            self._turn = now

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A look at what was recorded: a phase of its own, after which the host's current phase goes on."""
        phase = self._phase
        self.mark(LOOKING)
        try:
            yield
        finally:
            self.mark(phase)

    def op(self, name: str, start_ns: int, end_ns: int) -> None:
        """An op ran on the host."""
        self._ops.append((name, start_ns, end_ns))

    def launch(self, index: int, **facts: Any) -> None:
        """Step `index` goes to the device now. `facts` are shown with it."""
        # With no step under way, turns before this one waited for something to run, and are no work for it.
        begun = 0 if self._under_way else self._turn
        self._under_way.append(TracedStep(index, facts, time.perf_counter_ns(), begun))

    def result(self, seconds: float, **facts: Any) -> None:
        """The oldest step that is under way was read back; the device took `seconds`."""
        step = self._under_way.popleft()
        step.read_ns, step.seconds = time.perf_counter_ns(), seconds
        step.phases, self._phases = self._phases, deque(maxlen=PHASES_KEPT)
        if self._ops:
            step.ops, self._ops = self._ops, deque(maxlen=OPS_KEPT)
        if facts:
            step.facts.update(facts)
        self._results += 1
        if not self._results % CPU_EVERY:
            self._cpu_ns = time.thread_time_ns(), self._cpu_ns[0]
        self.steps.append(step)

    def cpu_s(self) -> float:
        """The most seconds of CPU time that the host's thread can have had between the last two results. The thread's
        time is read every CPU_EVERY results, because a reading costs as much as all else here."""
        last, before = self._cpu_ns
        return (time.thread_time_ns() - (last if self._results % CPU_EVERY else before)) / 1e9

    def host_s(self) -> float:
        """Seconds of the host's own work between the last two results: without its ops, its waiting and looks at slow
        steps."""
        step, total = self.steps[-1], 0
        begun = step.begun_ns
        for name, start, end in step.phases:
            if name != WAITING and name != LOOKING and start >= begun:
                total += end - start
        for _, start, end in step.ops:
            total -= end - start
        return total / 1e9

    def times(self, steps: Sequence[TracedStep]) -> list[dict[str, float]]:
        """For each of these steps, the oldest first, seconds by name of what happened between the result before and its
        own: ops and kernels, and phases of the host. The phase in which ops ran counts without them."""
        found: list[dict[str, float]] = [{} for _ in steps]
        for step, times in zip(steps, found, strict=True):
            for prefix, bars in (("op", step.ops), ("host phase", step.work())):
                for name, start, end in bars:
                    times[f"{prefix} {name}"] = times.get(f"{prefix} {name}", 0.0) + (end - start) / 1e9
            if step.ops and "host phase launch" in times:
                times["host phase launch"] -= sum(end - start for _, start, end in step.ops) / 1e9
        read = [step.read_ns for step in steps]
        for activity in self._activities(min((step.launched_ns for step in steps), default=0)):
            at = bisect_right(read, activity.start_ns)
            name = f"kernel {activity.name}" if activity.kind == "kernel" else activity.name
            while at < len(steps) and steps[at].overlaps(activity.start_ns, activity.end_ns):
                found[at][name] = found[at].get(name, 0.0) + (activity.end_ns - activity.start_ns) / 1e9
                at += 1
        return found

    def _activities(self, begin_ns: int) -> list[Activity]:
        """The work of the device from this time on, by CUPTI."""
        return [] if self._recorder is None else self._recorder.since(begin_ns)

    def recent(self, count: int) -> list[Event]:
        """The bars of the last `count` steps."""
        last = list(self.steps)[-count:]
        activities = self._activities(min((step.launched_ns for step in last), default=0))
        return [*_names(), *self._host(last), *self._device(last, activities)]

    def keep(self) -> None:
        """Keep the step that was read last as an outlier. With CUPTI at most one in LOOK_EVERY_NS is kept, because a
        look at what the device did takes 10 ms."""
        step = self.steps[-1]
        if self._recorder is not None and step.read_ns < self._next_look:
            return
        self._next_look = step.read_ns + LOOK_EVERY_NS
        phases = [phase for one in list(self.steps)[-3:] for phase in one.phases] + [*self._phases]
        with self.looking():
            activities = self._activities(step.launched_ns)
        self._outliers.append(
            Outlier(
                step,
                [phase for phase in phases if step.overlaps(*phase[1:])],
                [a for a in activities if step.overlaps(a.start_ns, a.end_ns)],
            )
        )

    def close(self) -> None:
        """Stop recording, and write the file if there is one. Wait for the device first, to have all."""
        self.mark("")
        steps = list(self.steps)
        begin = next((start for step in steps for _, start, _ in step.phases), 0)
        activities = self._activities(begin)
        if self._recorder is not None:
            self._recorder.close()
        if self._path is None:
            return
        events = chain(_names(), self._host(steps), self._device(steps, activities), self._kept())
        with self._path.open("w") as file:
            file.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps({"device": self.source}))
            file.write(', "traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")

    def _host(self, steps: Sequence[TracedStep]) -> Iterator[Event]:
        for step in steps:
            for name, start, end in (*step.phases, *step.ops):
                yield _bar(_HOST, 0, name, start, end)
            yield _bar(_STEPS, step.index % 2, f"step {step.index}", step.launched_ns, step.read_ns,
                       **step.facts, device_us=round(step.seconds * 1e6, 1))  # fmt: skip
        for name, start, end in self._phases if steps and steps[-1] is self.steps[-1] else ():
            yield _bar(_HOST, 0, name, start, end)

    def _device(self, steps: Sequence[TracedStep], activities: Iterable[Activity]) -> Iterator[Event]:
        yield from (_of(a, _DEVICE, a.stream) for a in activities)
        if self._recorder is None:
            for step in steps:
                start = step.read_ns - round(step.seconds * 1e9)
                yield _bar(_DEVICE, 0, f"step {step.index}", start, step.read_ns)

    def _kept(self) -> Iterator[Event]:
        for outlier in self._outliers:
            step = outlier.step
            pid = _OUTLIERS + step.index
            yield _name(pid, f"outlier: step {step.index}")
            yield _bar(pid, 0, f"step {step.index}", step.launched_ns, step.read_ns,
                       **step.facts, device_us=round(step.seconds * 1e6, 1))  # fmt: skip
            yield from (_bar(pid, 1, *phase) for phase in outlier.phases)
            yield from (_of(a, pid, 2) for a in outlier.activities)


def _names() -> Iterable[Event]:
    return [_name(_HOST, "host"), _name(_STEPS, "steps, launch to read-back"), _name(_DEVICE, "device")]


def _name(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _of(activity: Activity, pid: int, tid: int) -> Event:
    return _bar(pid, tid, activity.name, activity.start_ns, activity.end_ns, launch=activity.correlation)


def _bar(pid: int, tid: int, name: str, start_ns: int, end_ns: int, **args: Any) -> Event:
    event = {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }
    return {**event, "args": args} if args else event
