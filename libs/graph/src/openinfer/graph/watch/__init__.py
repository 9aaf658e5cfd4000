"""Watch: steps that take longer than they should, each kept as a trace with a line that says what is out of line."""

import json
import logging
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openinfer.graph.watch.trace import NoTrace, StepTrace, TracedStep
from openinfer.tensor import Device, DeviceClock, format_bytes

log = logging.getLogger("openinfer.graph")

WARM = 16
"""Values before a bound says that one is out of line."""
MEMORY = 256
"""About as many values as a bound remembers."""


@dataclass(slots=True)
class Bound:
    """A running mean and deviation. A value is out of line above both `factor` means and mean + `deviations` of these.

    It learns from at most the limit, so one value out of line moves it little, and a lasting change is learned.
    """

    factor: float = 2.0
    deviations: float = 10.0
    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    limit: float = math.inf
    """The largest value in line; infinite before WARM values."""

    def take(self, value: float) -> bool:
        """Learn from a value. Returns whether it is out of line."""
        limit = self.limit
        learned = value if value < limit else limit
        self.count = count = self.count + 1
        weight = 1 / count if count < MEMORY else 1 / MEMORY
        away = learned - self.mean
        if count > 1:
            self.deviation += weight * ((away if away > 0 else -away) - self.deviation)
        self.mean = mean = self.mean + weight * away
        if count >= WARM:
            by_factor, by_deviation = self.factor * mean, mean + self.deviations * self.deviation
            self.limit = by_factor if by_factor > by_deviation else by_deviation
        return value > limit


FINDINGS_KEPT = 16
STEPS_SHOWN = 8
"""Steps before and with the one out of line, in its trace."""
EVENTS_SHOWN = 2000
"""The most bars of a trace."""
QUIET_S = 10.0
"""Seconds after a finding in which no other of its kind is kept."""
FLOOR_S = 5e-3
"""A shorter excess is no finding."""
HOST_FLOOR_S = 20e-3
"""The same for the host, where threads, interrupts and garbage collectors take turns of milliseconds."""
RUN = 64
"""Steps of a run. A run is slower by RUN_FACTOR than the steps before it."""
RUN_FACTOR = 1.3
AT_ONCE = 16
"""The bounds learn from this many steps in line at a time, because that costs less than one by one."""
CLOCK_S = 5.0
"""Seconds between two readings of the device's clock and free memory."""
SLOW_CLOCK = 0.95
"""A clock below this part of the usual one is named."""
TAKEN_BYTES = 256 << 20
"""Memory that left the device after its engine was ready, and that is named. A context of CUDA takes more."""
CAUSE = 0.2
"""A phase, op or kernel with less than this part of what a step took more is not named as the cause."""
ALL = 0.5
"""All kernels are named where the others are slower by this part of what the slowest is."""
COMPARED = 16
"""Steps that a finding compares, as many before it."""
PREEMPTIONS, STORM = 8, 256
"""Preemptions that make a storm, and the steps in which they happen."""
Json = dict[str, Any]


class Finding(NamedTuple):
    """Something out of line. kind: "step", "host", "run", "preemptions", "first token" or "tier". line: what, for a
    person. time: Unix seconds. facts: numbers of the moment. events: bars for Chrome's and Perfetto's viewers."""

    kind: str
    line: str
    time: float
    facts: Json
    events: list[Json]


