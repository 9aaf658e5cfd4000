"""An engine on a GPU, driven by hand, with the times of its tokens; for benchmarks of tiers and of peers."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openinfer.cli import recipes
from openinfer.cli.bench.record import percentile
from openinfer.frontend import heap
from openinfer.kvpool.tiers.moves import Loading
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session

LONG, SHORT, FRESH = 16_384, 300, 1_024
"""Tokens of prompts."""
FIRST_ID, LAST_ID = 256, 30_000

Json = dict[str, Any]


class Driven:
    """An engine, and the times of its tokens by request. loads: the loads that have ended."""

    def __init__(self, model_dir: Path, **flags: Any) -> None:
        common: Json = {
            "device": "cuda", "load_format": "dummy", "max_model_len": 20_480, "max_num_seqs": 64,
        }  # fmt: skip
        began = time.monotonic()
        with heap.starting():  # as in a process of an engine
            self.engine = build(recipes.find(model_dir), model_dir, **{**common, **flags}).engine
        self.session = Session(self.engine)
        self.start_s = time.monotonic() - began
        self.times: dict[int, list[float]] = {}
        self.ended: dict[int, float] = {}
        self.tiers: Any = self.engine._tiers
        self.page_bytes = self.engine.pool.groups[0].block_bytes
        self._rng = random.Random(7)
        self.stalls: list[float] = []

    def prompt(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

    def submit(self, prompt: Sequence[int], tokens: int, **more: Any) -> int:
        number = self.session.submit(prompt, tokens, ignore_eos=True, **more)
        self.times[number] = [time.perf_counter()]
        return number

    def step(self, wait_s: float = 0.0005) -> None:
        began = time.perf_counter()
        outputs = self.session.step(wait_s)
        now = time.perf_counter()
        self.stalls.append(now - began)
        for number in outputs.request_ids:
            self.times[number].append(now)
        for update in outputs.updates:
            if self.session.outcomes[update.id].terminals:
                self.ended[update.id] = now

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        stop = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > stop:
                raise TimeoutError(f"nothing after {limit_s:g} s")
            self.step()

    def run(self, prompt: Sequence[int], tokens: int = 1, **more: Any) -> int:
        number = self.submit(prompt, tokens, **more)
        self.until(lambda: number in self.ended)
        return number

    def ttft_ms(self, number: int) -> float:
        return 1e3 * (self.times[number][1] - self.times[number][0])

    def cached(self, number: int) -> int:
        return self.session.outcomes[number].cached

    def wait_for_memory(self) -> float:
        """Seconds until all host memory is locked."""
        began = time.monotonic()
        while self.tiers is not None and self.tiers._host._thread.is_alive():
            time.sleep(0.02)
        return time.monotonic() - began

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.keep = lambda pool: None  # the end of an engine writes for two seconds
        self.engine.close()


@contextlib.contextmanager
def driven(model_dir: Path, **flags: Any) -> Iterator[Driven]:
    made = Driven(model_dir, **flags)
    try:
        yield made
    finally:
        made.close()
        del made
        gc.collect()


@contextlib.contextmanager
def loads_seen() -> Iterator[list[Any]]:
    """The times of loads, as they end."""
    seen: list[Any] = []
    before = Loading.time

    def time_of(loading: Any, now: float) -> Any:
        seen.append(before(loading, now))
        return seen[-1]

    Loading.time = time_of  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Loading.time = before  # type: ignore[method-assign]


def loaded(one: Driven, numbers: Sequence[int], seen: Sequence[Any]) -> Json:
    return {
        "ttft_ms": [one.ttft_ms(number) for number in numbers],
        "cached": [one.cached(number) for number in numbers],
        "load_ms": [1e3 * load.seconds for load in seen],
        "load_gb_per_s": [load.blocks * one.page_bytes / load.seconds / 1e9 for load in seen],
        "from_disk": sum(load.from_disk for load in seen),
        "failed": sum(load.failed for load in seen),
    }


def spread(values: Sequence[float]) -> Json:
    return {
        name: round(percentile(list(values), p), 3) for name, p in (("p50", 50), ("p99", 99), ("max", 100))
    }
