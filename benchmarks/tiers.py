"""Cached prefixes in host memory, on a disk and at another engine: speeds of an engine on a GPU.

    python benchmarks/tiers.py MODEL_DIR [copies] [long] [agents] [traffic] [disk] [peers] [--json FILE] [--folder DIR]

copies: bare copies of pages between host memory and the device. long: the first token of a prompt of 16,384 tokens.
It is computed, or found on the device or in host memory, alone and beside 16 rows that decode. agents: a trace of
agents (`openinfer.scheduler.sim.chats`) on the device alone, with host memory, and with a disk. traffic: the
throughput of fresh prompts while evicted pages are copied out. disk: the long prompt from the disk. peers: prefill
and decode on engines of their own, on two GPUs of one host if there are two. Weights are random, so MODEL_DIR needs
only config.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import heapq
import json
import mmap
import multiprocessing
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.cli import recipes
from openinfer.cli.bench_record import percentile
from openinfer.frontend.kv_transfer import KVTransfer
from openinfer.kvpool.tiers.layout import ALIGNMENT
from openinfer.kvpool.tiers.moves import Loading
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.scheduler.sim import chats
from openinfer.tensor import Device, PinnedBuffer, Stream, Tensor, check, driver

LONG, DOCUMENTS, ROWS, ROW_PROMPT, ROW_TOKENS = 16_384, 7, 16, 256, 2_000
SHORT, FRESH = 300, 1_024
CACHE_TOKENS, HOST_GB, DISK_GB = 100_000, 20.0, 30.0
FIRST_ID, LAST_ID = 256, 30_000

Json = dict[str, Any]


class Driven:
    """An engine, and the times of its tokens by request. loads: the loads that have ended."""

    def __init__(self, model_dir: Path, **flags: Any) -> None:
        common: Json = {
            "device": "cuda", "load_format": "dummy", "max_model_len": 20_480, "max_num_seqs": 64,
        }  # fmt: skip
        began = time.monotonic()
        self.engine = build(recipes.find(model_dir), model_dir, **{**common, **flags}).engine
        self.session = Session(self.engine)
        self.start_s = time.monotonic() - began
        self.times: dict[int, list[float]] = {}
        self.ended: dict[int, float] = {}
        self.tiers: Any = self.engine._tiers
        self.page_bytes = self.engine.pool.groups[0].block_bytes
        self._rng = random.Random(7)
        self.stalls: list[float] = []

    def prompt(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

    def submit(self, prompt: Sequence[int], tokens: int, **more: Any) -> int:
        number = self.session.submit(prompt, tokens, ignore_eos=True, **more)
        self.times[number] = [time.perf_counter()]
        return number

    def step(self, wait_s: float = 0.0005) -> None:
        began = time.perf_counter()
        outputs = self.session.step(wait_s)
        now = time.perf_counter()
        self.stalls.append(now - began)
        for number in outputs.request_ids:
            self.times[number].append(now)
        for update in outputs.updates:
            if self.session.outcomes[update.id].terminals:
                self.ended[update.id] = now

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        stop = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > stop:
                raise TimeoutError(f"nothing after {limit_s:g} s")
            self.step()

    def run(self, prompt: Sequence[int], tokens: int = 1, **more: Any) -> int:
        number = self.submit(prompt, tokens, **more)
        self.until(lambda: number in self.ended)
        return number

    def ttft_ms(self, number: int) -> float:
        return 1e3 * (self.times[number][1] - self.times[number][0])

    def cached(self, number: int) -> int:
        return self.session.outcomes[number].cached

    def wait_for_memory(self) -> float:
        """Seconds until all host memory is locked."""
        began = time.monotonic()
        while self.tiers is not None and self.tiers._host._thread.is_alive():
            time.sleep(0.02)
        return time.monotonic() - began

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.keep = lambda pool: None  # the end of an engine writes for two seconds
        self.engine.close()


@contextlib.contextmanager
def driven(model_dir: Path, **flags: Any) -> Iterator[Driven]:
    made = Driven(model_dir, **flags)
    try:
        yield made
    finally:
        made.close()
        del made
        gc.collect()


@contextlib.contextmanager
def loads_seen() -> Iterator[list[Any]]:
    """The times of loads, as they end."""
    seen: list[Any] = []
    before = Loading.time

    def time_of(loading: Any, now: float) -> Any:
        seen.append(before(loading, now))
        return seen[-1]

    Loading.time = time_of  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Loading.time = before  # type: ignore[method-assign]


def spread(values: Sequence[float]) -> Json:
    return {
        name: round(percentile(list(values), p), 3) for name, p in (("p50", 50), ("p99", 99), ("max", 100))
    }


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
    import ctypes

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
    one.run(one.prompt(SHORT), 8)
    one.run(one.prompt(LONG))
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
        found["room"] = _loaded(one, numbers, seen)
        for document in documents[3:]:
            one.run(document)  # from here on the cache is full: each load makes room first
        seen.clear()
        numbers = [one.run(documents[i % DOCUMENTS]) for i in range(DOCUMENTS, 2 * DOCUMENTS)]
        found["full"] = _loaded(one, numbers, seen)
    found["beside"] = beside(one, documents)
    return found


def _loaded(one: Driven, numbers: Sequence[int], seen: Sequence[Any]) -> Json:
    return {
        "ttft_ms": [one.ttft_ms(number) for number in numbers],
        "cached": [one.cached(number) for number in numbers],
        "load_ms": [1e3 * load.seconds for load in seen],
        "load_gb_per_s": [load.blocks * one.page_bytes / load.seconds / 1e9 for load in seen],
        "from_disk": sum(load.from_disk for load in seen),
        "failed": sum(load.failed for load in seen),
    }


def beside(one: Driven, documents: Sequence[Sequence[int]]) -> Json:
    """Gaps between tokens of rows that decode: alone, beside loads, alone again, beside long prompts to compute."""
    rows = [one.submit(one.prompt(ROW_PROMPT), ROW_TOKENS) for _ in range(ROWS)]
    one.until(lambda: all(len(one.times[row]) > 20 for row in rows))
    found: Json = {}

    def gaps_for(seconds: float, send: Callable[[], int] | None) -> tuple[Json, list[int]]:
        began, sent = time.perf_counter(), list[int]()
        one.stalls.clear()
        while (now := time.perf_counter() - began) < seconds:
            if send is not None and now >= 0.4 * len(sent):
                sent.append(send())
            one.step()
        ended = time.perf_counter()
        gaps = [
            1e3 * (b - a)
            for row in rows
            for a, b in zip(one.times[row][1:], one.times[row][2:], strict=False)
            if began <= b <= ended
        ]
        one.until(lambda: all(number in one.ended for number in sent))
        told = {"gaps_ms": spread(gaps), "steps": len(gaps) // ROWS, "turn_ms_max": 1e3 * max(one.stalls),
                "turns_ms": sorted((round(1e3 * s, 2) for s in one.stalls), reverse=True)[:8]}  # fmt: skip
        return told, sent

    turn = iter(range(10**6))
    found["alone"], _ = gaps_for(1.2, None)
    with loads_seen() as seen:
        found["loads"], sent = gaps_for(2.8, lambda: one.submit(documents[next(turn) % DOCUMENTS], 1))
        found["loads"] |= _loaded(one, sent, seen)
    found["alone_again"], _ = gaps_for(0.8, None)
    found["computed"], sent = gaps_for(1.2, lambda: one.submit(one.prompt(LONG), 1))
    found["computed"]["ttft_ms"] = [one.ttft_ms(number) for number in sent]
    for row in rows:
        one.engine.abort(row)
    one.until(lambda: all(row in one.ended for row in rows))
    return found


# -- agents, and what copies cost --


def agents(one: Driven) -> Json:
    """24 agents, 5 turns each."""
    trace = chats(120, 40.0, (1500, 1500), (100, 100), turns=5, system_tokens=2000, think_s=0.5, seed=3)
    before = one.engine.stats()
    due = [(request.arrival, n) for n, request in enumerate(trace) if request.after is None]
    heapq.heapify(due)
    done: set[int] = set()
    followers = {request.after: n for n, request in enumerate(trace) if request.after is not None}
    known, prompts = (
        dict[int, int](),
        dict[int, list[int]](),
    )  # by number of the request, by place in the trace
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


# -- a disk --


def from_disk(one: Driven) -> Json:
    """The long prompt from the disk, beside the same files read by nothing but threads."""
    found: Json = {}
    documents = [one.prompt(LONG) for _ in range(2)]
    for document in documents:
        one.run(document)
    tiers, pool = one.tiers, one.engine.pool
    written, began = tiers.stats.to_disk, time.perf_counter()
    type(tiers).keep(tiers, pool, 25.0)
    while tiers._disk.num_writing or tiers._saves:
        tiers._collect(0.001)
    seconds = time.perf_counter() - began
    found["write_gb_per_s"] = (tiers.stats.to_disk - written) * one.page_bytes / seconds / 1e9
    tiers.take_all(pool)
    while tiers._disk.num_writing or tiers._saves:
        tiers._collect(0.001)
    tiers._host.clear()
    with loads_seen() as seen:
        numbers = []
        for document in documents:
            numbers.append(one.run(document))
            tiers._host.clear()
        found["loaded"] = _loaded(one, numbers, seen)
    paths = sorted(tiers._disk.folder.glob("??/*"), key=lambda path: path.stat().st_mtime)[-LONG // 16 :]
    found["bare"] = bare_reads(paths, one.page_bytes)
    return found


def bare_reads(paths: Sequence[Path], nbytes: int) -> Json:
    """Seconds to read these files with O_DIRECT, by 4 and 8 threads, and GB/s of a checksum in one thread."""
    found: Json = {"files": len(paths)}

    def work(mine: Sequence[Path]) -> None:
        room = mmap.mmap(-1, ALIGNMENT + nbytes)
        for path in mine:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [room], 0)
            os.close(fd)

    for threads in (4, 8, 4):
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [paths[n::threads] for n in range(threads)]))
        seconds = time.perf_counter() - began
        found[f"{threads} threads"] = {"ms": 1e3 * seconds, "gb_per_s": len(paths) * nbytes / seconds / 1e9}
    data = os.urandom(1 << 20) * 32
    began = time.perf_counter()
    zlib.crc32(data)
    found["crc32_gb_per_s"] = len(data) / (time.perf_counter() - began) / 1e9
    return found


# -- another engine --


def _serve_prefill(model_dir: Path, flags: Json, gpu: str, link: Any) -> None:
    """The prefill engine, in a process of its own: prompts come, parameters of transfers go."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with driven(model_dir, **flags) as one:
        one.run(one.prompt(SHORT))
        link.send("ready")
        while (prompt := link.recv()) is not None:
            began = time.perf_counter()
            number = one.submit(prompt, 1, kv_transfer=KVTransfer(do_remote_decode=True), logprobs=10)
            one.until(lambda number=number: number in one.ended)  # type: ignore[misc]
            given = one.session.outcomes[number].terminals[0].kv_transfer
            link.send((given, 1e3 * (time.perf_counter() - began)))
            stop = time.monotonic() + 0.05
            while time.monotonic() < stop or not link.poll():
                one.step(0.001)


