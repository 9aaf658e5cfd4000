"""Ranks of a model, and what they exchange: here between processes on a CPU, over shared memory."""

import mmap
import os
import time
from typing import Any, Protocol

import numpy as np

from openinfer.kernels.errors import LaunchError, RankLost
from openinfer.tensor import memory_fence

Array = np.ndarray[Any, Any]

_LINE = 64  # bytes; a counter of its own cache line for each rank
_SLOT_BYTES = 1 << 20
# A rank that starts, or loads weights, comes late: the others must leave it the cores.
_SPIN_S, _NAP_S = 0.001, 0.0002


class Communicator(Protocol):
    """The ranks of a model: the number of this process, the count of ranks, and an exchange of bytes."""

    rank: int
    size: int

    def exchange(self, array: Array) -> list[Array]:
        """Copies of the arrays of all ranks, by rank. Every rank calls it with an array of the same shape and dtype."""


def member(communicator: Communicator | None, what: str, ranks: int) -> Communicator:
    """The communicator. Raises LaunchError if the pack has no communicator, or one of another number of ranks."""
    if communicator is None:
        raise LaunchError(f"{what} is over {ranks} ranks and this pack has no communicator; give it one")
    if communicator.size != ranks:
        raise LaunchError(f"{what} is over {ranks} ranks; the communicator has {communicator.size}")
    return communicator


def sum_over(communicator: Communicator | None, x: Array) -> Array:
    """The float32 sum of the x of all ranks, in their order; of this process alone without a communicator."""
    if communicator is None:
        return x.astype(np.float32)
    first, *others = communicator.exchange(x)
    total = first.astype(np.float32)
    for part in others:
        total += part.astype(np.float32)
    return total


class SharedMemory:
    """A communicator of `size` processes of one host, over the memory behind a file descriptor (os.memfd_create).

    Every rank has the same file open and gives the same `size` and `slot_bytes`; the class maps the file and leaves the
    descriptor open. Two slots a rank take turns, so a rank may write its next array while others still read the one
    before. Exchange from one thread; `abort` may come from any thread or process that has the memory.

    `exchange` raises RankLost where a rank does not come within `timeout_s`, or once a rank has called `abort`.
    """

    def __init__(
        self, file: int, rank: int, size: int, *, slot_bytes: int = _SLOT_BYTES, timeout_s: float = 60.0
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: ranks are 0 to size - 1")
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._turn = 0
        counters = _LINE * (size + 1)
        nbytes = counters + 2 * size * slot_bytes
        os.ftruncate(file, nbytes)  # new bytes are zero; the second rank's call changes nothing
        raw = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
        lines = raw[:counters].view(np.int64)[:: _LINE // 8]
        self._arrived, self._aborted = lines[:size], lines[size:]
        self._slots = raw[counters:].reshape(2, size, slot_bytes)

    @property
    def aborted(self) -> bool:
        """Whether a rank has called `abort`."""
        return bool(self._aborted[0])

    def abort(self) -> None:
        """End the exchanges of all ranks, those that wait now and all later ones, with RankLost."""
        self._aborted[0] = 1

    def exchange(self, array: Array) -> list[Array]:
        """See Communicator."""
        mine = np.ascontiguousarray(array)
        out = [np.empty_like(mine) for _ in range(self.size)]
        source, targets = _bytes(mine), [_bytes(a) for a in out]
        step = self._slots.shape[2]
        for start in range(0, mine.nbytes, step):
            part = slice(start, min(start + step, mine.nbytes))
            slots = self._slots[self._turn % 2]
            slots[self.rank, : part.stop - start] = source[part]
            self._meet()
            for target, slot in zip(targets, slots, strict=True):
                target[part] = slot[: part.stop - start]
        return out

    def _meet(self) -> None:
        """Wait until every rank has written its slot of this turn."""
        self._turn += 1
        memory_fence()  # the slot's bytes before the counter
        self._arrived[self.rank] = self._turn
        start = time.monotonic()
        while (late := np.flatnonzero(self._arrived < self._turn)).size:
            if self.aborted:
                raise RankLost(f"the exchange of {self.size} ranks was aborted: one of them is lost")
            waited_s = time.monotonic() - start
            if waited_s > self.timeout_s:
                raise RankLost(
                    f"rank {late[0]} of {self.size} did not come to exchange {self._turn} within "
                    f"{self.timeout_s:g} s; it has ended, or it ran other collectives than rank {self.rank}"
                )
            if waited_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        memory_fence()  # the counters before the slots' bytes


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
