"""Host time of StepLoop.step() in decode, by batch size: `python benchmarks/bench_loop.py [--json]`.

The runner does nothing, so the time is the loop's own. "steady" is the median step, in which no row needs a
block; "mean" includes the steps in which rows do (each once in 16 steps, the block size).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

from openinfer.scheduler import FirstCome, Seq, Step, StepLoop, StepResult


class NullRunner:
    """Every step is done at once; no row ever ends."""

    def __init__(self) -> None:
        self._launched: deque[int] = deque()

    def launch(self, step: Step) -> None:
        self._launched.append(step.index)

    def collect(self, wait_s: float | None) -> StepResult | None:
        # The newest step is still running, as on a device.
        return StepResult(self._launched.popleft()) if len(self._launched) > 1 or wait_s is None else None


class CountingPool:
    """Blocks without a cache: what is left is the loop."""

    num_groups = 1
    num_free = capacity_tokens = 1 << 30

    def acquire(self, tokens: Sequence[int], salt: bytes = b"", hashes: object = None) -> CountingLease:
        return CountingLease()


class CountingLease:
    num_cached = num_tokens = 0

    def block_table(self, group: int = 0) -> Sequence[int]:
        return range(1, self.num_tokens // 16 + 1)

    def reserve(self, num_tokens: int) -> list[tuple[int, int, list[int]]]:
        first, last = self.num_tokens // 16, -(-num_tokens // 16)
        self.num_tokens = last * 16
        return [(0, first, list(range(first, last)))]

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        pass

    def release(self) -> None:
        pass


def measure(rows: int, steps: int) -> dict[str, float]:
    """Microseconds a step with `rows` rows in decode."""
    loop = StepLoop(
        NullRunner(),
        CountingPool(),
        FirstCome(1 << 20),
        max_rows=rows,
        max_model_len=1 << 20,
        max_queued=rows,
    )
    for number in range(rows):
        loop.submit(Seq(number, [1] * 64, 1 << 19))  # equal lengths: all rows cross at the same steps
    for _ in range(50):
        loop.step(None)
    times = []
    start_cpu = time.process_time()
    for _ in range(steps):
        start = time.perf_counter_ns()
        loop.step(None)
        times.append((time.perf_counter_ns() - start) / 1e3)
    # The mean in CPU time: it is of few long steps, which a busy machine would distort.
    mean = (time.process_time() - start_cpu) / steps * 1e6
    return {"rows": rows, "steady_us": statistics.median(times), "mean_us": mean}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args(argv)
    results = [measure(rows, options.steps) for rows in (1, 16, 64, 256, 1024)]
    if options.json:
        json.dump(results, sys.stdout)
        return
    for result in results:
        print("{rows:5.0f} rows   steady {steady_us:6.1f} us   mean {mean_us:6.1f} us".format(**result))


if __name__ == "__main__":
    main()
