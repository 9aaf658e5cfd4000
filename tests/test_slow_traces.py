"""The drill of what is slow: each trouble is injected into a CPU engine, and the line of its trace names it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.contract import TERMINALS, Request, SlowTraces
from openinfer.kernels import linear_add
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams
from openinfer.scheduler import FirstCome

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
SLOW_S = 0.15
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Throttled(FirstCome):
    """First come, first served, in a thread that gets no CPU for a while after `throttle` is set."""

    throttle = False

    def plan(self, view: Any) -> Any:
        if Throttled.throttle:
            Throttled.throttle = False
            time.sleep(SLOW_S)
        return super().plan(view)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = build(
        RECIPE, TINY, device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        kv_cache_memory_bytes=8_000_000, scheduling_policy=Throttled(64), enable_prefix_caching=False,
    ).engine  # fmt: skip
    assert made.runner.watch is not None
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


def test_a_slow_op_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(engine, output=100)
    run(engine, 60)
    assert not [line for line in found(engine) if "op linear_add" in line]
    inner, calls = linear_add.reference, itertools.count()

    def slow(**arrays: Any) -> None:
        if next(calls) == 0:
            time.sleep(SLOW_S)
        inner(**arrays)

    monkeypatch.setattr(linear_add, "reference", slow)
    run(engine)
    (line,) = [line for line in found(engine) if "op linear_add " in line]
    assert " x (" in line


def test_a_host_thread_without_cpu_is_named(engine: Engine) -> None:
    for _ in range(5):
        submit(engine, output=30)
        run(engine)
    submit(engine, output=30)
    run(engine, 10)
    Throttled.throttle = True
    submit(engine, output=30)  # the policy is asked
    run(engine)
    (line,) = [line for line in found(engine) if "host phase plan " in line]
    assert "on the host" in line


def test_a_storm_of_preemptions_is_named() -> None:
    engine = build(
        RECIPE, TINY, device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200,
        kv_cache_memory_bytes=2_600_000, scheduling_policy=FirstCome(64), enable_prefix_caching=False,
    ).engine  # fmt: skip
    for _ in range(24):
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
    submit(engine, output=2, waited_s=3.0)
    run(engine)
    (line,) = [line for line in found(engine) if "first token" in line]
    assert "are usual for 8 tokens" in line
    assert "without a row" in line
