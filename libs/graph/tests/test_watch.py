from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import pytest

from openinfer.graph import SlowLoads, StepTrace, Watch
from openinfer.graph.watch import FINDINGS_KEPT, WARM, Bound
from openinfer.tensor import ClockReading, Device
from openinfer.tensor.testing import fake_driver


class Clock:
    """perf_counter_ns that moves only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.ns)

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(
    watch: Watch, clock: Clock, index: int, device_s: float = 0.004, *, predicted_s: float | None = 0.004,
    plan_s: float = 1e-4, ops: dict[str, float] | None = None, bucket: str = "decode, 8 rows",
) -> None:  # fmt: skip
    """One step: the host plans and launches, then waits for the device."""
    trace = watch.trace
    trace.mark("plan")
    clock.pass_s(plan_s)
    trace.launch(index, bucket=bucket, timed=True)
    trace.mark("launch")
    for name, seconds in (ops or {}).items():
        start = clock.ns
        clock.pass_s(seconds)
        trace.op(name, start, clock.ns)
    trace.mark("read back")
    clock.pass_s(device_s)
    trace.mark("reconcile")
    trace.result(device_s)
    watch.step(device_s, predicted_s)
    trace.mark("")


def calm(watch: Watch, clock: Clock, steps: int = 100, **given: float) -> None:
    rng = random.Random(0)
    for index in range(steps):
        run(watch, clock, index, 0.004 * rng.lognormvariate(0, 0.05), plan_s=rng.expovariate(1e4), **given)
    assert watch.num_findings == 0


def test_an_hour_without_trouble_has_no_finding(clock: Clock) -> None:
    watch, rng = Watch(StepTrace()), random.Random(1)
    for index in range(20_000):
        hiccup = 3e-3 if rng.random() < 1e-3 else 0.0  # a thread has its turn
        shape, expected = rng.choice([("decode, 8 rows", 0.004), ("1024 tokens, 8 rows", 0.016)])
        seconds = expected * rng.lognormvariate(0, 0.08) + hiccup
        run(watch, clock, index, seconds, predicted_s=expected, plan_s=rng.expovariate(1e4), bucket=shape)
    assert watch.num_findings == 0


def test_a_slow_step_is_one_finding_with_its_trace(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    run(watch, clock, 100, 0.02)
    (found,) = watch.findings
    assert found.kind == "step"
    assert found.line.startswith(
        "step 100 (decode, 8 rows) took 20 ms on the device where 4 ms are predicted:"
    )
    assert {event["name"] for event in found.events} >= {"plan", "launch", "step 100", "step 99"}
    (trace,) = json.loads(watch.as_json())["traces"]
    assert trace["line"] == found.line
    run(watch, clock, 101, 0.02)
    assert watch.num_findings == 1  # not one more for the same trouble


def test_the_op_or_the_phase_that_took_the_time_is_named(clock: Clock) -> None:
    usual = {"attend": 0.002, "norm_linear": 0.001}
    watch = Watch(StepTrace())
    for index in range(50):
        run(watch, clock, index, 0.003, predicted_s=None, ops=usual)
    run(watch, clock, 50, 0.03, predicted_s=None, ops={**usual, "norm_linear": 0.028})
    (found,) = watch.findings
    assert "where 3 ms are usual: op norm_linear 28.0 x (28 ms where 1 ms are usual)" in found.line
    watch = Watch(StepTrace())
    calm(watch, clock)
    run(watch, clock, 100, plan_s=0.05)
    (found,) = watch.findings
    assert found.kind == "host"
    assert ": host phase plan " in found.line


@pytest.mark.parametrize(
    ("late", "line"),
    [
        (
            (6e-3, 2e-3, 3e-5),
            "all kernels 2.7 x (8.03 ms where 3.01 ms are usual); a slow clock or another program",
        ),
        ((18e-3, 1e-3, 1e-5), "kernel gemv 9.0 x (18 ms where 2 ms are usual)"),
    ],
)
def test_a_neighbour_slows_all_kernels_and_none_is_named(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, late: tuple[float, ...], line: str
) -> None:
    names = ("kernel gemv", "kernel attend", "kernel scan")
    usual, slow = dict(zip(names, (2e-3, 1e-3, 1e-5), strict=True)), dict(zip(names, late, strict=True))
    watch = Watch(StepTrace())
    calm(watch, clock)
    monkeypatch.setattr(StepTrace, "times", lambda self, steps: [usual] * (len(steps) - 1) + [slow])
    run(watch, clock, 100, 0.02)
    assert f": {line}" in watch.findings[-1].line


def test_a_finding_that_would_not_be_kept_is_not_looked_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    run(watch, clock, 100, 0.02)
    monkeypatch.setattr(StepTrace, "times", lambda self, steps: 1 / 0)
    run(watch, clock, 101, 0.02)
    assert watch.num_findings == 1


def test_turns_that_wait_for_something_to_run_are_no_work(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    for _ in range(100):  # a grammar is compiled, or blocks are on their way
        watch.trace.mark("plan")
        clock.pass_s(0.01)
        watch.trace.mark("outputs")
        watch.trace.mark("")
        clock.pass_s(0.01)
    run(watch, clock, 100)
    assert watch.num_findings == 0


def test_a_look_while_no_step_is_under_way_is_no_time_that_the_host_saved(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    with watch.trace.looking():
        clock.pass_s(0.05)
    run(watch, clock, 100, plan_s=0.003)
    assert watch.trace.steps[-1].host_ns == pytest.approx(3e6)


def test_a_run_of_steps_that_are_all_a_little_slower_is_found_once(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock, 1000)
    for index in range(1000, 1400):
        run(watch, clock, index, 0.0064)
    (found,) = watch.findings
    assert found.kind == "run"
    assert "x what such steps did before" in found.line


def test_a_storm_of_preemptions_is_named(clock: Clock) -> None:
    watch = Watch(StepTrace())
    for index in range(100):
        watch.note(waiting=7, running=3, preemptions=index // 40)
        run(watch, clock, index)
    assert watch.num_findings == 0
    for index in range(100, 130):
        watch.note(waiting=7, running=3, preemptions=index)
        run(watch, clock, index)
    (found,) = watch.findings
    assert "preemption storm" in found.line
    assert "7 requests wait" in found.line
    assert found.facts["preemptions"] > 8


def test_the_ring_and_the_traces_in_it_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(StepTrace())
    calm(watch, clock)
    for index in range(100, 200):
        now += 100
        watch.find("step", f"number {index}")
    assert len(watch.findings) == FINDINGS_KEPT
    assert watch.num_findings == 100
    assert watch.findings[-1].line == "number 199"
    assert len(watch.as_json()) < 400_000


def test_steps_that_waited_for_the_host_are_not_judged(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    watch.trace.launch(100, bucket="decode, 8 rows", timed=False)
    watch.trace.result(1.0)
    watch.step(1.0, None)
    assert watch.num_findings == 0


def test_a_bound_learns_a_new_level_and_forgives_a_single_value() -> None:
    bound = Bound()
    assert not any(bound.take(1.0 + 0.01 * (n % 3)) for n in range(WARM))
    assert bound.take(50.0)
    assert bound.mean < 1.2
    assert not bound.take(1.0)
    late = [bound.take(5.0) for _ in range(2000)]
    assert late[0]
    assert not late[-1]


def test_a_step_costs_little() -> None:
    watch = Watch(StepTrace())
    trace = watch.trace

    def turn(index: int) -> None:
        for phase in ("plan", "write rows", "upload"):
            trace.mark(phase)
        trace.launch(index, bucket="decode, 8 rows", timed=True)
        for phase in ("launch", "read back", "reconcile"):
            trace.mark(phase)
        trace.result(0.004)
        watch.step(0.004, 0.004)
        trace.mark("outputs")
        trace.mark("")

    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for index in range(200):
        turn(index)
    sys.setprofile(count)
    for index in range(200, 400):
        turn(index)
    sys.setprofile(None)
    assert calls / 200 < 150  # starts and ends of functions: some 10 us of a step of 2.7 ms and more


class FakeClock:
    """A device's clock that a test sets."""

    mhz, reasons = 1980, ()
    readings = 0

    def read(self) -> ClockReading:
        self.readings += 1
        return ClockReading(self.mhz, 1980, self.reasons)


