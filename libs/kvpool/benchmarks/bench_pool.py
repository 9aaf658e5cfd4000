"""Host time of the pool's operations, a block: `python benchmarks/bench_pool.py [--json]`.

A prompt goes through a pool that is full of others' cached blocks: it finds nothing and evicts to make room. Then it
comes again and finds everything.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from openinfer.kvpool import Group, Pool, hash_blocks


def measure(num_tokens: int, block_size: int, repeats: int) -> dict[str, float]:
    """Microseconds a block of each operation, the best of `repeats`."""
    num_blocks = num_tokens // block_size
    pool = Pool([Group("kv", block_size, num_blocks + 2)])
    times: dict[str, list[float]] = defaultdict(list)
    mark = 0

    def lap(name: str) -> None:
        nonlocal mark
        now = time.perf_counter_ns()
        times[name].append((now - mark) / 1e3 / num_blocks)
        mark = time.perf_counter_ns()

    for repeat in range(repeats):
        tokens = list(range(repeat, repeat + num_tokens + 1))
        mark = time.perf_counter_ns()
        names = hash_blocks(tokens, block_size)
        lap("hash_blocks")
        lease = pool.acquire(tokens, hashes=names)
        lap("acquire, nothing found, hashes given")
        lease.reserve(num_tokens)
        lap("reserve" if repeat else "reserve, nothing to evict")
        lease.commit(tokens, num_tokens)
        lap("commit, hashes given")
        lease.release()
        lap("release, all cached")
        lease = pool.acquire(tokens)
        lap("acquire, all found")
        lease.release()
    return {name: min(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time of the pool's operations, a block.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(argv)
    results = measure(options.tokens, options.block_size, options.repeats)
    if options.json:
        json.dump(results, sys.stdout)
        return
    for name, microseconds in results.items():
        print(f"{name:38} {microseconds:6.2f} us a block of {options.block_size}")


if __name__ == "__main__":
    main()
