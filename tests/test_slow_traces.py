"""The drill of what is slow: each trouble is injected into a CPU engine, and the line of its trace names it."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import recipe_flags
from openinfer.cli.bench.serve import OfferedLoad
from openinfer.cli.plan.load import PlannedServer, StepCost, requests
from openinfer.frontend.contract import TERMINALS, Request, SlowTraces
from openinfer.graph import StepTrace, Watch
from openinfer.graph.runner import FirstTokens
from openinfer.kernels import GPUS, H200, linear_add
from openinfer.kvpool.tiers.record import Files
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams
from openinfer.scheduler import FirstCome, Seq, StepLoop, Tokens
from openinfer.scheduler.sim import Record, SimRunner, StepWork

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
SLOW_S = 0.15
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class ThreadClock:
    """A clock of the thread's CPU time and of pauses, because other work on the machine must not slow steps down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._paused_ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", self.now_ns)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_ns() / 1e9)

    def now_ns(self) -> int:
        return time.thread_time_ns() + self._paused_ns

    def pause(self) -> None:
        """The thread gets no CPU for SLOW_S."""
        self._paused_ns += round(SLOW_S * 1e9)


@pytest.fixture
def thread_clock(monkeypatch: pytest.MonkeyPatch) -> ThreadClock:
    return ThreadClock(monkeypatch)


class Throttled(FirstCome):
    """First come, first served. The next plan after `throttle` is set begins with it."""

    throttle: Callable[[], None] | None = None

    def plan(self, view: Any) -> Any:
        if Throttled.throttle is not None:
            throttle, Throttled.throttle = Throttled.throttle, None
            throttle()
        return super().plan(view)


@pytest.fixture
def engine(thread_clock: ThreadClock) -> Iterator[Engine]:
    made = build(
        RECIPE, TINY, device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        kv_cache_memory_bytes=8_000_000, scheduling_policy=Throttled(64), enable_prefix_caching=False,
    ).engine  # fmt: skip
    made.runner.watch.quiet_s = 0.0
    yield made
    made.close()


IDS = itertools.count(1)


def submit(engine: Engine, prompt: int = 8, output: int = 40, waited_s: float = 0.0) -> None:
    engine.submit(
        Request(
            id=next(IDS), prompt_token_ids=[7 + n for n in range(prompt)], sampling=GREEDY, max_tokens=output,
            arrival=time.monotonic() - waited_s,
        )
    )  # fmt: skip


def run(engine: Engine, steps: int | None = None) -> None:
    """So many steps, or until all requests have ended."""
    for _ in range(steps or 10_000):
        outputs = engine.step(0.01)
        ended = any(isinstance(one, TERMINALS) for one in outputs.updates)
        if steps is None and ended and not engine.stats().running + engine.stats().waiting:
            return


def found(engine: Engine) -> list[str]:
    """The lines. A machine that is busy with other work may add some of its own."""
    answer = engine.control(SlowTraces())
    assert answer is not None
    return [trace["line"] for trace in json.loads(answer)["traces"]]


