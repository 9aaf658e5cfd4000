"""Hit rates of the eviction policies on synthetic traces: `python benchmarks/bench_eviction.py [--json]`.

Every trace is a list of (prompt and output, length of the prompt, priority), from a seed, and all policies see the
same. A hit is a prompt token that need not be computed. A second table is of a group with a window beside one that
keeps all: by its policy (the other has lru), and by its part of the memory; a page of 128 tokens is seven times as
large in it, as in DeepSeek-V4, and prompts come in chunks of 2,048.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from openinfer.kvpool import Group, Pool
from openinfer.kvpool.eviction import POLICIES

Request = tuple[list[int], int, int]


def _fresh(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(31) for _ in range(count)]


def _zipf(count: int, exponent: float = 1.0) -> list[float]:
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def chats(rng: random.Random, turns: int) -> Iterator[Request]:
    """300 conversations at a time over 20 system prompts; some are talkative (Zipf), and ended ones are replaced."""
    systems = [_fresh(rng, 16 * rng.randint(10, 60)) for _ in range(20)]
    weights = _zipf(20)
    open_chats = [list(rng.choices(systems, weights)[0]) for _ in range(300)]
    popularity = _zipf(300, 0.8)
    for _ in range(turns):
        (index,) = rng.choices(range(300), popularity)
        chat = open_chats[index]
        chat += _fresh(rng, rng.randint(20, 200))
        num_prompt = len(chat)
        chat += _fresh(rng, rng.randint(50, 300))
        yield list(chat), num_prompt, 0
        if rng.random() < 0.08:
            open_chats[index] = list(rng.choices(systems, weights)[0])


def chats_and_a_scan(rng: random.Random, turns: int) -> Iterator[Request]:
    """The requests of `chats`, while a batch job of lower priority sends long documents, each only once."""
    for tokens, num_prompt, _ in chats(rng, turns):
        yield tokens, num_prompt, 1
        if rng.random() < 0.25:
            yield _fresh(rng, 4000), 3980, 0


def documents(rng: random.Random, turns: int, count: int = 200, length: int = 3000) -> Iterator[Request]:
    """One question each about one of `count` documents (Zipf) of `length` tokens."""
    texts = [_fresh(rng, length) for _ in range(count)]
    weights = _zipf(count)
    for _ in range(turns):
        yield [*rng.choices(texts, weights)[0], *_fresh(rng, 140)], length + 40, 0


def loop(rng: random.Random, turns: int) -> Iterator[Request]:
    """60 documents in turn, over and over: what least-recently-used is worst at."""
    texts = [_fresh(rng, 3000) for _ in range(60)]
    for turn in range(turns):
        yield [*texts[turn % 60], *_fresh(rng, 140)], 3040, 0


def agents(rng: random.Random, turns: int) -> Iterator[Request]:
    """50 agents with the same instructions, whose contexts grow by up to 3,400 tokens a turn, to 60,000."""
    instructions = _fresh(rng, 4000)
    contexts = [list(instructions) for _ in range(50)]
    for _ in range(turns):
        context = rng.choice(contexts)
        context += _fresh(rng, rng.randint(200, 3000))
        num_prompt = len(context)
        context += _fresh(rng, rng.randint(50, 400))
        yield list(context), num_prompt, 0
        if len(context) > 60_000:
            context[:] = instructions


TRACES: dict[str, tuple[Callable[[random.Random, int], Iterator[Request]], int, int]] = {
    "chats": (chats, 3000, 200_000),
    "chats and a scan": (chats_and_a_scan, 3000, 200_000),
    "documents": (documents, 3000, 160_000),
    "loop": (loop, 1500, 100_000),
}
"""Trace, number of turns, tokens that the pool holds."""


def hit_rate(
    trace: Sequence[Request],
    num_tokens: int,
    eviction: str = "lru",
) -> float:
    """Share of the prompt tokens found. Ten requests run at a time, fewer where the pool is dry."""
    pool = Pool([Group("kv", 16, num_tokens // 16)], eviction=eviction)
    running = []
    found = asked = 0
    for tokens, num_prompt, priority in trace:
        lease = pool.acquire(tokens[:num_prompt], priority=priority)
        while lease.reserve(len(tokens)) is None:
            running.pop(0).release()
        lease.commit(tokens, len(tokens) - 1)  # the last token was sampled, not computed
        found += lease.num_cached
        asked += num_prompt
        running.append(lease)
        if len(running) > 10:
            running.pop(0).release()
    for lease in running:
        lease.release()
    return found / asked


WINDOW_TRACES: dict[str, tuple[Callable[[random.Random, int], Iterator[Request]], int, int]] = {
    "chats": (chats, 1500, 5700),
    "documents": (documents, 1000, 5700),
    "long documents": (functools.partial(documents, count=40, length=30_000), 300, 11_400),
    "agents": (agents, 800, 11_400),
}
"""Trace, number of turns, memory as pages of the group that keeps all."""


def window_hit_rate(trace: Sequence[Request], memory: int, part: float, eviction: str) -> float:
    """Share of the prompt tokens found, where the window group has that part of the memory."""
    num_windows = int(memory * part / 7)
    groups = [
        Group("window", 128, num_windows, window=127),
        Group("all", 128, memory - 7 * num_windows),
    ]
    pool = Pool(groups, eviction=lambda group: POLICIES[eviction if group.window else "lru"](group))
    running = []
    found = asked = 0
    for tokens, num_prompt, _ in trace:
        lease = pool.acquire(tokens[:num_prompt])
        found += lease.num_cached
        asked += num_prompt
        for end in [*range(lease.num_cached + 2048, len(tokens), 2048), len(tokens)]:
            while lease.reserve(end, len(tokens)) is None:
                running.pop(0).release()
            lease.commit(tokens, end - (end == len(tokens)))
        running.append(lease)
        if len(running) > 10:
            running.pop(0).release()
    for lease in running:
        lease.release()
    return found / asked


def compare_windows(seed: int) -> dict[str, dict[str, float]]:
    """Hit rates by trace, policy and part of the memory."""
    results = {}
    for name, (make, turns, memory) in WINDOW_TRACES.items():
        trace = list(make(random.Random(seed), turns))
        for eviction in ("lru", "s3fifo"):
            results[f"{name}, {eviction}"] = {
                f"{part:.0%}": window_hit_rate(trace, memory, part, eviction)
                for part in (0.2, 0.35, 0.5, 0.65, 0.8)
            }
    return results


def compare_policies(seed: int) -> dict[str, dict[str, float]]:
    """Hit rates by trace and policy."""
    results: dict[str, dict[str, float]] = {}
    for name, (make, turns, num_tokens) in TRACES.items():
        trace = list(make(random.Random(seed), turns))
        results[name] = {
            policy: hit_rate(trace, num_tokens, policy) for policy in ("lru", "lineage", "s3fifo", "priority")
        }
        results[name]["no eviction"] = hit_rate(trace, 20_000_000)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hit rates of the eviction policies on synthetic traces.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    results = compare_policies(options.seed) | compare_windows(options.seed)
    if options.json:
        json.dump(results, sys.stdout)
        return
    for name, rates in results.items():
        print(f"{name:24}", *(f"{column} {rate:6.1%}  " for column, rate in rates.items()))


if __name__ == "__main__":
    main()
