"""Host time of StepLoop.step(), on one core: `python benchmarks/bench_loop.py [--json]`.

decode: no row joins or leaves. In the median step no row needs a block; "mean" includes steps in which rows do (each
row once in 16 steps, the block size). The runner does nothing and the pool only counts, so the time is the loop's own.
Where openinfer-kvpool is installed, the same over its pool, which is the pool's time too.

drafts: the same with two drafts a row, of which one is accepted.

plan: 256 rows run, 1,000 sequences wait, and in each step one ends, one is submitted and one is admitted.

prefill: one prompt of a million tokens in chunks of 2,048, over openinfer-kvpool's pool with pages of 128 tokens. One
group keeps all pages; the other has a window of 127 tokens and 40 pages. The hashes are given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

from openinfer.scheduler import (
    POLICIES,
    FinishReason,
    FirstCome,
    Pool,
    Seq,
    Step,
    StepLoop,
    StepResult,
    View,
    make_policy,
)

ROWS = 256
WAITING = 1000


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

    def poll(self, wait_s: float | None = 0.0) -> Sequence[CountingLease]:
        return ()


class CountingLease:
    num_cached = num_tokens = num_loadable = 0

    def load(self, leave: float = 0.0) -> bool:
        return False

    def block_table(self, group: int = 0) -> Sequence[int]:
        return range(1, self.num_tokens // 16 + 1)

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]]:
        first, last = self.num_tokens // 16, -(-max(num_tokens, kept_tokens) // 16)
        self.num_tokens = last * 16
        return [(0, first, list(range(first, last)))]

    def reach(self, leave: float = 0.0) -> int:
        return 1 << 30

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        pass

    def release(self) -> None:
        pass


class HalfRight(NullRunner):
    """A runner that accepts one of two drafts a row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._advanced = dict.fromkeys(range(1, rows + 1), 2)

    def collect(self, wait_s: float | None) -> StepResult | None:
        result = super().collect(wait_s)
        if result is not None and result.index > 1:  # the first step has the prompts
            result.advanced = self._advanced
        return result


class TwoDrafts:
    """Two drafts for every row."""

    rest_until = 0

    def num_drafts(self, view: View) -> dict[Seq, int]:
        return dict.fromkeys(view.decoding, 2)


class Churn(NullRunner):
    """In each step the row that has run longest ends."""

    def __init__(self) -> None:
        super().__init__()
        self._running: deque[int] = deque()

    def launch(self, step: Step) -> None:
        super().launch(step)
        self._running.extend(seq.slot for seq in step.joined)

    def collect(self, wait_s: float | None) -> StepResult | None:
        result = super().collect(wait_s)
        if result is not None and len(self._running) == ROWS:
            result.finished = [(self._running.popleft(), FinishReason.LENGTH)]
        return result