def test_a_slow_op_is_named(
    engine: Engine, thread_clock: ThreadClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, armed = linear_add.reference, list[bool]()

    def slow(*args: Any, **communicator: Any) -> None:
        if armed:
            armed.clear()
            thread_clock.pause()
        inner(*args, **communicator)

    monkeypatch.setattr(linear_add, "reference", slow)  # before the first step, which keeps what it calls
    submit(engine, output=100)
    run(engine, 60)
    assert not [line for line in found(engine) if "op linear_add" in line]
    armed.append(True)
    run(engine)
    line, *_ = [line for line in found(engine) if "op linear_add " in line]  # a busy machine may add others
    assert " x (" in line


def test_a_host_thread_without_cpu_is_named(engine: Engine, thread_clock: ThreadClock) -> None:
    for _ in range(5):
        submit(engine, output=30)
        run(engine)
    submit(engine, output=30)
    run(engine, 10)
    Throttled.throttle = thread_clock.pause
    submit(engine, output=30)  # the policy is asked
    run(engine)
    (line,) = [line for line in found(engine) if "host phase plan " in line]
    assert "on the host" in line
    assert "; the thread had a CPU for " in line


def test_a_storm_of_preemptions_is_named() -> None:
    engine = build(
        RECIPE, TINY, device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200,
        kv_cache_memory_bytes=1_300_000, scheduling_policy=FirstCome(64), enable_prefix_caching=False,
    ).engine  # fmt: skip
    for _ in range(12):
        submit(engine, output=150)
    run(engine)
    preemptions = engine.stats().preemptions
    lines = found(engine)
    engine.close()
    assert preemptions >= 8
    assert [line for line in lines if "preemption storm" in line]


def test_a_late_first_token_is_named(engine: Engine) -> None:
    for _ in range(20):
        submit(engine, output=2)
        run(engine)
    assert not [line for line in found(engine) if "first token" in line]
    submit(engine, output=2, waited_s=60.0)  # longer than the test has run
    run(engine)
    (line,) = [line for line in found(engine) if "first token" in line]
    assert "are usual for 8 tokens" in line
    assert "without a row" in line


def test_a_slow_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(
        RECIPE, TINY, device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        kv_cache_memory_bytes=8_000_000, scheduling_policy=FirstCome(64), enable_prefix_caching=True,
        kv_offload_gb=0.05, kv_offload_dir=str(tmp_path), kv_offload_disk_gb=0.1,
    ).engine  # fmt: skip
    tiers, disk = engine._cache.tiers, engine._cache.tiers._disk if engine._cache.tiers is not None else None
    assert tiers is not None
    assert disk is not None
    until = time.monotonic() + 10
    while not tiers._host.has_room and time.monotonic() < until:
        engine.step(0.01)
    submit(engine, prompt=49, output=2)
    run(engine)

    def load_from_disk() -> None:
        """The prompt again, when only the disk has its blocks."""
        tiers.take_all(engine.pool)
        while tiers._saves or disk.num_writing:
            tiers.collect(0.01)
        tiers._host.clear()
        submit(engine, prompt=49, output=2)
        run(engine)

    for _ in range(20):
        load_from_disk()
    assert tiers.stats.from_disk == 60
    assert not [line for line in found(engine) if "tier" in line]
    inner = Files.read

    def slow(*args: Any) -> None:
        time.sleep(SLOW_S)
        inner(*args)

    monkeypatch.setattr(Files, "read", slow)
    load_from_disk()
    lines = [line for line in found(engine) if line.startswith("tier: a load of 3 blocks took ")]
    engine.close()
    assert len(lines) == 1
    assert lines[0].endswith(", 3 of its blocks from the disk")


# -- an hour without trouble --


@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=pytest.mark.slow)])
def test_a_calm_server_raises_no_alarm(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-4B at 16 requests/s in virtual time. Steps deviate from their predictions as recorded repeats do, and the
    host has its hiccups."""
    server, rng, now_ns = planned(), random.Random(0), 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    cost = StepCost(server.outline.steps, server.outline.buckets, server.figures)
    watch = Watch(StepTrace())
    trace, spread = watch.trace, spreads()
    steps = 0

    def timed(work: StepWork) -> float:
        """A step: the host plans, then waits for the device. The trace and the watch see it."""
        nonlocal now_ns, steps
        steps += 1
        expected = cost(work)
        took = expected * rng.choice(spread) + (3e-3 if rng.random() < 1e-4 else 0.0)
        shape = server.outline.buckets.choose(work.decode_rows + work.prefill_tokens, work.decode_rows + 1)
        trace.mark("plan")
        now_ns += round(1e9 * rng.expovariate(1e4))
        trace.launch(steps, bucket=str(shape), timed=True)
        trace.mark("read back")
        now_ns += round(1e9 * took)
        trace.mark("reconcile")
        trace.result(took)
        watch.step(took, expected)
        trace.mark("")
        return took

    runner: Any = SimRunner(timed)
    loop = StepLoop(
        runner, server.outline.cache(server.cache_bytes), server.policy(), max_rows=256,
        max_model_len=server.max_model_len, clock=lambda: runner.now,
    )  # fmt: skip
    first_tokens = FirstTokens(watch, lambda: runner.now)
    coming = deque(requests(OfferedLoad(16.0, 16 * seconds, 0, 1024, 128, 1)))
    ids = itertools.count(1)
    while coming or loop.has_work:
        while coming and coming[0].arrival <= runner.now:
            one = coming.popleft()
            prompt = list(one.prompt)
            record = Record(one, one.arrival)
            loop.submit(Seq(next(ids), prompt, one.max_tokens, arrival=one.arrival, owner=record))
        if not loop.has_work:
            runner.now = coming[0].arrival
            continue
        events = loop.step(coming[0].arrival - runner.now if coming else None)
        first_tokens.events(events, loop.stats)
        for event in events:
            if isinstance(event, Tokens):
                for _, seq in event.emitting():
                    seq.tokens.append(1)
    assert steps > 100 * seconds
    assert [found.line for found in watch.findings] == []


def planned() -> PlannedServer:
    _, asked = recipe_flags.parse(["qwen3-4B"], "plan", None, lambda parser: None, named=True)
    return PlannedServer(asked, H200, GPUS[H200.gpu], 1)


def spreads() -> list[float]:
    """How the repeats of a recorded decode step lie around their median."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "qwen3-4b" / "2026-11-21-h200-step.json"
    results = [one for one in json.loads(path.read_text())["results"] if one["point"].startswith("decode")]
    return [one / result["device_ms"] for result in results for one in result["repeats"]["device_ms"]]
