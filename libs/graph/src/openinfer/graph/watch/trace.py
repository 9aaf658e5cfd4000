"""StepTrace: the last steps, host phases and device work side by side, as a file that Chrome and Perfetto show."""

import json
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
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
Mark = tuple[str, int]
"""A phase of the host, "" for none, and its begin."""


@dataclass(slots=True)
class TracedStep:
    """A step from its launch to its result. Times are time.perf_counter_ns(), 0 for events that are still to come."""

    index: int
    bucket: str
    """The name of its shape."""
    timed: bool
    """Whether its device time is the device's working time."""
    rows: int
    kv_tokens: int
    qk_pairs: int
    launched_ns: int
    begun_ns: int
    """When the host began to work for it, where no other step was under way."""
    read_ns: int = 0
    seconds: float = 0.0
    """Device time."""
    host_ns: int = 0
    """Time of the host's own work between the result before and this one: without ops, waiting and looks."""
    marks: Sequence[Mark] = ()
    """Phases of the host since the step before was read; so they may be the work for the next step. The last one goes
    on after the result."""
    ops: Collection[Bar] = ()
    """Ops that ran on the host in that time."""

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers of its batch, by name."""
        return {name: getattr(self, name) for name in ("bucket", "rows", "kv_tokens", "qk_pairs", "timed")}

    @property
    def phases(self) -> list[Bar]:
        """`marks` as bars."""
        return _bars(self.marks, self.launched_ns)

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
        self._marks: list[Mark] = [("", time.perf_counter_ns())]  # since the last result, as are the ops
        self._ops: deque[Bar] = deque(maxlen=OPS_KEPT)
        self._looked = False  # at something slow, since the last result
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
        self._marks.append((phase, time.perf_counter_ns()))
        if not phase and len(self._marks) > 2 * PHASES_KEPT:
            del self._marks[:-PHASES_KEPT]

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A look at what was recorded: a phase of its own, after which the host's current phase goes on."""
        phase, _ = self._marks[-1]
        self.mark(LOOKING)
        self._looked = True
        try:
            yield
        finally:
            self.mark(phase)

    def op(self, name: str, start_ns: int, end_ns: int) -> None:
        """An op ran on the host."""
        self._ops.append((name, start_ns, end_ns))

    def launch(
        self, index: int, bucket: str, timed: bool, rows: int = 0, kv_tokens: int = 0, qk_pairs: int = 0
    ) -> None:
        """Step `index` goes to the device now. Its numbers are those of TracedStep."""
        begun = 0 if self._under_way else self._begun_ns()
        launched = time.perf_counter_ns()
        self._under_way.append(TracedStep(index, bucket, timed, rows, kv_tokens, qk_pairs, launched, begun))

    def _begun_ns(self) -> int:
        """The begin of this turn. With no step under way, turns before it waited, and are no work for the step."""
        begun = self._marks[-1][1]
        for phase, start in reversed(self._marks):
            if not phase:
                break
            begun = start
        return begun

    def result(self, seconds: float) -> None:
        """The oldest step that is under way was read back; the device took `seconds`."""
        step, marks = self._under_way.popleft(), self._marks
        step.read_ns, step.seconds, step.marks = time.perf_counter_ns(), seconds, marks
        if self._ops:
            step.ops, self._ops = self._ops, deque(maxlen=OPS_KEPT)
        step.host_ns = self._host_ns(step)
        self._looked, self._marks = False, marks[-1:]
        self._results += 1
        if not self._results % CPU_EVERY:
            self._cpu_ns = time.thread_time_ns(), self._cpu_ns[0]
        self.steps.append(step)

    def _host_ns(self, step: TracedStep) -> int:
        """TracedStep.host_ns. Without a look at something slow, the sum over the phases is a difference of times."""
        marks = step.marks
        if self._looked:
            worked = sum(end - start for _, start, end in step.work())
        else:
            end, begun = marks[-1][1], marks[0][1]
            worked = end - (begun if begun > step.begun_ns else step.begun_ns)
            if len(marks) > 1 and marks[-2][0] == WAITING:
                worked -= end - marks[-2][1]
        return worked - sum(end - start for _, start, end in step.ops) if step.ops else worked

    def cpu_s(self) -> float:
        """The most seconds of CPU time that the host's thread can have had between the last two results. The thread's
        time is read every CPU_EVERY results, because a reading costs as much as all else here."""
        last, before = self._cpu_ns
        return (time.thread_time_ns() - (last if self._results % CPU_EVERY else before)) / 1e9

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
        phases = [phase for one in list(self.steps)[-3:] for phase in one.phases] + self._going_on()
        with self.looking():
            activities = self._activities(step.launched_ns)
        self._outliers.append(
            Outlier(
                step,
                [phase for phase in phases if step.overlaps(*phase[1:])],
                [a for a in activities if step.overlaps(a.start_ns, a.end_ns)],
            )
        )

    def _going_on(self) -> list[Bar]:
        """The phases since the last result that have ended."""
        return _bars(self._marks, self._under_way[0].launched_ns if self._under_way else None)

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
        for name, start, end in self._going_on() if steps and steps[-1] is self.steps[-1] else ():
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


def _bars(marks: Sequence[Mark], launched_ns: int | None) -> list[Bar]:
    """The phases that have ended. launched_ns: of the oldest step that was under way meanwhile; None: of none."""
    return [
        (name or BETWEEN, start, end)
        for (name, start), (_, end) in pairwise(marks)
        if name or (launched_ns is not None and launched_ns <= start)
    ]


def _names() -> Iterable[Event]:
    return [_name(_HOST, "host"), _name(_STEPS, "steps, launch to read-back"), _name(_DEVICE, "device")]


def _name(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _of(activity: Activity, pid: int, tid: int) -> Event:
    return _bar(pid, tid, activity.name, activity.start_ns, activity.end_ns, launch=activity.correlation)


def _bar(pid: int, tid: int, name: str, start_ns: int, end_ns: int, **args: Any) -> Event:
    event: Event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_ns / 1e3}
    event["dur"] = (end_ns - start_ns) / 1e3
    return {**event, "args": args} if args else event


class NoTrace(StepTrace):
    """A trace that keeps nothing."""

    def mark(self, *args: Any, **kwargs: Any) -> None:
        """See StepTrace, as of the others."""

    op = launch = result = keep = mark