def test_a_clock_that_is_down_is_named(clock: Clock) -> None:
    device: Any = FakeClock()
    watch = Watch(StepTrace(), device)
    calm(watch, clock, 4000)
    assert 2 <= device.readings <= 5  # one in five seconds
    device.mhz, device.reasons = 1200, ("power cap",)
    for index in range(4000, 4200):
        run(watch, clock, index, 0.004 * 1980 / 1200)
    (found,) = watch.findings
    assert found.kind == "run"
    what, cause = found.line.split(": ")
    assert what == "the last steps (decode, 8 rows) took 1.4 x what such steps did before"
    assert cause.startswith("nothing that is traced; run with --trace to see kernels; ")
    assert cause.endswith("clock 1,200 MHz where 1,980 are usual (power cap)")
    assert found.facts["mhz"] == 1200
    watch = Watch(StepTrace(), device)
    calm(watch, clock)
    run(watch, clock, 100, 0.02)
    assert "clock" not in watch.findings[0].line  # it is always so


def test_a_program_that_comes_to_the_gpu_is_named(clock: Clock) -> None:
    with fake_driver() as driver:
        driver.total_memory = 80 << 30
        watch = Watch(StepTrace(), device=Device("cuda", 0), quiet_s=0.0)
        calm(watch, clock)
        run(watch, clock, 100, 0.02)
        driver.total_memory -= 9_000_000_000  # the other program's
        run(watch, clock, 101, 0.02)
        alone, beside = watch.findings
    assert "another program took" not in alone.line
    assert beside.line.endswith("; another program took 9 GB of this GPU's memory")
    assert [found.facts["free_bytes"] for found in watch.findings] == [80 << 30, (80 << 30) - 9_000_000_000]


