"""The ranks of an engine: this process and those that run the same steps. A rank has a part of the weights."""

import mmap
import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.kernels import GpuRanks, SharedMemory
from openinfer.kernels.authoring import Adapters
from openinfer.tensor import Device, NcclRanks, Stream

Array = np.ndarray[Any, Any]

START_TIMEOUT_S = 3600.0
"""How long a rank waits for the others at start-up, where one may load or compile much longer than another."""
STEP_TIMEOUT_S = 60.0
PROBLEM_BYTES = 1024
"""Of the text of a problem that all ranks hear."""


@dataclass(slots=True)
class Ranks:
    """This process among those of an engine.

    shared: the memory over which they agree on sizes and, on CPUs, exchange arrays; None: there is one rank. links: of
    rank 0, a socket to each other rank; of another one, the socket to rank 0. gpus: the exchange among GPUs.
    """

    rank: int = 0
    size: int = 1
    shared: SharedMemory | None = None
    links: Sequence[socket.socket] = ()
    gpus: GpuRanks | None = field(default=None)
    staged: Array = field(default_factory=lambda: np.empty((0, 0)))
    """[places, values]: adapters that rank 0 hands to the others; all ranks see the same memory."""

    @classmethod
    def joined(cls, file: int, rank: int, size: int, links: Sequence[socket.socket]) -> "Ranks":
        """A rank of several, over the memory behind a descriptor."""
        return cls(rank, size, SharedMemory(file, rank, size, timeout_s=START_TIMEOUT_S), links)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks. Raises RankLost."""
        if self.shared is None:
            return list(numbers)
        return [int(n) for n in np.min(self.shared.exchange(np.array(numbers, np.int64)), axis=0)]

    def open(self, device: Device, stream: Stream, widths: Collection[int]) -> None:
        """Connect the GPUs of all ranks. widths: bytes of the rows that ranks add up. Raises RankLost, MissingExtra."""
        if self.shared is None or device.kind != "cuda":
            return
        mine = NcclRanks.unique_id() if self.rank == 0 else bytes(128)
        unique_id = self.shared.exchange(np.frombuffer(mine, np.uint8))[0].tobytes()
        (width,) = widths or {16}
        self.gpus = GpuRanks(device, NcclRanks(device, unique_id, self.rank, self.size), width)
        self.gpus.connect(self.links, stream)
        self.meet()

    def stage(self, adapters: Adapters | None) -> None:
        """Make the memory for adapters."""
        if self.shared is None or adapters is None:
            return
        shape = (adapters.sizes.places, adapters.num_values)
        if self.rank == 0:
            file = os.memfd_create("openinfer-adapters")
            os.ftruncate(file, shape[0] * shape[1] * adapters.dtype.itemsize)
            for link in self.links:
                socket.send_fds(link, [b"a"], [file])
        else:
            _, (file,), *_ = socket.recv_fds(self.links[0], 1, 1)
        self.staged = np.frombuffer(mmap.mmap(file, 0), adapters.dtype).reshape(shape)
        os.close(file)

    def meet(self) -> None:
        """Wait for all ranks. Raises RankLost."""
        if self.shared is not None:
            self.shared.exchange(np.zeros(1))

    def agree(self, problem: str) -> str:
        """The problem of the first rank that has one, the same on all ranks; "" for none. A rank may take long to know
        its own, and to do what all have agreed on: until `serve`. Raises RankLost."""
        if self.shared is None:
            return problem
        self.shared.timeout_s = START_TIMEOUT_S
        text = np.frombuffer(problem.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0"), np.uint8)
        texts = [one.tobytes().rstrip(b"\0").decode(errors="ignore") for one in self.shared.exchange(text)]
        found = next(filter(None, texts), "")
        if found:
            self.shared.timeout_s = STEP_TIMEOUT_S
        return found

    def serve(self) -> None:
        """Wait until all ranks are ready to serve; from then on a rank that is late is lost. Raises RankLost."""
        self.meet()
        if self.shared is not None:
            self.shared.timeout_s = STEP_TIMEOUT_S

    def abort(self) -> None:
        """A rank is lost: end what waits for it. From any thread."""
        if self.shared is not None:
            self.shared.abort()
        if self.gpus is not None:
            self.gpus.abort()

    def close(self) -> None:
        """Give the exchange up. The device must be idle."""
        if self.gpus is not None:
            self.gpus.close()