def peers(model_dir: Path, connector: str, gpus: Sequence[str]) -> Json:
    """A long prompt that one engine computes and another goes on with."""
    config = {"kv_connector": connector, "kv_port": 0, "kv_buffer_size": 6e9}
    flags: Json = {"kv_transfer_config": json.dumps(config), "kv_cache_memory_bytes": 12 << 30}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve_prefill, args=(model_dir, flags, gpus[-1], theirs))
    child.start()
    found: Json = {"connector": connector, "gpus": list(gpus)}
    try:
        with driven(model_dir, **flags) as one, loads_seen() as seen:
            if ours.recv() != "ready":
                raise RuntimeError("the prefill engine did not start")
            one.run(one.prompt(SHORT))
            one.run(one.prompt(LONG))
            time.sleep(6.0)  # both lock their memory
            rows = []
            for length in (LONG, LONG, LONG, FRESH, FRESH):
                prompt = one.prompt(length)
                began = time.perf_counter()
                ours.send(prompt)
                given, prefill_ms = ours.recv()
                number = one.run(prompt, 8, kv_transfer=given, logprobs=10)
                fetched = one.session.outcomes[number]
                total_ms = 1e3 * (time.perf_counter() - began)
                ttft_ms = 1e3 * (one.times[number][1] - began)
                one.engine.pool.reset_prefix_cache()
                plain = one.run(prompt, 8, logprobs=10)
                own = one.session.outcomes[plain]
                a, b = (
                    dict(zip(o.logprobs[0].top_token_ids, o.logprobs[0].top_logprobs, strict=True))
                    for o in (fetched, own)
                )
                rows.append({
                    "tokens": length, "cached": fetched.cached, "prefill_ms": prefill_ms,
                    "decode_ttft_ms": one.ttft_ms(number),
                    "ttft_ms": ttft_ms, "total_ms": total_ms, "one_engine_ttft_ms": one.ttft_ms(plain),
                    "same_tokens": sum(x == y for x, y in zip(fetched.tokens, own.tokens, strict=True)),
                    "logprob_error": float(np.mean([abs(a[t] - b[t]) for t in a.keys() & b.keys()] or [9.0])),
                })  # fmt: skip
            found["rows"] = rows
            found["load_gb_per_s"] = [load.blocks * one.page_bytes / load.seconds / 1e9 for load in seen]
            ours.send(None)
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model_dir", type=Path)
    add("parts", nargs="*", default=["copies", "long", "agents", "traffic", "disk"])
    add("--json", type=Path)
    add("--folder", type=Path, default=Path("/tmp/kv-tiers"), help="the folder of the disk tier")
    add("--connectors", nargs="+", default=["TcpConnector"])
    add(
        "--gpus",
        nargs="+",
        default=[""],
        help="GPUs of the peers; the last has the prefill engine",
    )
    add("--device", default="cuda")
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
    cache: Json = {"kv_cache_memory_bytes": CACHE_TOKENS * token, "device": args.device}
    host = cache | {"kv_offload_gb": HOST_GB}
    disk = host | {"kv_offload_dir": str(args.folder), "kv_offload_disk_gb": DISK_GB}
    for name, flags in (("host memory", host), ("device only", cache), ("host memory and disk", disk)):
        wanted = {"host memory": {"long", "agents", "traffic"}, "device only": {"agents", "traffic"}}
        if not set(args.parts) & wanted.get(name, {"agents", "traffic", "disk"}):
            continue
        with driven(args.model_dir, **flags) as one:
            note(f"start, {name}", {"seconds": one.start_s})
            if "long" in args.parts and name == "host memory":
                note("long", long_prompt(one))
            note(f"locked, {name}", {"seconds": one.wait_for_memory()})
            for part, measure in (("agents", agents), ("traffic", traffic)):
                if part in args.parts:
                    one.engine.pool.reset_prefix_cache()
                    one.run(one.prompt(SHORT), 8)
                    note(f"{part}, {name}", measure(one))
            if "disk" in args.parts and name == "host memory and disk":
                one.engine.pool.reset_prefix_cache()
                note("disk", from_disk(one))
    for connector in args.connectors if "peers" in args.parts else ():
        note(f"peers, {connector}", peers(args.model_dir, connector, args.gpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