def test_a_thread_without_a_cpu_is_told_from_one_that_works(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_ns = 0
    monkeypatch.setattr(time, "thread_time_ns", lambda: cpu_ns)
    for had in (True, False):
        watch = Watch(StepTrace())
        calm(watch, clock)
        cpu_ns += 50_000_000 * had
        run(watch, clock, 100, plan_s=0.05)
        (found,) = watch.findings
        assert found.kind == "host"
        assert ("; the thread had a CPU for at most 0 ms of it" in found.line) != had


def test_a_finding_has_the_numbers_of_its_step(clock: Clock) -> None:
    watch = Watch(StepTrace())
    calm(watch, clock)
    watch.note(waiting=3, running=8, preemptions=0)
    run(watch, clock, 100, 0.02)
    facts = watch.findings[0].facts
    assert (facts["bucket"], facts["device_s"], facts["predicted_s"]) == ("decode, 8 rows", 0.02, 0.004)
    assert (facts["waiting"], facts["running"]) == (3, 8)


class Load(NamedTuple):
    seconds: float
    blocks: int = 8
    from_disk: int = 8
    from_peer: int = 0
    failed: int = 0


def test_a_slow_load_names_its_tier() -> None:
    watch, rng = Watch(StepTrace()), random.Random(2)
    watch.quiet_s = 0.0
    loads: Any = SlowLoads(watch, deque())
    for _ in range(300):
        loads.times.append(Load(0.01 * rng.lognormvariate(0, 0.3)))
        loads.times.append(Load(0.001 * rng.lognormvariate(0, 0.3), from_disk=0))
        loads.look()
    assert watch.num_findings == 0
    for slow in (Load(0.4), Load(0.3, from_disk=0), Load(5.0, failed=2)):
        loads.times.append(slow)
        loads.look()
    disk, host, late = (found.line for found in watch.findings)
    assert disk.startswith("tier: a load of 8 blocks took 400 ms where 1")
    assert disk.endswith(", 8 of its blocks from the disk")
    assert host.endswith(", all from host memory")
    assert late.endswith("; 2 did not come and are computed")
