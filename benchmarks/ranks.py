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
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    all_reduce,
    gather_columns,
    reduce_add,
)
from openinfer.tensor import Arena, Device, Event, NcclRanks, Stream, Tensor, bfloat16, float32, uint8

WIDTH, VOCABULARY, CALLS, REPEATS = 4096, 151936, 100, 9
ROWS = (1, 2, 8, 16, 32, 64, 128, 512, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--boot", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.boot is not None:
        rank, size, memory, *links = map(int, args.boot.split(","))
        run(rank, size, memory, [socket.socket(fileno=fd) for fd in links], None)
        return
    memory, pairs = os.memfd_create("ranks"), [socket.socketpair() for _ in range(args.ranks - 1)]
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--boot", f"{rank},{args.ranks},{memory},{theirs.fileno()}"],
            pass_fds=(memory, theirs.fileno()),
        )
        for rank, (_, theirs) in enumerate(pairs, start=1)
    ]
    run(0, args.ranks, memory, [ours for ours, _ in pairs], args.json)
    assert [process.wait(60) for process in others] == [0] * len(others)


def run(rank: int, size: int, memory: int, links: list[socket.socket], out: Path | None) -> None:
    shared, device = SharedMemory(memory, rank, size), Device("cuda", rank)
    device.activate()
    mine = NcclRanks.unique_id() if rank == 0 else bytes(128)
    unique_id = shared.exchange(np.frombuffer(mine, np.uint8))[0].tobytes()
    ranks = GpuRanks(device, NcclRanks(device, unique_id, rank, size), 2 * WIDTH)
    stream, arena = Stream(device), Arena(device, 2 << 30)
    ranks.connect(links, stream)
    shared.exchange(np.zeros(1))
    target, store = Target.of(device, cublas=False), Store(device.arch)
    target = Target(target.arch, target.num_sms, gpu=target.gpu, rank=rank)
    plan = NullPack(target)
    null = Arena(Device("null"), None)
    for rows in ROWS:
        x, y = (null.alloc((rows, WIDTH), bfloat16) for _ in range(2))
        wide = null.alloc((min(rows, 128), VOCABULARY), float32)
        part = null.alloc((min(rows, 128), VOCABULARY // size), float32)
        reduce_add(plan, x=x, y=y, ranks=size)
        all_reduce(plan, out=x, x=x, ranks=size)
        gather_columns(plan, out=wide, x=part, ranks=size)
        nccl = NullPack(replace(target, interpreted=True))
        reduce_add(nccl, x=x, y=y, ranks=size)
        plan.calls += nccl.calls
    store.prepare(plan.specs(), lambda done, total: None)
    scratch = arena.alloc((plan.workspace_bytes(zeroed=False) + 256,), uint8)
    pack = LaunchPack(target, CudaDriver(device, stream, store, None, ranks), scratch, None)
    say = print if rank == 0 else lambda *words, **named: None
    result: dict[str, Any] = {"device": device.name, "ranks": size, "width": WIDTH, "calls": CALLS, "us": {}}
    result["checked"] = check(pack, scratch, arena, stream, shared, rank, size)
    say("sums of", result["checked"], "calls are right, and the same on every rank", flush=True)
    for name in ("ours", "nccl"):
        timing = measured(name, device, stream, shared, pack, scratch, size)
        for what, found in timing:
            result["us"][what] = found
            say(f"{what}: {found[0]:.2f} us", flush=True)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.close()


def measured(
    name: str,
    device: Device,
    stream: Stream,
    shared: SharedMemory,
    pack: LaunchPack,
    scratch: Tensor,
    size: int,
) -> Iterator[tuple[str, list[float]]]:
    """Times by size, with our own kernel at every size or with NCCL alone."""
    # An interpreted target has no kernel that pushes, and the driver runs its commands like any other's.
    target = replace(pack.target, interpreted=name == "nccl", batch_invariant=name == "ours")
    fresh, arena = LaunchPack(target, pack.driver, scratch, None), Arena(device, 1 << 30)
    for rows in ROWS:
        x, y = (tensor(arena, stream, np.zeros((rows, WIDTH)), bfloat16) for _ in range(2))
        work = partial(reduce_add, fresh, x=x, y=y, ranks=size)
        yield (
            f"reduce_add {name}, {rows} rows, {2 * rows * WIDTH >> 10} KB",
            time(device, stream, shared, work),
        )
        if name == "nccl" and rows <= 128:
            part = tensor(arena, stream, np.zeros((rows, VOCABULARY // size)), float32)
            wide = tensor(arena, stream, np.zeros((rows, VOCABULARY)), float32)
            work = partial(gather_columns, fresh, out=wide, x=part, ranks=size)
            yield f"gather_columns of logits, {rows} rows", time(device, stream, shared, work)


def tensor(arena: Arena, stream: Stream, array: np.ndarray[Any, Any], dtype: Any) -> Tensor:
    made = arena.alloc(array.shape, dtype)
    made.copy_from(np.ascontiguousarray(array, dtype), stream)
    stream.synchronize()
    return made


def check(
    pack: LaunchPack,
    scratch: Tensor,
    arena: Arena,
    stream: Stream,
    shared: SharedMemory,
    rank: int,
    size: int,
) -> int:
    """Sums of random numbers of rows in random order, eagerly; every rank's bits are compared."""
    order, calls = np.random.default_rng(1), 300
    invariant = replace(
        pack.target, batch_invariant=True
    )  # pushes of any size, by turns with the usual choice
    packs = (pack, LaunchPack(invariant, pack.driver, scratch, None))
    x, y = (arena.alloc((2048, WIDTH), bfloat16) for _ in range(2))
    for call in range(calls):
        rows = int(order.choice(ROWS))
        parts = [
            np.random.default_rng([call, r]).standard_normal((rows, WIDTH), np.float32).astype(bfloat16)
            for r in range(size)
        ]
        residual = (
            np.random.default_rng([call, 99]).standard_normal((rows, WIDTH), np.float32).astype(bfloat16)
        )
        parts[0][0, :64] = 0
        x[:rows].copy_from(residual, stream)
        y[:rows].copy_from(parts[rank], stream)
        reduce_add(packs[call % 2], x=x[:rows], y=y[:rows], ranks=size)
        stream.synchronize()
        found = np.array(x[:rows].numpy())
        total = sum((part.astype(np.float32) for part in parts[1:]), parts[0].astype(np.float32))
        want = (total + residual.astype(np.float32)).astype(np.float32)
        error = np.abs(found.astype(np.float32) - want)
        assert (error <= 0.02 * np.abs(want) + 0.04).all(), (call, rows, error.max())
        if call % 2 or rows <= 16:  # ours: rounded once
            assert (found == want.astype(bfloat16)).mean() > 0.9999, (call, rows)
        digest = np.frombuffer(hashlib.sha256(found.tobytes()).digest(), np.uint8)
        assert all((other == digest).all() for other in shared.exchange(digest)), (call, rows)
    return calls


def time(device: Device, stream: Stream, shared: SharedMemory, call: Callable[[], None]) -> list[float]:
    """Microseconds a call in a graph of CALLS: the median, and all repeats."""
    call()
    stream.synchronize()
    graphs = StepGraphs(device, stream, capture=True)
    graphs.record("calls", lambda: [call() for _ in range(CALLS)])
    begin, end, found = Event(device, timing=True), Event(device, timing=True), []
    for _ in range(REPEATS):
        shared.exchange(np.zeros(1))
        begin.record(stream)
        graphs.launch("calls")
        end.record(stream)
        stream.synchronize()
        found.append(round(1e6 * end.elapsed_s(begin) / CALLS, 3))
    graphs.close()
    return [statistics.median(found), *found]


if __name__ == "__main__":
    main()
