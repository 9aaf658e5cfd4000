"""Measure the ways in which the GPUs of one host add up rows, for `tuning.choose_exchange`. Each rank is a process."""

import os
import socket
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from openinfer.kernels.errors import RankLost
from openinfer.kernels.op.launch import Launch, Spec
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.kernels.packs.cuda_driver import CudaDriver
from openinfer.kernels.ranks import SharedMemory
from openinfer.kernels.ranks.exchange import NCCL, Normed, sum_of_ranks
from openinfer.kernels.ranks.gpu_ranks import GpuRanks
from openinfer.kernels.store.cubins import Store
from openinfer.kernels.store.tables import Exchange
from openinfer.tensor import Arena, Device, Event, NcclRanks, Stream, Tensor, bfloat16, check, driver, uint8

WAYS = (Exchange("push", 16), Exchange("push", 8), Exchange("two_shot", 16), Exchange("two_shot", 8), NCCL)
CALLS, REPEATS, EPS = 100, 9, 1e-6
_ARENA_BYTES = 2 << 30
_SCRATCH_BYTES = 256 << 20


@contextmanager
def other_ranks(size: int, command: Sequence[str]) -> Iterator[tuple[int, list[socket.socket]]]:
    """Start ranks 1 to size - 1, each by `command` and a text for `ExchangeRank.joined`. Gives what rank 0 needs: the
    descriptor of their shared memory and a socket to each other rank. Raises RankLost where one of them fails."""
    memory, pairs = os.memfd_create("ranks"), [socket.socketpair() for _ in range(size - 1)]
    others = [
        subprocess.Popen(
            [*command, f"{rank},{size},{memory},{theirs.fileno()}"], pass_fds=(memory, theirs.fileno())
        )
        for rank, (_, theirs) in enumerate(pairs, start=1)
    ]
    try:
        yield memory, [ours for ours, _ in pairs]
        codes = [process.wait(60) for process in others]
        if any(codes):
            raise RankLost(f"the other ranks ended with exit codes {codes}")
    finally:
        for process in others:
            process.kill()
            process.wait()
        for pair in pairs:
            for end in pair:
                end.close()
        os.close(memory)


class ExchangeRank:
    """This process and its GPU among `size` that add up bf16 rows of `width`. Close it while all ranks are there."""

    def __init__(self, rank: int, size: int, width: int, memory: int, links: list[socket.socket]) -> None:
        self.rank, self.size, self.width = rank, size, width
        self.shared, self.device = SharedMemory(memory, rank, size, timeout_s=300.0), Device("cuda", rank)
        self.device.activate()
        mine = NcclRanks.unique_id() if rank == 0 else bytes(128)
        unique_id = self.shared.exchange(np.frombuffer(mine, np.uint8))[0].tobytes()
        self._gpus = GpuRanks(self.device, NcclRanks(self.device, unique_id, rank, size), 2 * width)
        self.stream, self.arena = Stream(self.device), Arena(self.device, _ARENA_BYTES)
        self._gpus.connect(links, self.stream)
        self.shared.exchange(np.zeros(1))
        self.target = replace(Target.of(self.device, cublas=False), rank=rank)
        self.store = Store(self.device.arch)
        scratch = self.arena.alloc((_SCRATCH_BYTES,), uint8)
        self.pack = LaunchPack(
            self.target, CudaDriver(self.device, self.stream, self.store, None, self._gpus), scratch, None
        )

    @classmethod
    def joined(cls, boot: str, width: int) -> "ExchangeRank":
        """A rank above 0, of the text that other_ranks gave to its process."""
        rank, size, memory, link = map(int, boot.split(","))
        return cls(rank, size, width, memory, [socket.socket(fileno=link)])

    def close(self) -> None:
        """Give the exchange up."""
        self.shared.exchange(np.zeros(1))
        self._gpus.close()

    def prepare(self, specs: Sequence[Spec]) -> None:
        """Compile kernels, and wait until every rank has done so."""
        self.store.prepare(list(specs), lambda done, total: None)
        self.shared.exchange(np.zeros(1))

    def tensor(self, *shape: int, dtype: np.dtype[Any] = bfloat16) -> Tensor:
        """Zeros."""
        made = self.arena.alloc(shape, dtype)
        made.zero_(self.stream)
        return made

    def sum(self, way: Exchange, x: Tensor, y: Tensor, normed: Normed | None) -> None:
        """x += the sum of all y in this way, and its norm."""
        commands = sum_of_ranks(self.target, x, y, self.size, normed=normed, way=way)
        self.pack.submit("sum", list(commands))

    def sums(self, rows: Sequence[int]) -> Iterator[tuple[int, dict[Exchange, float]]]:
        """Seconds of x += the sum of all y, and its norm, by rows and way."""
        x, y, out = (self.tensor(max(rows), self.width) for _ in range(3))
        normed = Normed(out, self.tensor(self.width), EPS)
        commands = (
            c for way in WAYS for c in sum_of_ranks(self.target, x, y, self.size, normed=normed, way=way)
        )
        self.prepare(list(dict.fromkeys(c.spec for c in commands if isinstance(c, Launch))))
        for count in rows:
            norm = normed._replace(out=out[:count])
            yield count, {way: self._seconds(way, x[:count], y[:count], norm) for way in WAYS}

    def _seconds(self, way: Exchange, x: Tensor, y: Tensor, normed: Normed) -> float:
        return statistics.median(self.seconds(lambda: self.sum(way, x, y, normed)))

    def seconds(self, call: Callable[[], None]) -> list[float]:
        """Seconds of a call in a graph of CALLS: of each repeat, that of the slowest rank."""
        call()
        self.stream.synchronize()
        cu, handle = driver(), self.stream.handle
        check(cu.cuStreamBeginCapture(handle, cu.CUstreamCaptureMode(1)), "cuStreamBeginCapture")
        for _ in range(CALLS):
            call()
        graph = check(cu.cuStreamEndCapture(handle), "cuStreamEndCapture")
        executable = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        start, end, found = Event(self.device, timing=True), Event(self.device, timing=True), []
        for _ in range(REPEATS):
            self.shared.exchange(np.zeros(1))
            start.record(self.stream)
            check(cu.cuGraphLaunch(executable, handle), "cuGraphLaunch")
            end.record(self.stream)
            self.stream.synchronize()
            found.append(end.elapsed_s(start) / CALLS)
        check(cu.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
        check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
        slowest: list[float] = np.max(self.shared.exchange(np.array(found)), axis=0).tolist()
        return slowest


def exchange_entry(way: Exchange) -> Mapping[str, Any]:
    """A way as the tables have it."""
    return {"kind": way.kind} if way.kind == "nccl" else {"kind": way.kind, "warps": way.warps}
