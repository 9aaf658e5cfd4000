"""Exchanges among the GPUs of one host: right sums, the same bits on every rank and rerun, and microseconds in a graph.

`python benchmarks/ranks.py --ranks 2 [--json FILE]` starts a process a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.graph import StepGraphs
from openinfer.kernels import NullPack, gather_columns
from openinfer.kernels.measure.exchange_tuner import CALLS, EPS, WAYS, ExchangeRank, other_ranks
from openinfer.kernels.op.reference import rms_norm
from openinfer.kernels.ranks.exchange import NCCL, Normed, columns_of_ranks, sum_of_ranks
from openinfer.kernels.store.tables import Exchange
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32

VOCABULARY = 151936
ROWS = (1, 8, 32, 128, 512, 2048, 4096, 8192)
NAMES = {way: f"{way.kind}, {way.warps} warps" for way in WAYS} | {NCCL: "NCCL"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=1000, help="checked calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--boot", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.boot is not None:
        run(args, ExchangeRank.joined(args.boot, args.width))
        return
    with other_ranks(args.ranks, [sys.executable, __file__, *sys.argv[1:], "--boot"]) as (memory, links):
        run(args, ExchangeRank(0, args.ranks, args.width, memory, links))


def run(args: argparse.Namespace, rank: ExchangeRank) -> None:
    prepare(rank)
    say = print if rank.rank == 0 else lambda *words, **named: None
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
    if args.json is not None and rank.rank == 0:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    rank.close()


def prepare(rank: ExchangeRank) -> None:
    """Compile all kernels, in this process of every rank."""
    null, plan = Arena(Device("null"), None), NullPack(rank.target)
    x, y, normed = (null.alloc((max(ROWS), rank.width), bfloat16) for _ in range(3))
    specs = {}
    for weight in (null.alloc((rank.width,), bfloat16), null.alloc((rank.width,), float32)):
        for way in WAYS:
            for add, norm in ((True, None), (True, Normed(normed, weight, EPS)), (False, None)):
                for command in sum_of_ranks(rank.target, x, y, rank.size, add=add, normed=norm, way=way):
                    if hasattr(command, "spec"):
                        specs[command.spec] = None
    wide, part = (null.alloc((8, n), float32) for n in (VOCABULARY, VOCABULARY // rank.size))
    for how in (rank.target, replace(rank.target, interpreted=True)):
        gather_columns(NullPack(how, plan.calls), out=wide, x=part, ranks=rank.size)
    rank.prepare([*specs, *plan.specs()])


def check(rank: ExchangeRank, calls: int) -> int:
    """Sums of random numbers of rows in random order, in all ways in turn, now and then with one rank late; every
    rank's bits are compared. Then a graph of sums is replayed."""
    order, width = np.random.default_rng(1), rank.width
    x, y, out = (rank.tensor(512, width) for _ in range(3))
    gains = [rank.tensor(width), rank.tensor(width, dtype=float32)]
    gain = order.standard_normal(width).astype(bfloat16)
    for one in gains:
        one.copy_from(gain.astype(one.dtype), rank.stream)
    base = np.random.default_rng(7).standard_normal((512 + rank.size, width), np.float32)
    for call in range(calls):
        rows = int(
            order.choice(
                [1, 1, 2, 3, 8, 16, 31, 64, 128, 129, 512],
                p=[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03],
            )
        )
        way, late, wide = (
            WAYS[int(order.integers(len(WAYS)))],
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
        if call % 4 == 0:
            check_columns(rank, x, out, call, rows)
        digest = np.frombuffer(hashlib.sha256(found.tobytes() + normed.tobytes()).digest(), np.uint8)
        assert all((other == digest).all() for other in rank.shared.exchange(digest)), (call, way, rows)
    return calls + replayed(rank, x, y, out, gains[0])


def check_columns(rank: ExchangeRank, x: Tensor, out: Tensor, call: int, rows: int) -> None:
    """Columns of all ranks side by side, between the sums."""
    width = 16 * (1 + call % 7)
    parts = [
        np.random.default_rng([call, r]).standard_normal((rows, width), np.float32) for r in range(rank.size)
    ]
    for part in parts:
        part[:, :3] = 0
    mine = Tensor(x.ptr, (rows, width), np.dtype(np.float32), x.device, owner=x)
    wide = Tensor(out.ptr, (rows, rank.size * width), np.dtype(np.float32), x.device, owner=out)
    mine.copy_from(parts[rank.rank], rank.stream)
    gather_columns(rank.pack, out=wide, x=mine, ranks=rank.size)
    rank.stream.synchronize()
    assert (np.array(wide.numpy()) == np.concatenate(parts, axis=1)).all(), (call, rows, width)


def replayed(rank: ExchangeRank, x: Tensor, y: Tensor, out: Tensor, gain: Tensor) -> int:
    """A graph of a sum onto x in each way of pushing, over and over: x is what repeated addition makes."""
    ways, times, rows = [way for way in WAYS if way.kind != "nccl"], 50, 128
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


def measured(rank: ExchangeRank) -> Iterator[tuple[str, list[float]]]:
    """Times by size and way."""
    gain = rank.tensor(rank.width)
    x, y, out = (rank.tensor(max(ROWS), rank.width) for _ in range(3))
    for rows in ROWS:
        for way, name in NAMES.items():
            for norm in (None, Normed(out[:rows], gain, EPS)):
                if norm is None and rows not in (1, 128, 2048):
                    continue
                what = (
                    f"sum{' and norm' if norm else ''}, {name}, {rows} rows, {2 * rows * rank.width >> 10} KB"
                )
                yield what, timed(rank, partial(rank.sum, way, x[:rows], y[:rows], norm))
    yield from behind(rank, x, y)
    for rows in (1, 8, 32, 128):
        part = rank.tensor(rows, VOCABULARY // rank.size, dtype=float32)
        wide = rank.tensor(rows, VOCABULARY, dtype=float32)
        for name, how in (("push", rank.target), ("NCCL", replace(rank.target, interpreted=True))):
            commands = list(columns_of_ranks(how, wide, part, rank.size))
            work = partial(rank.pack.submit, "columns", commands)
            yield f"columns of logits, {name}, {rows} rows", timed(rank, work)


def behind(rank: ExchangeRank, x: Tensor, y: Tensor) -> Iterator[tuple[str, list[float]]]:
    """Sums after a memset of 64 MB, on both ranks or alternating on one. That one is late, as in a step. The times
    are the same if a wait costs nothing else."""
    work, calls = rank.tensor(64 << 20, dtype=np.dtype(np.uint8)), itertools.count()

    def call(every: bool, way: Exchange, rows: int) -> None:
        if every or next(calls) % rank.size == rank.rank:
            work.zero_(rank.stream)
        rank.sum(way, x[:rows], y[:rows], None)

    for rows, way in itertools.product((1, 128, 512, 2048), (WAYS[0], NCCL)):
        for every, late in ((True, "no rank"), (False, "one rank")):
            what = f"memset and sum, {NAMES[way]}, {rows} rows, {late} late"
            yield what, timed(rank, partial(call, every, way, rows))


def timed(rank: ExchangeRank, call: Callable[[], None]) -> list[float]:
    """Microseconds a call: the median, and all repeats."""
    found = [round(1e6 * seconds, 3) for seconds in rank.seconds(call)]
    return [statistics.median(found), *found]


if __name__ == "__main__":
    main()
