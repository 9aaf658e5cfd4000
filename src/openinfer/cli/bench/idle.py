"""A recipe's engine over a device that does nothing: its loop, pool, batch state and read-back, under load."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from openinfer.cli import recipes
from openinfer.frontend.contract import Request
from openinfer.graph import Delta, NoWatch, Readback, StepGraphs, StepPace, StepTrace, Watch
from openinfer.graph.runner import Leader, LoneLeader, Ring, Runner, WeightsDesk, Writer, readback_bytes
from openinfer.kernels import Op
from openinfer.kernels.authoring import CacheForm
from openinfer.kvpool import Pool
from openinfer.recipes.engine.engine import Engine, Served
from openinfer.recipes.engine.followers import NoFollowers
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.offload import Cache
from openinfer.recipes.engine.options import O
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.recipes.engine.startup import STEPS_IN_FLIGHT, buckets_for
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import RowStatus
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

LENGTH, TOKENS = 8192, 2048


def _idle_engine(recipe: Recipe[O], rows: int, stream: Stream) -> Engine:
    """An engine of the recipe's smallest model, without prefix cache. The pool has blocks for half of all rows at full
    length, and for one row at least."""
    options = recipe.options(max_num_seqs=rows, enable_prefix_caching=False)
    blueprint: Any = recipe.blueprint(Source(recipe.small), options)
    limits = Limits(LENGTH, rows, TOKENS, blueprint.page_size, float32, CacheForm(float32))
    groups = len(blueprint.groups(limits))
    null = Arena(Device("null"), None)
    blueprint.lay_out(null, Stream(null.device), limits, [2] * groups)
    arena = Arena(stream.device, null.used + (1 << 20))
    model = blueprint.lay_out(arena, stream, limits, [2] * groups)
    readback = Readback(stream.device, readback_bytes(rows, TOKENS), STEPS_IN_FLIGHT)
    buckets, watch = buckets_for(blueprint, limits), Watch(StepTrace())
    graphs = _Graphs(stream.device, stream, capture=False)
    runner = Runner(model, _Pack(), stream, graphs, buckets, readback, StepPace(), watch)
    runner.record()
    # Blocks without memory behind them: no op runs.
    blocks = max(rows // 2, 1) * limits.max_blocks
    pool = Pool(blueprint.groups(limits, [blocks] * groups), prefix_cache=False)
    followers = NoFollowers()
    desk = WeightsDesk(blueprint.validate, blueprint.load, arena, stream, ())  # no command comes
    served = Served("host", tuple(blueprint.config.eos_token_ids), rows, LENGTH, max_queued=4096)
    return Engine(runner, Cache(pool), FirstCome(TOKENS), desk, served, followers)


CPU = Device("cpu")
BLOCK = 16
"""Steps of a turn with, or without, what is measured. The watch learns from this many at once."""
PROMPT_LENS = range(64, 80)
"""Prompt lengths of one request after the other, so that a sixteenth of the rows gets a block in every step."""


def recipes_that_can() -> dict[str, Recipe[Any]]:
    """The installed recipes over our engine, by name."""
    return {recipe.name: recipe for recipe in recipes.installed() if isinstance(recipe, Recipe)}


class _Pack:
    def run(self, op: Op[Any], args: Any) -> None:
        pass


class _Graphs(StepGraphs):
    """Step graphs that know every step, and do nothing at a launch."""

    def record(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        super().record(key, lambda: None)


class _TimedLeader(Leader):
    """A leader that adds up the time of its messages. Blocks of steps with and without a leader differ by more: they
    have more or fewer rows that get a block."""

    ns = 0

    def launch(self, keys: tuple[Hashable, ...], delta: Delta | None = None) -> None:
        start = time.perf_counter_ns()
        super().launch(keys, delta)
        self.ns += time.perf_counter_ns() - start


class IdleEngine:
    """The engine of a recipe, in which a launched segment does nothing: a row's token is always the same, and it runs
    on until `end_first` ends the oldest. Driver calls, which a GPU adds, are not in its times."""

    def __init__(self, recipe: Recipe[Any], rows: int, device: Device = CPU) -> None:
        self._stream, self._rows, self._next = Stream(device), rows, 0
        self.engine = _idle_engine(recipe, rows, self._stream)
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
            prompt = [self._next % 1000] * PROMPT_LENS[self._next % len(PROMPT_LENS)]
            self.engine.submit(
                Request(id=self._next, prompt_token_ids=prompt, sampling=params, max_tokens=4000, arrival=0.0)
            )

    def fill(self) -> None:
        """Run until every row decodes."""
        while len(self.engine.step(1.0).request_ids) < self._rows:
            pass

    def steps_us(self, count: int) -> list[float]:
        """Microseconds of steps in which no sequence joins or leaves."""
        return [self._step_us() for _ in range(count)]

    def watch_us(self, count: int) -> list[float]:
        """Microseconds that the trace and the watch add to a step; runs of BLOCK steps alternate with and without."""
        runner, found = self.engine.runner, []
        on, off = runner.watch, NoWatch()
        for _ in range(count // BLOCK):
            times = []
            for watch in (off, on):
                runner.watch = watch
                times.append(statistics.fmean(self.steps_us(BLOCK)))
            found.append(times[1] - times[0])
        return found

    def ranks_us(self, count: int, others: int = 3) -> list[float]:
        """Microseconds in which a step tells other ranks of itself, who look for messages all the time."""
        runner, file = self.engine.runner, os.memfd_create("ring")
        bells = [os.eventfd(0) for _ in range(others)]
        leader = runner.leader = _TimedLeader(Writer(Ring(file, others), bells, lost=lambda: False))
        leader.begin(runner.graphs.keys())
        times = []
        try:
            for _ in range(count):
                leader.ns = 0
                self.engine.step(1.0)
                times.append(leader.ns / 1e3)
            return times
        finally:
            runner.leader = LoneLeader()
            for one in (file, *bells):
                os.close(one)

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


def measure_idle(
    recipe: Recipe[Any], rows: int, *, steps: int = 2000, changes: int = 200, waiting: int = 1000
) -> dict[str, list[float]]:
    """Microseconds of every step at a batch of `rows`: "steady" ones, and "change" turns while `waiting` queue;
    "watch", the time that trace and watch add to a steady step; "ranks", the time to tell three other ranks of one."""
    idle = IdleEngine(recipe, rows)
    idle.submit(rows)
    idle.fill()
    gc.collect()
    gc.disable()
    try:
        steady = idle.steps_us(steps)
        watch = idle.watch_us(max(BLOCK, steps // 4))  # a request has at most 4,000 steps
        ranks = idle.ranks_us(max(BLOCK, steps // 4))
        idle.submit(waiting)
        idle.changes_us(2)
        return {"steady": steady, "watch": watch, "ranks": ranks, "change": idle.changes_us(changes)}
    finally:
        gc.enable()
        idle.close()