@dataclass(slots=True)
class _Pace:
    """The steps of one shape: seconds over what was expected, and the last RUN of these as a quick mean."""

    bound: Bound = field(default_factory=Bound)
    quick: float = 0.0

    def learn(self, ratio: float) -> None:
        """Move the quick mean. One slow step is no run, so a ratio counts as at most the bound's limit."""
        count, limit = self.bound.count, self.bound.limit
        learned = ratio if ratio < limit else limit
        self.quick += (learned - self.quick) / (count if count < RUN // 4 else RUN // 4)

    @property
    def slow(self) -> bool:
        return self.bound.count > 4 * RUN and self.quick > RUN_FACTOR * self.bound.mean


_Seen = tuple[_Pace, TracedStep, float | None]
"""A step with the pace of its shape and its predicted seconds."""


@dataclass(slots=True)
class Watch:
    """Looks at every step that was read. Bounds come from what was measured before, by the step's shape.

    A shape with a prediction is judged by the ratio to it, any other by its own seconds. Runs need a prediction,
    because steps get longer with their sequences. One thread uses it. A finding costs a look at the ring of `trace`.
    clock, device: read now and then, and at a finding. The engine of a CUDA device takes no memory once steps run;
    so memory that goes later is another program's.
    """

    trace: StepTrace
    clock: DeviceClock | None = None
    device: Device | None = None
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=FINDINGS_KEPT))
    num_findings: int = 0
    quiet_s: float = QUIET_S
    _seen: list[_Seen] = field(default_factory=list)
    """Steps from which the bounds have not learned yet."""
    _paces: dict[str, _Pace] = field(default_factory=dict)
    _host: Bound = field(default_factory=Bound)  # nanoseconds
    _noted: tuple[int, ...] = ()
    _preemptions: deque[int] = field(default_factory=lambda: deque(maxlen=PREEMPTIONS))
    """The steps of the last preemptions."""
    _preempted: int = 0
    _steps: int = 0
    _quiet: dict[str, float] = field(default_factory=dict)
    _usual_mhz: float = 0.0
    _most_free: int = 0
    """The most free bytes of device memory that were read."""
    _next_reading: int = 0

    @property
    def facts(self) -> Json:
        """Numbers of the loop: waiting, running, preemptions."""
        return dict(zip(("waiting", "running", "preemptions"), self._noted, strict=False))

    def note(self, *, waiting: int, running: int, preemptions: int) -> None:
        """The loop's numbers after a turn; preemptions: since the start."""
        self._noted = (waiting, running, preemptions)

    def step(self, seconds: float | None, predicted_s: float | None) -> None:
        """The step that `trace` has just read: its device time, and the prediction if there is one. A step whose launch
        was not `timed` waited for the host, and is not judged."""
        traced = self.trace.steps[-1]
        if seconds is None or not traced.timed:
            return
        pace = self._paces.get(traced.bucket)
        if pace is None:
            pace = self._paces[traced.bucket] = _Pace()
        slow = seconds / (predicted_s or 1.0) > pace.bound.limit
        slow_host = traced.host_ns > self._host.limit
        self._seen.append((pace, traced, predicted_s))
        if slow:
            self._slow_step(traced, predicted_s, pace.bound.mean * (predicted_s or 1.0))
        if slow_host:
            self._slow_host(traced, predicted_s, self._host.mean / 1e9)
        if slow or slow_host or len(self._seen) == AT_ONCE:
            self._learn()
        self._steps += 1
        if self._noted and self._noted[2] != self._preempted:
            self._storm(*self._noted)

    def _learn(self) -> None:
        """Move the bounds by the steps seen, and look for a run of slow ones."""
        seen, self._seen = self._seen, []
        runs = {}
        for pace, step, predicted_s in seen:
            ratio = step.seconds / (predicted_s or 1.0)
            pace.bound.take(ratio)
            pace.learn(ratio)
            self._host.take(step.host_ns)
            if predicted_s is not None and pace.slow:
                runs[step.bucket] = (pace, step, predicted_s)
        for run in runs.values():
            self._slow_run(*run)
        last = seen[-1][1].read_ns
        if last < self._next_reading:
            return
        self._next_reading = last + round(CLOCK_S * 1e9)
        if self.clock is not None:
            mhz = self.clock.read().mhz
            self._usual_mhz += (mhz - self._usual_mhz) / (8 if self._usual_mhz else 1)
        self._free_bytes()

    def _slow_step(self, step: TracedStep, predicted_s: float | None, usual_s: float) -> None:
        if step.seconds - usual_s > FLOOR_S and self._due("step"):
            what = f"step {step.index} ({step.bucket}) took {_ms(step.seconds)} on the device where"
            meant = f"{_ms(predicted_s)} are predicted" if predicted_s else f"{_ms(usual_s)} are usual"
            cause = self._cause(step, step.seconds - usual_s)
            self.find("step", f"{what} {meant}: {cause}", **_facts(step, predicted_s))

    def _slow_host(self, step: TracedStep, predicted_s: float | None, usual_s: float) -> None:
        host_s = step.host_ns / 1e9
        if host_s - usual_s > max(HOST_FLOOR_S, step.seconds) and self._due("host"):
            cpu_s = self.trace.cpu_s()
            what = f"step {step.index} ({step.bucket}) took {_ms(host_s)} on the host where {_ms(usual_s)} are usual"
            cause = self._cause(step, host_s - usual_s)
            if cpu_s < host_s / 2:
                cause += f"; the thread had a CPU for at most {_ms(cpu_s)} of it"
            self.find("host", f"{what}: {cause}", **_facts(step, predicted_s))

    def _slow_run(self, pace: _Pace, step: TracedStep, predicted_s: float) -> None:
        if self._due("run"):
            mean = pace.bound.mean
            what = f"the last steps ({step.bucket}) took {pace.quick / mean:.1f} x what such steps did before"
            cause = self._cause(step, (pace.quick - mean) * predicted_s, RUN)
            self.find("run", f"{what}: {cause}", **_facts(step, predicted_s))
        pace.bound.mean = pace.quick  # the new pace counts from now on

    def _storm(self, waiting: int, running: int, preemptions: int) -> None:
        """Note preemptions since the last step. Say when the pool preempts again and again."""
        self._preemptions.extend([self._steps] * (preemptions - self._preempted))
        self._preempted = preemptions
        first = self._preemptions[0]
        if len(self._preemptions) == PREEMPTIONS and self._steps - first < STORM:
            text = f"preemption storm: {PREEMPTIONS} preemptions in {self._steps - first + 1} steps"
            self.find(
                "preemptions", f"{text}; too small a cache for {running} rows, and {waiting} requests wait"
            )

    def find(self, kind: str, line: str, **facts: Any) -> None:
        """Keep a finding, unless there was one of its kind within quiet_s."""
        if not self._due(kind):
            return
        self._quiet[kind] = time.monotonic() + self.quiet_s
        self.num_findings += 1
        with self.trace.looking():
            line += self._read_clock(facts) + self._read_memory(facts)
            log.warning("slow: %s", line)
            events = self.trace.recent(STEPS_SHOWN)[:EVENTS_SHOWN]
        self.findings.append(Finding(kind, line, time.time(), {**self.facts, **facts}, events))

    def _due(self, kind: str) -> bool:
        """Whether a finding of this kind would be kept now. To look for its cause is work, so this is asked first."""
        return time.monotonic() >= self._quiet.get(kind, 0.0)

    def _read_clock(self, facts: Json) -> str:
        """Put the clock into the facts. Returns what is to be said of it; "" where it is as usual."""
        if self.clock is None:
            return ""
        reading = self.clock.read()
        facts |= {"mhz": reading.mhz, "most_mhz": reading.most_mhz, "clock_reasons": list(reading.reasons)}
        if reading.mhz >= SLOW_CLOCK * self._usual_mhz:
            return ""
        why = f" ({', '.join(reading.reasons)})" if reading.reasons else ""
        return f"; clock {reading.mhz:,} MHz where {self._usual_mhz:,.0f} are usual{why}"

    def _read_memory(self, facts: Json) -> str:
        """Put the free memory into the facts. Returns what is to be said of other programs; "" where none has come."""
        if (free := self._free_bytes()) is None:
            return ""
        facts["free_bytes"] = free
        taken = self._most_free - free
        if taken <= TAKEN_BYTES:
            return ""
        return f"; another program took {format_bytes(taken)} of this GPU's memory"

    def _free_bytes(self) -> int | None:
        """Free bytes of the device; None where it is no GPU."""
        if self.device is None or self.device.kind != "cuda":
            return None
        free = self.device.free_memory
        self._most_free = max(self._most_free, free)
        return free

    def as_json(self) -> str:
        """All findings, the newest last: an object with `traces`, each of which a trace viewer opens."""
        traces = [
            {"kind": f.kind, "line": f.line, "time": f.time, "otherData": f.facts, "traceEvents": f.events}
            for f in self.findings
        ]
        return json.dumps({"found": self.num_findings, "traces": traces})

    def _cause(self, step: TracedStep, more_s: float, steps: int = 1) -> str:
        """The op, kernel or host phase whose time is most above the usual one. more_s: what the step took more, of
        which the cause has at least the part CAUSE. steps: the last steps that are looked at."""
        alike = [one for one in self.trace.steps if one.bucket == step.bucket] or [step]
        late, usual = alike[-steps:][-COMPARED:], alike[:-steps][-COMPARED:]
        looked_at = [*usual, *late]
        with self.trace.looking():
            found = self.trace.times(looked_at)
        times = dict(zip([one.index for one in looked_at], found, strict=True))
        took, before = {}, {}
        for name in {name for one in late for name in times[one.index]}:
            took[name] = statistics.fmean(times[one.index].get(name, 0.0) for one in late)
            before[name] = statistics.median([times[one.index].get(name, 0.0) for one in usual] or [0.0])
        name = max(took, key=lambda name: took[name] - before[name], default="")
        if not name or took[name] - before[name] < CAUSE * more_s:
            return "nothing that is traced; run with --trace to see kernels"
        kernels = [one for one in took if one.startswith("kernel ")]
        others = [sum(seconds[one] for one in kernels if one != name) for seconds in (took, before)]
        if name in kernels and _times(*others) > 1 + ALL * (_times(took[name], before[name]) - 1):
            sums = [sum(seconds[one] for one in kernels) for seconds in (took, before)]
            return f"all kernels {_text(*sums)}; a slow clock or another program on this GPU does this"
        return f"{name} {_text(took[name], before[name])}"


def _times(took: float, before: float) -> float:
    return took / before if before else math.inf if took else 1.0


def _text(took: float, before: float) -> str:
    times = f"{took / before:.1f} x" if before else "new"
    return f"{times} ({_ms(took)} where {_ms(before)} are usual)"


def _facts(step: TracedStep, predicted_s: float | None) -> Json:
    batch = {name: value for name, value in step.facts.items() if name != "timed"}
    return {**batch, "device_s": step.seconds, "predicted_s": predicted_s}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class NoWatch(Watch):
    """The watch of a runner whose steps nobody looks at."""

    def __init__(self) -> None:
        super().__init__(NoTrace())

    def step(self, seconds: float | None, predicted_s: float | None) -> None:
        """See Watch."""