def real_pool(rows: int, tokens: int) -> Pool | None:
    """openinfer.kvpool's, if it is there."""
    try:
        from openinfer.kvpool import Group
        from openinfer.kvpool import Pool as RealPool
    except ImportError:
        return None
    return RealPool([Group("kv", 16, rows * (tokens // 16 + 2))])


def measure_decode(rows: int, steps: int, pool: Pool, *, drafts: bool = False) -> dict[str, float]:
    """Microseconds a step with `rows` rows in decode, their block boundaries spread over the steps."""
    max_len = 3 * steps + 600 if drafts else steps + 200
    loop = StepLoop(
        HalfRight(rows) if drafts else NullRunner(),
        pool,
        FirstCome(1 << 20),
        max_rows=rows,
        max_model_len=max_len,
        max_queued=rows,
        speculation=TwoDrafts() if drafts else None,
    )
    for number in range(rows):
        loop.submit(Seq(number, [number] * (64 + number % 16), max_len))
    for _ in range(50):
        loop.step(None)
    for seq in loop.live:
        seq.tokens.extend([7] * max_len)  # as if the owner had appended them all in time
    times = []
    start_cpu = time.process_time()
    for _ in range(steps):
        start = time.perf_counter_ns()
        loop.step(None)
        times.append((time.perf_counter_ns() - start) / 1e3)
    # The mean in CPU time: it is of few long steps, which a busy machine would distort.
    mean = (time.process_time() - start_cpu) / steps * 1e6
    for seq in loop.live:
        loop.abort(seq.id)
    loop.drain()
    return {"rows": rows, "steady_us": min(times), "median_us": statistics.median(times), "mean_us": mean}


def measure_plan(name: str, steps: int) -> dict[str, object]:
    """Microseconds of a step in which one leaves, one is submitted and one joins."""
    loop = StepLoop(
        Churn(),
        CountingPool(),
        make_policy(name, max_batched_tokens=2048),
        max_rows=ROWS,
        max_model_len=1 << 20,
        max_queued=WAITING + ROWS + 1,
    )
    number = 0

    def submit() -> None:
        nonlocal number
        number += 1
        priority, tenant, now = number * 7919 % 5, f"tenant {number * 7919 % 20}", time.monotonic()
        loop.submit(Seq(number, [1] * 64, 1 << 19, priority=priority, tenant=tenant, arrival=now))

    for _ in range(WAITING + ROWS):
        submit()
    for _ in range(50):  # fills the batch; from then on, in each step one leaves and one joins
        loop.step(None)
    times = []
    for _ in range(steps):
        while loop.stats.waiting < WAITING:
            submit()
        start = time.perf_counter_ns()
        loop.step(None)
        times.append((time.perf_counter_ns() - start) / 1e3)
    p99 = sorted(times)[len(times) * 99 // 100]
    return {"policy": name, "median_us": statistics.median(times), "p99_us": p99}


def measure_prefill(tokens: int, chunk: int) -> dict[str, float] | None:
    """Microseconds of a step that has a chunk of a long prompt, and milliseconds of its admission."""
    try:
        from openinfer.kvpool import Group, hash_blocks
        from openinfer.kvpool import Pool as RealPool
    except ImportError:
        return None
    pool = RealPool([Group("window", 128, 41, window=127), Group("all", 128, tokens // 128 + 2)])
    loop = StepLoop(NullRunner(), pool, FirstCome(chunk), max_rows=1, max_model_len=tokens + 8)
    prompt = list(range(tokens))
    loop.submit(Seq(1, prompt, 8, hashes=hash_blocks(prompt, 128)))
    times = []
    for _ in range(tokens // chunk):
        start = time.perf_counter_ns()
        loop.step(None)
        times.append((time.perf_counter_ns() - start) / 1e3)
    loop.abort(1)
    loop.drain()
    return {
        "admission_ms": times[0] / 1e3,
        "median_us": statistics.median(times),
        "p99_us": sorted(times)[-5],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args(argv)
    decode = [measure_decode(rows, options.steps, CountingPool()) for rows in (1, 16, 64, 256, 1024)]
    pool = real_pool(ROWS, options.steps + 200)
    over_kvpool = [measure_decode(ROWS, options.steps, pool)] if pool is not None else []
    drafts = [measure_decode(rows, options.steps, CountingPool(), drafts=True) for rows in (1, 8, 64, 256)]
    plan = [measure_plan(name, options.steps) for name in POLICIES]
    prefill = measure_prefill(1_000_000, 2048)
    if options.json:
        results = {
            "decode": decode,
            "decode_over_kvpool": over_kvpool,
            "drafts": drafts,
            "plan": plan,
            "prefill": prefill,
        }
        json.dump(results, sys.stdout)
        return
    for name, results in (("", decode), (" over openinfer.kvpool", over_kvpool), (" with drafts", drafts)):
        for result in results:
            print("{rows:5.0f} rows   least {steady_us:6.1f} us   median {median_us:6.1f} us   "
                  "mean {mean_us:6.1f} us".format(**result) + name)  # fmt: skip
    if prefill is not None:
        print("a million tokens  admission {admission_ms:5.1f} ms   a step with a chunk: median {median_us:6.1f} us   "
              "p99 {p99_us:6.1f} us".format(**prefill))  # fmt: skip
    for row in plan:
        print(
            "{policy:15}  a step with a plan: median {median_us:6.1f} us   p99 {p99_us:6.1f} us".format(**row)
        )


if __name__ == "__main__":
    main()
