"""A recipe's engine over a device that does nothing: its loop, pool, batch state and read-back, under load."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from openinfer.cli import recipes
from openinfer.cli.idle import idle_engine
from openinfer.frontend.contract import Request
from openinfer.graph import StepGraphs
from openinfer.kernels import Op
from openinfer.recipes.engine import Recipe
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import RowStatus
from openinfer.tensor import Device, Stream

CPU = Device("cpu")
BLOCK = 10
PROMPT_LENS = range(64, 80)
"""Prompt lengths of one request after the other, so that a sixteenth of the rows gets a block in every step."""


def recipes_that_can() -> dict[str, Recipe[Any]]:
    """The installed recipes over our engine, by name."""
    return {recipe.name: recipe for recipe in recipes.installed() if isinstance(recipe, Recipe)}


class _Pack:
    """Runs no op."""

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        pass


class _Graphs(StepGraphs):
    """Step graphs that know every step, and do nothing at a launch."""

    def record(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        super().record(key, _nothing)


def _nothing() -> None:
    pass


class IdleEngine:
    """The engine of a recipe, in which a launched segment does nothing: a row's token is always the same, and it runs
    on until `end_first` ends the oldest. Driver calls, which a GPU adds, are not in its times."""

    def __init__(self, recipe: Recipe[Any], rows: int, device: Device = CPU) -> None:
        self._stream, self._rows, self._next = Stream(device), rows, 0
        graphs = _Graphs(device, self._stream, capture=False)
        self.engine = idle_engine(recipe, rows, self._stream, _Pack(), graphs)
        self._results = self.engine.runner.model.batch.sampled.result
        self._result = np.full((rows, 3), (7, RowStatus.RUNNING, 0), np.int32)
        self.end_first(False)

    def end_first(self, ends: bool) -> None:
        """Whether the first row of every step from now on ends in it."""
        self._result[0, 1] = RowStatus.LENGTH if ends else RowStatus.RUNNING
        self._results.copy_from(self._result, self._stream)

    def submit(self, count: int) -> None:
        """Queue requests that would run for 4,000 tokens."""
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for _ in range(count):
            self._next += 1
            self.engine.submit(
                Request(
                    id=self._next,
                    prompt_token_ids=[self._next % 1000] * PROMPT_LENS[self._next % len(PROMPT_LENS)],
                    sampling=params,
                    max_tokens=4000,
                    arrival=0.0,
                )
            )

    def fill(self) -> None:
        """Run until every row decodes."""
        while len(self.engine.step(1.0).request_ids) < self._rows:
            pass

    def steps_us(self, count: int) -> list[float]:
        """Microseconds of steps in which no sequence joins or leaves."""
        return [self._step_us() for _ in range(count)]

    def watch_us(self, count: int) -> list[float]:
        """Microseconds that the trace and the watch add to a step, by turns of BLOCK steps with and without them."""
        runner, found = self.engine.runner, []
        kept = runner.trace, runner.watch
        for _ in range(count // BLOCK):
            runner.trace = runner.watch = None
            without = statistics.median(self.steps_us(BLOCK))
            runner.trace, runner.watch = kept
            found.append(statistics.median(self.steps_us(BLOCK)) - without)
        return found

    def changes_us(self, count: int) -> list[float]:
        """Microseconds of turns of two steps, in which the oldest sequence leaves and a waiting one joins.

        The sequence that left is submitted again, outside the time."""
        times = []
        for _ in range(count):
            self.end_first(True)
            first = self._step_us()
            self.end_first(False)
            times.append(first + self._step_us())
            self.submit(1)
        return times

    def close(self) -> None:
        """End all requests and let go of what they hold."""
        for request_id in range(1, self._next + 1):
            self.engine.abort(request_id)
        while self.engine.stats().running or self.engine.step(1.0).updates:
            pass
        self.engine.close()

    def _step_us(self) -> float:
        start = time.perf_counter_ns()
        self.engine.step(1.0)
        return (time.perf_counter_ns() - start) / 1e3


def measure(
    recipe: Recipe[Any], rows: int, *, steps: int = 2000, changes: int = 200, waiting: int = 1000
) -> dict[str, list[float]]:
    """Microseconds of every step at a batch of `rows`: "steady" ones, and "change" turns while `waiting` queue, and
    "watch", the time that trace and watch add to a steady step."""
    idle = IdleEngine(recipe, rows)
    idle.submit(rows)
    idle.fill()
    gc.collect()
    gc.disable()
    try:
        steady = idle.steps_us(steps)
        watch = idle.watch_us(steps // 4)  # a request has at most 4,000 steps
        idle.submit(waiting)
        idle.changes_us(2)
        return {"steady": steady, "watch": watch, "change": idle.changes_us(changes)}
    finally:
        gc.enable()
        idle.close()
