"""The host's share of a step: the whole engine above the device, with results that are there at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from openinfer.frontend.contract import Request
from openinfer.graph import Readback, StepGraphs
from openinfer.kernels import Op
from openinfer.kvpool import Group, Pool
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.engine import Qwen3Engine
from openinfer.recipes.qwen3.runner import Buckets, Runner, readback_bytes
from openinfer.recipes.qwen3.startup import Sizes, lay_out
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import RowStatus
from openinfer.scheduler import FirstCome
from openinfer.tensor import Arena, Device, Stream, float32

CONFIG = {
    "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "vocab_size": 1024,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""What the host does for a step does not depend on the model's size."""
CPU = Device("cpu")
PROMPT_LENS = range(64, 80)
"""Of one request after the other, so that a sixteenth of the rows gets a block in every step."""


class _Idle:
    """A pack that does nothing."""

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        pass


class HostEngine:
    """The Qwen3 engine with its loop, pool, batch state and read-back on the CPU, in which a launched segment does
    nothing: a row's token is always the same, and it runs on until `end_first` ends the oldest. Driver calls, which a
    GPU adds, are not in its times."""

    def __init__(self, rows: int, device: Device = CPU) -> None:
        stream, sizes = Stream(device), Sizes(8192, rows, 2048, 16, float32)
        pages = rows * sizes.max_blocks // 4
        config = Config.parse(CONFIG, None)
        self._rows, self._next = rows, 0
        null = Arena(Device("null"), None)
        lay_out(config, sizes, null, Stream(null.device), 2)
        self._model = lay_out(config, sizes, Arena(device, null.used + (1 << 20)), stream, 2)
        buckets, graphs = Buckets.up_to(rows, sizes.max_tokens), StepGraphs(device, stream, capture=False)
        graphs.record("upload", _nothing)
        for segment in buckets.segments():
            graphs.record(("forward", *segment), _nothing)
        for count in buckets.sample_rows():
            graphs.record(("sample", count), _nothing)
        readback = Readback(device, readback_bytes(rows, rows), 2)
        runner = Runner(self._model, _Idle(), stream, graphs, buckets, readback)
        pool = Pool([Group("kv", 16, pages, 1)], prefix_cache=False)
        self.engine = Qwen3Engine(
            config, runner, pool, FirstCome(sizes.max_tokens), None,
            name="host", max_rows=rows, max_model_len=8192, max_queued=4096,
        )  # fmt: skip
        self._stream, self._result = stream, np.full((rows, 3), (7, RowStatus.RUNNING, 0), np.int32)
        self.end_first(False)

    def end_first(self, ends: bool) -> None:
        """Whether the first row of every step from now on ends in it."""
        self._result[0, 1] = RowStatus.LENGTH if ends else RowStatus.RUNNING
        self._model.buffers.result.copy_from(self._result, self._stream)

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
        """Microseconds of steps in which nobody joins or leaves."""
        return [self._step_us() for _ in range(count)]

    def changes_us(self, count: int) -> list[float]:
        """Microseconds of turns of two steps, in which the oldest sequence leaves and one that waits joins; the one
        that left is submitted again, outside the time."""
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


def _nothing() -> None:
    pass


def measure(
    rows: int, *, steps: int = 2000, changes: int = 200, waiting: int = 1000
) -> dict[str, list[float]]:
    """Microseconds of every step at a batch of `rows`: "steady" ones, and "change" turns while `waiting` queue."""
    host = HostEngine(rows)
    host.submit(rows)
    host.fill()
    gc.collect()
    gc.disable()
    try:
        steady = host.steps_us(steps)
        host.submit(waiting)
        host.changes_us(2)
        return {"steady": steady, "change": host.changes_us(changes)}
    finally:
        gc.enable()
        host.close()
