"""Exchanges among the GPUs of one host: right sums, the same bits on every rank and rerun, and microseconds in a graph.

`python benchmarks/ranks.py --ranks 2 [--json FILE]` starts a process a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.graph import StepGraphs
from openinfer.kernels import (
    CudaDriver,
    GpuRanks,
    LaunchPack,
    NullPack,
    SharedMemory,
    Store,
    Target,
    gather_columns,
)
from openinfer.kernels.exchange import Normed, sum_by
from openinfer.kernels.reference import rms_norm
from openinfer.kernels.tuning import NCCL, Exchange
from openinfer.tensor import Arena, Device, Event, NcclRanks, Stream, Tensor, bfloat16, float32, uint8

VOCABULARY, CALLS, REPEATS, EPS = 151936, 100, 9, 1e-6
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048)
WAYS = {
    **{f"push, {warps} warps": Exchange("push", warps) for warps in (16, 8, 4)},
    **{f"two-shot, {warps} warps": Exchange("two_shot", warps) for warps in (16, 8, 4)},
    "NCCL": NCCL,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=1000, help="checked calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--boot", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.boot is not None:
        rank, memory, *links = map(int, args.boot.split(","))
        run(args, rank, memory, [socket.socket(fileno=fd) for fd in links])
        return
    memory, pairs = os.memfd_create("ranks"), [socket.socketpair() for _ in range(args.ranks - 1)]
    others = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--boot", f"{rank},{memory},{theirs.fileno()}"],
            pass_fds=(memory, theirs.fileno()),
        )
        for rank, (_, theirs) in enumerate(pairs, start=1)
    ]
    run(args, 0, memory, [ours for ours, _ in pairs])
    assert [process.wait(60) for process in others] == [0] * len(others)


class Rank:
    """A process and its GPU among those that exchange rows of `width` bf16."""

    def __init__(self, rank: int, size: int, width: int, memory: int, links: list[socket.socket]) -> None:
        self.rank, self.size, self.width = rank, size, width
        self.shared, self.device = SharedMemory(memory, rank, size), Device("cuda", rank)
        self.device.activate()
        mine = NcclRanks.unique_id() if rank == 0 else bytes(128)
        unique_id = self.shared.exchange(np.frombuffer(mine, np.uint8))[0].tobytes()
        self.gpus = GpuRanks(self.device, NcclRanks(self.device, unique_id, rank, size), 2 * width)
        self.stream, self.arena = Stream(self.device), Arena(self.device, 3 << 30)
        self.gpus.connect(links, self.stream)
        self.shared.exchange(np.zeros(1))
        found = Target.of(self.device, cublas=False)
        self.target = Target(found.arch, found.num_sms, gpu=found.gpu, rank=rank)
        self.store = Store(self.device.arch)
        scratch = self.arena.alloc((256 << 20,), uint8)
        driver = CudaDriver(self.device, self.stream, self.store, None, self.gpus)
        self.pack = LaunchPack(self.target, driver, scratch, None)

    def tensor(self, *shape: int, dtype: Any = bfloat16) -> Tensor:
        made = self.arena.alloc(shape, dtype)
        made.zero_(self.stream)
        return made

    def sum(self, way: Exchange, x: Tensor, y: Tensor, normed: Normed | None, *, add: bool = True) -> None:
        self.pack.submit("sum", list(sum_by(way, self.target, x, y, self.size, add=add, normed=normed)))


def run(args: argparse.Namespace, number: int, memory: int, links: list[socket.socket]) -> None:
    rank = Rank(number, args.ranks, args.width, memory, links)
    prepare(rank)
    say = print if number == 0 else lambda *words, **named: None
    result: dict[str, Any] = {
        "device": rank.device.name, "ranks": args.ranks, "width": args.width, "calls": CALLS, "us": {}
    }  # fmt: skip
    began = time.monotonic()
    result["checked"] = check(rank, args.calls)
    say(
        f"{result['checked']} sums are right, the same on every rank and in a graph: {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for what, found in measured(rank):
        result["us"][what] = found
        say(f"{what}: {found[0]:.2f} us", flush=True)
    if args.json is not None and number == 0:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    rank.gpus.close()


def prepare(rank: Rank) -> None:
    """Compile all kernels, in this process of every rank."""
    null, plan = Arena(Device("null"), None), NullPack(rank.target)
    x, y, normed = (null.alloc((max(ROWS), rank.width), bfloat16) for _ in range(3))
    specs = {}
    for weight in (null.alloc((rank.width,), bfloat16), null.alloc((rank.width,), float32)):
        for way in WAYS.values():
            for add, norm in ((True, None), (True, Normed(normed, weight, EPS)), (False, None)):
                for command in sum_by(way, rank.target, x, y, rank.size, add=add, normed=norm):
                    if hasattr(command, "spec"):
                        specs[command.spec] = None
    wide, part = (null.alloc((8, n), float32) for n in (VOCABULARY, VOCABULARY // rank.size))
    gather_columns(plan, out=wide, x=part, ranks=rank.size)
    rank.store.prepare([*specs, *plan.specs()], lambda done, total: None)
    rank.shared.timeout_s = 300
    rank.shared.exchange(np.zeros(1))


def check(rank: Rank, calls: int) -> int:
    """Sums of random numbers of rows in random order, in all ways by turns, now and then with one rank late; every
    rank's bits are compared. Then a graph of sums is replayed."""
    order, width = np.random.default_rng(1), rank.width
    x, y, out = (rank.tensor(512, width) for _ in range(3))
    gains = [rank.tensor(width), rank.tensor(width, dtype=float32)]
    gain = order.standard_normal(width).astype(bfloat16)
    for one in gains:
        one.copy_from(gain.astype(one.dtype), rank.stream)
    ways = list(WAYS.values())
    base = np.random.default_rng(7).standard_normal((512 + rank.size, width), np.float32)
    for call in range(calls):
        rows = int(
            order.choice(
                [1, 1, 2, 3, 8, 16, 31, 64, 128, 129, 512],
                p=[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03],
            )
        )
        way, late, wide = (
            ways[int(order.integers(len(ways)))],
            int(order.integers(8 * rank.size)),
            int(order.integers(2)),
        )
        scales = order.uniform(0.5, 2, rank.size + 1).astype(np.float32)
        parts = [(base[r : r + rows] * scales[r]).astype(bfloat16) for r in range(rank.size)]
        residual = (base[rank.size : rank.size + rows][:, ::-1] * scales[-1]).astype(bfloat16)
        parts[0][0, :64] = 0
        x[:rows].copy_from(residual, rank.stream)
        y[:rows].copy_from(parts[rank.rank], rank.stream)
        if late == rank.rank:
            rank.stream.synchronize()
            time.sleep(0.005)
        rank.sum(way, x[:rows], y[:rows], Normed(out[:rows], gains[wide], EPS))
        rank.stream.synchronize()
        found, normed = np.array(x[:rows].numpy()), np.array(out[:rows].numpy())
        total = sum((part.astype(np.float32) for part in parts[1:]), parts[0].astype(np.float32))
        want = total + residual.astype(np.float32)
        if way.kind == "nccl":  # rounds the sum too
            error = np.abs(found.astype(np.float32) - want)
            assert (error <= 0.02 * np.abs(want) + 0.04).all(), (call, rows, error.max())
        else:
            assert (found == want.astype(bfloat16)).all(), (call, way, rows)
        good = rms_norm(found, gain.astype((bfloat16, np.float32)[wide]), EPS)
        error = np.abs(normed.astype(np.float32) - good)
        assert (error <= 0.01 * np.abs(good) + 1e-3).all(), (call, way, rows, error.max())
        digest = np.frombuffer(hashlib.sha256(found.tobytes() + normed.tobytes()).digest(), np.uint8)
        assert all((other == digest).all() for other in rank.shared.exchange(digest)), (call, way, rows)
    return calls + replayed(rank, x, y, out, gains[0])


