"""Host time and memory of the pool: `python benchmarks/bench_pool.py [--json] [--million | --publish]`.

A prompt goes through a pool that is full of others' cached blocks: it finds nothing and evicts to make room. Then it
comes again and finds everything. Per block, and for the prompt as a whole: match + allocate + free, hashes given.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from openinfer.kvpool import BlockStored, EventBatch, Group, Pool, hash_blocks


def measure(num_tokens: int, block_size: int, repeats: int, eviction: str, events: bool) -> dict[str, float]:
    """Microseconds a block of each operation, the median of `repeats`."""
    num_blocks = num_tokens // block_size
    pool = Pool([Group("kv", block_size, num_blocks + 2)], eviction=eviction, events=events)
    times: dict[str, list[float]] = defaultdict(list)
    mark = 0

    def lap(name: str) -> None:
        nonlocal mark
        now = time.perf_counter_ns()
        times[name].append((now - mark) / 1e3 / num_blocks)
        mark = time.perf_counter_ns()

    for repeat in range(repeats + 1):
        tokens = list(range(repeat, repeat + num_tokens + 1))
        mark = time.perf_counter_ns()
        names = hash_blocks(tokens, block_size)
        lap("hash_blocks")
        lease = pool.acquire(tokens, hashes=names)
        lap("acquire, nothing found, hashes given")
        lease.reserve(num_tokens)
        lap("reserve, a block evicted for each" if repeat else "reserve, nothing to evict")
        lease.commit(tokens, num_tokens)
        lap("commit, hashes given")
        lease.release()
        lap("release into the cache")
        lease = pool.acquire(tokens, hashes=names)
        lap("acquire, all found, hashes given")
        lease.reserve(num_tokens)
        lap("reserve, all there")
        lease.release()
        lap("release, found before")
        pool.take_events()
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    miss = (
        "acquire, nothing found, hashes given",
        "reserve, a block evicted for each",
        "release into the cache",
    )
    hit = ("acquire, all found, hashes given", "reserve, all there", "release, found before")
    for title, steps in (("miss: match + allocate + free", miss), ("hit: match + allocate + free", hit)):
        medians[f"{title} (ms a prompt)"] = sum(medians[step] for step in steps) * num_blocks / 1e3
    return medians


def measure_million(block_size: int, eviction: str) -> dict[str, float]:
    """A pool of one million blocks, all of them cached: host bytes a block, seconds to make."""
    num_blocks = 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    pool = Pool([Group("kv", block_size, num_blocks + 1)], eviction=eviction)
    made = time.perf_counter() - start
    blocks_a_prompt = 1000
    for prompt in range(num_blocks // blocks_a_prompt):
        tokens = [prompt] * (blocks_a_prompt * block_size)
        with pool.acquire(tokens) as lease:
            lease.reserve(len(tokens))
            lease.commit(tokens, len(tokens))
    filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds to make a pool of a million blocks": made,
        "seconds to fill it, hashing included": time.perf_counter() - start - made,
        "blocks in use or cached": float(pool.stats.registered),
        "bytes a block, all cached (peak of the process)": (filled - before) * 1024 / num_blocks,
    }


def measure_publish(block_size: int, repeats: int) -> dict[str, float]:
    """Microseconds of a publisher's call for runs of blocks, the median of `repeats`."""
    from openinfer.kvpool.publisher import EventPublisher, EventsConfig  # it wants openinfer-kvpool[events]

    publisher = EventPublisher(EventsConfig(True, endpoint="inproc://events"), [Group("kv", block_size, 2)])
    found = {}
    for num_tokens in (16, 2048, 8192):
        tokens = list(range(100_000, 100_000 + num_tokens))
        batch = EventBatch(0.0, [BlockStored(hash_blocks(tokens, block_size), None, tokens, block_size)])
        times = []
        for _ in range(repeats):
            start = time.perf_counter_ns()
            publisher.publish(batch)
            times.append((time.perf_counter_ns() - start) / 1e3)
        found[f"publish {num_tokens} tokens (us)"] = sorted(times)[repeats // 2]
    publisher.close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time and memory of the pool.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--million", action="store_true", help="measure a pool of a million blocks instead")
    parser.add_argument("--publish", action="store_true", help="measure publishing of events instead")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--eviction", default="lru")
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args(argv)
    if options.million:
        results = measure_million(options.block_size, options.eviction)
    elif options.publish:
        results = measure_publish(options.block_size, options.repeats)
    else:
        results = measure(
            options.tokens, options.block_size, options.repeats, options.eviction, options.events
        )
    if options.json:
        json.dump(results, sys.stdout)
        return
    for name, value in results.items():
        print(f"{name:50} {value:10.3f}")


if __name__ == "__main__":
    main()
