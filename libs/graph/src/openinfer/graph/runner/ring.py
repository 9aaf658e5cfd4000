"""Ring: messages from one process to others of the same host, over shared memory."""

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence

import numpy as np

from openinfer.graph.rows import Places
from openinfer.kernels import RankLost
from openinfer.tensor import memory_fence

Words = np.ndarray[tuple[int], np.dtype[np.int32]]

_LINE = 64  # bytes; a counter of its own cache line for each process
_WRAP = -1  # instead of a length: the next message is at the beginning
_POLL_MS = 100
"""A reader that sleeps looks again after this time: a wake-up can be missed, because no instruction orders the write
of a message before the look at who sleeps."""


class Ring:
    """Messages of int32 words from a writer to `readers`, each of which gets all of them in order.

    file: of os.memfd_create, the same for all processes. The class maps it and leaves the descriptor open.
    capacity: of the messages that a reader has not taken, in words. Counters of words only grow, and their place in
    the ring is the rest modulo `capacity`.
    """

    def __init__(self, file: int, readers: int, *, capacity: int = 1 << 20) -> None:
        self.readers, self.capacity = readers, capacity
        header = _LINE * (1 + 2 * readers)
        os.ftruncate(file, header + 4 * capacity)  # the second process' call changes nothing
        # All pages are mapped now, because the first look at a page would hold a step up, in each process.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = memoryview(mmap.mmap(file, header + 4 * capacity, flags))
        self._lines = memory[:header].cast("q")  # the head; by reader its tail, and whether it sleeps
        self._memory = memory[header:].cast("i")
        self._words = np.frombuffer(self._memory, np.int32)

    def _tail(self, reader: int) -> int:
        return _LINE // 8 * (1 + 2 * reader)

    def _sleeps(self, reader: int) -> int:
        return _LINE // 8 * (2 + 2 * reader)


class Writer:
    """The sending end. `bells`: an eventfd a reader, which wakes it."""

    def __init__(
        self, ring: Ring, bells: Sequence[int], *, lost: Callable[[], bool], timeout_s: float = 60.0
    ) -> None:
        self._ring = ring
        self._sleepers = [(ring._sleeps(reader), bell) for reader, bell in enumerate(bells)]
        self._lost, self._timeout_s = lost, timeout_s
        self._head = self._free_until = 0

    def send(self, numbers: Sequence[int], *arrays: Words | Places) -> None:
        """Publish a message: one number or more, and the words of `arrays`; of wider integers, the lower words. Waits
        for room. Raises RankLost where a reader does not take messages within the time limit, or lost() is true."""
        ring, words = self._ring, self._ring._memory
        count = 1 + len(numbers) + sum(map(len, arrays))
        if 2 * count > ring.capacity:  # beside what is skipped at the end it must fit an empty ring
            raise ValueError(f"a message of {count} words; a ring of {ring.capacity} takes half as many")
        at = self._head % ring.capacity
        skipped = ring.capacity - at if at + count > ring.capacity else 0
        if self._head + skipped + count > self._free_until:
            self._wait_for(self._head + skipped + count)
        if skipped:
            words[at], at = _WRAP, 0
        words[at], end = count, at + 1
        for number in numbers:
            words[end] = number
            end += 1
        for array in arrays:
            begin, end = end, end + len(array)
            ring._words[begin:end] = array
        self._head += skipped + count
        memory_fence()  # the words before the head
        ring._lines[0] = self._head
        lines = ring._lines
        for sleeps, bell in self._sleepers:
            if lines[sleeps]:
                lines[sleeps] = 0
                os.eventfd_write(bell, 1)

    def _wait_for(self, end: int) -> None:
        """Wait until every reader has taken what the words before `end` overwrite."""
        ring, deadline = self._ring, time.monotonic() + self._timeout_s
        while True:
            tails = [ring._lines[ring._tail(reader)] for reader in range(ring.readers)]
            self._free_until = min(tails) + ring.capacity
            if end <= self._free_until:
                return
            slowest = tails.index(min(tails))
            if self._lost() or time.monotonic() > deadline:
                raise RankLost(
                    f"follower {slowest} takes no messages; it has ended, or it hangs (limit {self._timeout_s:g} s)"
                )
            os.sched_yield()


class RingReader:
    """The end of reader `index`. bell: its eventfd. spin_s: how long it looks for a message before it sleeps."""

    def __init__(self, ring: Ring, index: int, bell: int, *, spin_s: float) -> None:
        self._ring, self._index, self._spin_s = ring, index, spin_s
        self._tail = 0
        self._bell = bell
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def take(self) -> tuple[int, Words]:
        """The next message: its first number, and a copy of what follows. Waits for one."""
        ring = self._ring
        if ring._lines[0] == self._tail:
            self._wait()
        memory_fence()  # the head before the words
        at = self._tail % ring.capacity
        if ring._memory[at] == _WRAP:
            self._tail += ring.capacity - at
            at = 0
        count, number = ring._memory[at], ring._memory[at + 1]
        words = ring._words[at + 2 : at + count].copy()
        self._tail += count
        memory_fence()  # the copy before the writer may overwrite it
        ring._lines[ring._tail(self._index)] = self._tail
        return number, words

    def _wait(self) -> None:
        lines, sleeps = self._ring._lines, self._ring._sleeps(self._index)
        until = time.monotonic() + self._spin_s
        while lines[0] == self._tail:
            if time.monotonic() < until:
                os.sched_yield()
                continue
            lines[sleeps] = 1
            if lines[0] == self._tail and self._poll.poll(_POLL_MS):
                os.eventfd_read(self._bell)
        lines[sleeps] = 0
