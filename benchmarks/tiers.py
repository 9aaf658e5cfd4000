"""Cached prefixes in host memory and on a disk: speeds of an engine on a GPU.

    python benchmarks/tiers.py MODEL_DIR [copies] [long] [agents] [traffic] [disk] [paced] [--json FILE] [--folder DIR]

copies: bare copies of pages between host memory and the device. long: the first token of a prompt of 16,384 tokens.
It is computed, or found on the device or in host memory, alone and beside 16 rows that decode. agents: a trace of
agents (`openinfer.scheduler.sim.chats`) on the device alone, with host memory, and with a disk. traffic: the
throughput of fresh prompts while evicted pages are copied out. disk: the long prompt from the disk. paced: the same
from a disk of 5 GB/s, which files in memory stand for. Weights are random, so MODEL_DIR needs only config.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import heapq
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from disks import from_disk, paced
from driven import FRESH, LONG, SHORT, Driven, Json, driven, loaded, loads_seen, spread

from openinfer.scheduler.sim import chats
from openinfer.tensor import Device, PinnedBuffer, Stream, Tensor, check, driver

DOCUMENTS, ROWS, ROW_PROMPT, ROW_TOKENS = 7, 16, 256, 2_200
LOADS, WINDOW_S = 6, 0.4
CACHE_TOKENS, HOST_GB, AGENTS_HOST_GB, DISK_GB = 100_000, 20.0, 6.0, 30.0


# -- copies --


def copies(page_bytes: int, pages: int = 1024, repeats: int = 3) -> Json:
    """GB/s of pages in random order, and the host's microseconds a copy; both directions alone and at once."""
    device = Device("cuda")
    memory = Tensor.empty((pages * page_bytes,), "uint8", device)
    slabs = [PinnedBuffer(device, 27 * page_bytes) for _ in range(-(-pages // 27))]
    host = [slab.ptr + i * page_bytes for slab in slabs for i in range(27)][:pages]
    there = [memory.ptr + i * page_bytes for i in range(pages)]
    random.Random(1).shuffle(there)
    streams = {kind: Stream(device) for kind in ("h2d", "d2h")}
    found: Json = {"page_bytes": page_bytes, "pages": pages}

    def one_by_one(kinds: Sequence[str]) -> None:
        for inside, outside in zip(there, host, strict=True):
            for kind in kinds:
                ends = (inside, outside) if kind == "h2d" else (outside, inside)
                streams[kind].copy_async(*ends, page_bytes, kind)

    batches = {kind: _batch(kind, there, host, page_bytes) for kind in streams}

    def in_batches(kinds: Sequence[str]) -> None:
        for kind in kinds:
            batches[kind](streams[kind].handle)

    def whole(kinds: Sequence[str]) -> None:
        for kind in kinds:
            for number, slab in enumerate(slabs[: pages // 27]):
                ends = (memory.ptr + number * slab.nbytes, slab.ptr)
                streams[kind].copy_async(*(ends if kind == "h2d" else ends[::-1]), slab.nbytes, kind)

    for kinds in (("h2d",), ("d2h",), ("h2d", "d2h")):
        for how, copy in (("pages", one_by_one), ("batch", in_batches), ("pieces of 64 MB", whole)):
            rates, host_us = [], []
            count = pages if how != "pieces of 64 MB" else pages // 27 * 27
            for _ in range(repeats):
                began = time.perf_counter()
                copy(kinds)
                host_us.append(1e6 * (time.perf_counter() - began) / (len(kinds) * pages))
                for stream in streams.values():
                    stream.synchronize()
                rates.append(len(kinds) * count * page_bytes / (time.perf_counter() - began) / 1e9)
            found[f"{' + '.join(kinds)}, {how}"] = {
                "gb_per_s": max(rates),
                "host_us_a_copy": min(host_us),
                "repeats": rates,
            }
    for stream in streams.values():
        stream.close()
    return found


def _batch(kind: str, there: Sequence[int], host: Sequence[int], nbytes: int) -> Callable[[int], None]:
    cu = driver()
    pointer = check(cu.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0), "cuGetProcAddress")
    address = int(pointer[0] if isinstance(pointer, tuple) else pointer)
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
                            ctypes.c_size_t, ctypes.c_void_p)(address)  # fmt: skip
    into, out_of = (there, host) if kind == "h2d" else (host, there)
    arrays = [np.array(into, np.uint64), np.array(out_of, np.uint64), np.full(len(host), nbytes, np.uint64)]
    attributes, first = np.array([1, 0, 0, 0, 0, 0], np.int32), np.zeros(1, np.uint64)

    def copy(stream: int) -> None:
        code = call(
            *(a.ctypes.data for a in arrays), len(host), attributes.ctypes.data, first.ctypes.data, 1, stream
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync answered {code}")

    return copy


# -- a long prompt --


def long_prompt(one: Driven) -> Json:
    """The first token of a long prompt: computed, on the device, in host memory."""
    found: Json = {}
    found["computed_while_memory_is_locked_ms"] = [one.ttft_ms(one.run(one.prompt(LONG))) for _ in range(6)]
    one.engine.pool.reset_prefix_cache()
    documents = [one.prompt(LONG) for _ in range(DOCUMENTS)]
    computed = [one.ttft_ms(one.run(document)) for document in documents[:4]]
    hits = [one.ttft_ms(one.run(document)) for document in documents[3:4] * 3]
    found["computed_ms"], found["on_the_device_ms"] = computed, hits
    found["locked_after_s"] = one.wait_for_memory()
    for document in documents[4:]:
        one.run(document)
    with loads_seen() as seen:
        began = time.perf_counter()
        saved = one.tiers.stats.saved
        one.tiers.take_all(one.engine.pool)
        seconds = time.perf_counter() - began
        found["out_gb_per_s"] = (one.tiers.stats.saved - saved) * one.page_bytes / seconds / 1e9
        numbers = [one.run(document) for document in documents[:3]]
        found["room"] = loaded(one, numbers, seen)
        for document in documents[3:]:
            one.run(document)  # from here on the cache is full: each load makes room first
        seen.clear()
        numbers = [one.run(documents[i % DOCUMENTS]) for i in range(DOCUMENTS, 2 * DOCUMENTS)]
        found["full"] = loaded(one, numbers, seen)
    found["beside"] = beside(one, documents)
    return found


def beside(one: Driven, documents: Sequence[Sequence[int]]) -> Json:
    """Gaps between tokens of rows that decode: alone, beside loads, beside prompts that the device has, and beside long
    prompts to compute. Windows alone and with loads take turns, because the rows grow and their steps with them."""
    rows = [one.submit(one.prompt(ROW_PROMPT), ROW_TOKENS) for _ in range(ROWS)]
    one.until(lambda: all(len(one.times[row]) > 20 for row in rows))
    windows: list[tuple[str, float, float]] = []
    sent: dict[str, list[int]] = {"alone": [], "loads": [], "on_the_device": [], "computed": []}

    def window(kind: str, prompt: Sequence[int] | None = None) -> None:
        began = time.perf_counter()
        if prompt is not None:
            sent[kind].append(one.submit(prompt, 1))
        one.until(
            lambda: (
                time.perf_counter() >= began + WINDOW_S and all(number in one.ended for number in sent[kind])
            )
        )
        windows.append((kind, began, time.perf_counter()))

    with loads_seen() as seen:
        for turn in range(LOADS):
            window("alone")
            window("loads", documents[turn % DOCUMENTS])
        found: Json = {"loads": loaded(one, sent["loads"], seen)}
    for _ in range(3):
        window("on_the_device", documents[(LOADS - 1) % DOCUMENTS])
    for _ in range(3):
        window("computed", one.prompt(LONG))
    for kind, numbers in sent.items():
        firsts = {one.times[number][1] for number in numbers}  # the steps with a first token, by their time
        spans = [(began, ended) for name, began, ended in windows if name == kind]
        gaps = {
            b: 1e3 * (b - a)
            for a, b in pairwise(one.times[rows[0]][1:])
            if any(began <= b <= ended for began, ended in spans)
        }
        others = [gap for b, gap in gaps.items() if b not in firsts]
        found[kind] = found.get(kind, {}) | {
            "gaps_ms": spread(list(gaps.values())),
            "without_first_tokens": spread(others),
            "largest_ms": sorted(gaps.values())[-12:],
            "steps": len(gaps),
            "ttft_ms": [one.ttft_ms(number) for number in numbers],
        }
    for row in rows:
        one.engine.abort(row)
    one.until(lambda: all(row in one.ended for row in rows))
    return found


# -- agents, and what copies cost --


def agents(one: Driven) -> Json:
    """24 agents, 5 turns each."""
    one.wait_for_memory()
    trace = chats(120, 40.0, (1500, 1500), (100, 100), turns=5, system_tokens=2000, think_s=2.0, seed=3)
    before = one.engine.stats()
    due = [(request.arrival, n) for n, request in enumerate(trace) if request.after is None]
    heapq.heapify(due)
    done: set[int] = set()
    followers = {request.after: n for n, request in enumerate(trace) if request.after is not None}
    known: dict[int, int] = {}  # by number of the request
    prompts: dict[int, list[int]] = {}  # by place in the trace
    began = time.perf_counter()
    while len(done) < len(trace):
        while due and due[0][0] <= time.perf_counter() - began:
            _, n = heapq.heappop(due)
            prompts.setdefault(n, trace[n].prompt)
            known[one.submit(prompts[n], trace[n].max_tokens)] = n
        one.step()
        for number in [number for number in known if number in one.ended and known[number] not in done]:
            n = known[number]
            done.add(n)
            follower = followers.get(n)
            if follower is not None:
                fresh = trace[follower].prompt[len(trace[n].prompt) + len(trace[n].output) :]
                prompts[follower] = prompts[n] + one.session.outcomes[number].tokens + fresh
                heapq.heappush(due, (one.ended[number] - began + trace[follower].arrival, follower))
    seconds, after = time.perf_counter() - began, one.engine.stats()
    first = [one.ttft_ms(number) for number in known]
    later = [one.ttft_ms(number) for number, n in known.items() if trace[n].after is not None]
    cached = sum(one.cached(number) for number in known)
    return {
        "requests": len(trace), "seconds": seconds, "tokens": sum(len(r.prompt) for r in trace),
        "hit_rate": cached / sum(len(r.prompt) for r in trace),
        "ttft_ms": spread(first), "ttft_of_later_turns_ms": spread(later),
        "blocks": {k: after.offload_blocks[k] - before.offload_blocks.get(k, 0) for k in after.offload_blocks},
    }  # fmt: skip


def traffic(one: Driven, requests: int = 128) -> Json:
    """Tokens a second of fresh prompts, each of which evicts what came before."""
    rates = []
    for _ in range(3):
        prompts = [one.prompt(FRESH) for _ in range(requests)]
        began = time.perf_counter()
        numbers = [one.submit(prompt, 64) for prompt in prompts]
        one.until(lambda numbers=numbers: all(number in one.ended for number in numbers))  # type: ignore[misc]
        rates.append(requests * (FRESH + 64) / (time.perf_counter() - began))
    return {"tokens_per_s": max(rates[1:]), "repeats": rates}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model_dir", type=Path)
    add("parts", nargs="*", default=["copies", "long", "agents", "traffic", "disk"])
    add("--json", type=Path)
    add("--folder", type=Path, default=Path("/tmp/kv-tiers"), help="the folder of the disk tier")
    args = parser.parse_args()
    found: Json = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}

    def note(name: str, result: Json) -> None:
        found[name] = result
        print(name, json.dumps(result), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))

    config = json.loads((args.model_dir / "config.json").read_text())
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    if "copies" in args.parts:
        note("copies", copies(16 * token))
    cache: Json = {"kv_cache_memory_bytes": CACHE_TOKENS * token}
    small = cache | {"kv_offload_gb": AGENTS_HOST_GB}
    disk = small | {"kv_offload_dir": str(args.folder), "kv_offload_disk_gb": DISK_GB}
    measures = {
        "long": long_prompt,
        "agents": agents,
        "traffic": traffic,
        "disk": from_disk,
        "paced": from_disk,
    }
    for name, flags, parts in (
        ("20 GB of host memory", cache | {"kv_offload_gb": HOST_GB}, ("long", "traffic")),
        ("device only", cache, ("agents", "traffic")),
        ("6 GB of host memory", small, ("agents",)),
        ("6 GB of host memory and a disk", disk, ("agents", "disk")),
        ("6 GB of host memory and a disk of 5 GB/s", disk, ("paced",)),
    ):
        parts = tuple(part for part in parts if part in args.parts)
        if not parts:
            continue
        speed = paced() if parts == ("paced",) else contextlib.nullcontext()
        with speed, driven(args.model_dir, **flags) as one:
            note(f"start, {name}", {"seconds": one.start_s})
            for part in parts:
                one.engine.pool.reset_prefix_cache()
                one.run(one.prompt(SHORT), 8)
                note(f"{part}, {name}", measures[part](one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
