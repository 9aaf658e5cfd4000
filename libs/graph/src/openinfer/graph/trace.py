"""StepTrace: the last steps, host phases and device work side by side, as a file that Chrome and Perfetto show."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from openinfer.tensor import Activity, ActivityNotAvailable, ActivityRecorder

PHASES_A_STEP = 8
"""More activities than a step has, for the size of the ring."""

_HOST, _STEPS, _DEVICE, _OUTLIERS = range(4)  # processes of the trace

Event = dict[str, Any]


@dataclass(slots=True)
class TracedStep:
    """A step from its launch to its result. Times are time.perf_counter_ns(), 0 for events that are still to come."""

    index: int
    facts: dict[str, Any]
    launched_ns: int
    read_ns: int = 0
    seconds: float = 0.0
    """Device time."""

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Whether something happened while this step was under way."""
        return end_ns > self.launched_ns and start_ns < self.read_ns


@dataclass(slots=True)
class Outlier:
    """A step that is kept when the ring has moved on, with the work of host and device during it."""

    step: TracedStep
    phases: list[tuple[str, int, int]]
    activities: list[Activity] = field(default_factory=list)


class StepTrace:
    """Keeps the last `steps` steps and the last `outliers` outliers, and writes them to `path` when it is closed.

    Open it before the first context is made, because CUPTI must be attached before. Without CUPTI the device is one bar
    a step, as long as the events around it say, and `source` says why. One thread uses it.
    """

    def __init__(self, path: Path, *, steps: int = 256, outliers: int = 8) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")  # a path that cannot be written is said now
        self._path = path
        self._phases: deque[tuple[str, int, int]] = deque(maxlen=steps * PHASES_A_STEP)
        self._steps: deque[TracedStep] = deque(maxlen=steps)
        self._under_way: deque[TracedStep] = deque()
        self._outliers: deque[Outlier] = deque(maxlen=outliers)
        self._activities: deque[Activity] = deque(maxlen=steps * 1024)
        self._phase, self._since = "", 0
        self._recorder: ActivityRecorder | None = None
        self.source = "CUPTI"
        try:
            self._recorder = ActivityRecorder()
        except ActivityNotAvailable as error:
            self.source = f"events around each step ({error})"

    def mark(self, phase: str) -> None:
        """End the host's current phase and begin `phase`; "" for no phase."""
        now = time.perf_counter_ns()
        if self._phase:
            self._phases.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    def launch(self, index: int, **facts: Any) -> None:
        """Step `index` goes to the device now. `facts` are shown with it."""
        self._under_way.append(TracedStep(index, facts, time.perf_counter_ns()))

    def result(self, seconds: float, **facts: Any) -> None:
        """The oldest step that is under way was read back; the device took `seconds`."""
        step = self._under_way.popleft()
        step.read_ns, step.seconds = time.perf_counter_ns(), seconds
        step.facts.update(facts)
        self._steps.append(step)

    def keep(self) -> None:
        """Keep the step that was read last as an outlier."""
        self._read()
        step = self._steps[-1]
        self._outliers.append(
            Outlier(
                step,
                [phase for phase in self._phases if step.overlaps(*phase[1:])],
                [a for a in self._activities if step.overlaps(a.start_ns, a.end_ns)],
            )
        )

    def close(self) -> None:
        """Write the file and stop recording. Wait for the device first, to have all."""
        self.mark("")
        self._read()
        if self._recorder is not None:
            self._recorder.close()
        events = chain(_names(), *(map(list, (self._host(), self._device(), self._kept()))))
        with self._path.open("w") as file:
            file.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps({"device": self.source}))
            file.write(', "traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")

    def _read(self) -> None:
        if self._recorder is not None:
            self._activities.extend(self._recorder.read())

    def _host(self) -> Iterator[Event]:
        for name, start, end in self._phases:
            yield _bar(_HOST, 0, name, start, end)
        for step in self._steps:
            yield _bar(_STEPS, step.index % 2, f"step {step.index}", step.launched_ns, step.read_ns,
                       **step.facts, device_us=round(step.seconds * 1e6, 1))  # fmt: skip

    def _device(self) -> Iterator[Event]:
        begin = self._phases[0][1] if self._phases else 0
        yield from (_of(a, _DEVICE, a.stream) for a in self._activities if a.start_ns >= begin)
        if self._recorder is None:
            for step in self._steps:
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