def replayed(rank: Rank, x: Tensor, y: Tensor, out: Tensor, gain: Tensor) -> int:
    """A graph of a sum onto x in each way of pushing, over and over: x is what repeated addition makes."""
    ways, times, rows = [way for way in WAYS.values() if way.kind != "nccl"], 50, 128
    graphs = StepGraphs(rank.device, rank.stream, capture=True)
    graphs.record(
        "sums", lambda: [rank.sum(w, x[:rows], y[:rows], Normed(out[:rows], gain, EPS)) for w in ways]
    )
    x.zero_(rank.stream)
    parts = [np.full((rows, rank.width), 2.0**-r, bfloat16) for r in range(rank.size)]
    y[:rows].copy_from(parts[rank.rank], rank.stream)
    rank.stream.synchronize()
    rank.shared.exchange(np.zeros(1))
    want, total = np.float32(0), np.float32(sum(2.0**-r for r in range(rank.size)))
    for turn in range(times):
        if turn % 10 == rank.rank:
            time.sleep(0.003)
        graphs.launch("sums")
        for _ in ways:
            want = np.float32(bfloat16.type(want + total))
    rank.stream.synchronize()
    assert (np.array(x[:rows].numpy()).astype(np.float32) == want).all(), want
    graphs.close()
    return times * len(ways)


def measured(rank: Rank) -> Iterator[tuple[str, list[float]]]:
    """Times by size and way."""
    gain = rank.tensor(rank.width)
    x, y, out = (rank.tensor(max(ROWS), rank.width) for _ in range(3))
    for rows in ROWS:
        for name, way in WAYS.items():
            for norm in (None, Normed(out[:rows], gain, EPS)):
                if norm is None and rows not in (1, 128, 2048):
                    continue
                what = (
                    f"sum{' and norm' if norm else ''}, {name}, {rows} rows, {2 * rows * rank.width >> 10} KB"
                )
                yield what, timed(rank, partial(rank.sum, way, x[:rows], y[:rows], norm))
    for rows in (1, 8, 32, 128):
        part = rank.tensor(rows, VOCABULARY // rank.size, dtype=float32)
        wide = rank.tensor(rows, VOCABULARY, dtype=float32)
        work = partial(gather_columns, rank.pack, out=wide, x=part, ranks=rank.size)
        yield f"gather_columns of logits, {rows} rows", timed(rank, work)


def timed(rank: Rank, call: Callable[[], None]) -> list[float]:
    """Microseconds a call in a graph of CALLS: the median, and all repeats."""
    call()
    rank.stream.synchronize()
    graphs = StepGraphs(rank.device, rank.stream, capture=True)
    graphs.record("calls", lambda: [call() for _ in range(CALLS)])
    begin, end, found = Event(rank.device, timing=True), Event(rank.device, timing=True), []
    for _ in range(REPEATS):
        rank.shared.exchange(np.zeros(1))
        begin.record(rank.stream)
        graphs.launch("calls")
        end.record(rank.stream)
        rank.stream.synchronize()
        found.append(round(1e6 * end.elapsed_s(begin) / CALLS, 3))
    graphs.close()
    return [statistics.median(found), *found]


if __name__ == "__main__":
    main()
