"""The predictions of the scheduler's simulator for the server rows, beside the measured figures.

    python benchmarks/simulated_rows.py RECORDS.json STEP.json SERVE.json

RECORDS.json and STEP.json come from `openinfer bench step --records RECORDS.json --json STEP.json`, SERVE.json from
`openinfer bench serve --json`; all of one machine and commit. The cost of a step is linear, fitted to the records, in
the work after padding to the engine's buckets; a step that carries a prompt also has the host's share, which is what
prefill:1024 takes longer through the engine than on the device. Arrivals are the client's (same seeds).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from openinfer.cli.bench_client import arrivals
from openinfer.graph import Buckets
from openinfer.kvpool import Group, Pool
from openinfer.scheduler import FirstCome
from openinfer.scheduler.sim import LinearCost, Request, StepWork, simulate

MAX_ROWS, MAX_TOKENS, POOL_TOKENS = 256, 2048, 840_000


DECODE_ROWS = (1, 2, 4, 8, *range(16, 128, 16), *range(128, MAX_ROWS, 32))
"""The decode steps that a Qwen3 engine records."""


def padded(work: StepWork, buckets: Buckets) -> StepWork:
    """The work with the padding that the engine's recorded segments add."""
    if not work.prefill_tokens:
        return work._replace(decode_rows=buckets.choose(work.decode_rows, work.decode_rows)[0])
    rows = work.decode_rows + 1
    tokens = buckets.choose(work.decode_rows + work.prefill_tokens, rows)[0]
    return work._replace(prefill_tokens=tokens - work.decode_rows)


def host_s(step: Path) -> float:
    """Seconds that a step with a prompt takes the host beside the device."""
    (point,) = [r for r in json.loads(step.read_text())["results"] if r["point"] == "prefill:1024"]
    return 1e-3 * float(point["wall_ms"] - point["device_ms"])


def cost_model(records: Path, step: Path, buckets: Buckets) -> Callable[[StepWork], float]:
    """Seconds of a step, fitted to the records."""
    host = host_s(step)
    rows = json.loads(records.read_text())
    names = StepWork._fields
    fitted = LinearCost.fit(
        (padded(StepWork(*(r[n] for n in names)), buckets), float(r["seconds"])) for r in rows
    )
    return lambda work: fitted(padded(work, buckets)) + (host if work.prefill_tokens else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("step", type=Path)
    parser.add_argument("serve", type=Path)
    args = parser.parse_args()
    buckets = Buckets.up_to(MAX_ROWS, MAX_TOKENS, DECODE_ROWS)
    cost = cost_model(args.records, args.step, buckets)
    print("| load, requests/s | req/s predicted / measured | TPOT p50 ms | TTFT p50 ms |")
    print("| --- | --- | --- | --- |")
    for result in json.loads(args.serve.read_text())["results"]:
        rate = float(result["request_rate"] or "inf")
        count, seed = result["num_prompts"], result["seed"]
        prompt_len, output_len = result["input_len"], result["output_len"]
        rng = random.Random(seed)
        times = arrivals(count, rate, rng)
        jobs = [
            Request(t, [rng.randrange(1 << 15) for _ in range(prompt_len)], [1] * output_len, output_len)
            for t in times
        ]
        pool = Pool([Group("kv", 16, POOL_TOKENS // 16)])
        report = simulate(jobs, FirstCome(MAX_TOKENS), pool, cost, max_rows=MAX_ROWS)
        pairs = (
            (report.requests_per_s, result["requests_per_s"]),
            (1e3 * report.tpot.p50, result["tpot_ms"]["p50"]),
            (1e3 * report.ttft.p50, result["ttft_ms"]["p50"]),
        )
        cells = [f"{a:.2f} / {b:.2f} ({100 * (a / b - 1):+.0f} %)" for a, b in pairs]
        print(f"| {'all at once' if rate == float('inf') else f'{rate:g}'} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
