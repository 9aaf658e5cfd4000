"""Mover: copies between blocks and records, on two streams of their own, for one rank or several.

With several ranks a record has a part from each, in memory that all their processes map. The first rank keeps the books
and tells the others what to copy; a batch of copies has ended when all ranks have done theirs.
"""

import itertools
import logging
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from openinfer.tensor import Device, Event, PinnedBuffer, Stream, TensorError, memory_fence
from openinfer.tensor.handover import sealed_file

from .layout import ALIGNMENT, Layout, huge

log = logging.getLogger("openinfer.kvpool")

Array = np.ndarray[Any, Any]

Kind = Literal["d2h", "swap", "h2d"]
"""d2h: from blocks to records. swap: the same, from blocks that a load writes next. h2d: from records to blocks."""

_LINE = 8
"""Counters of 8 bytes from one rank's to the next: a cache line each."""
_RUN = 32
"""Copies of a swap that have one event. A load may write these blocks while later ones are still on their way out."""
_MARKS = 64


class TierCopy(NamedTuple):
    """A block of a group, and the address of its record."""

    group: int
    block: int
    record: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A batch of copies under way. number: of the batch, from 1 on."""

    event: Event
    number: int


class SharedRecords:
    """Memory for records that several processes map, behind the descriptor of a sealed file, which the class copies.

    They are the processes of `ranks` ranks, or of engines of one host. `done`: the batches that each rank has done.
    `records`: uint8 [nbytes], at `offset` of the file. The class maps it, and the processes fill it.
    """

    offset = ALIGNMENT

    def __init__(self, file: int, ranks: int, nbytes: int) -> None:
        self.file = os.dup(file)
        weakref.finalize(self, os.close, self.file)
        pages = mmap.mmap(file, self.offset + nbytes)
        huge(pages)
        self._memory = np.frombuffer(pages, np.uint8)
        self.done = self._memory[: self.offset].view(np.int64)[: ranks * _LINE : _LINE]
        self.records = self._memory[self.offset :]

    @classmethod
    def new(cls, nbytes: int, ranks: int = 1) -> "SharedRecords":
        """Fresh memory, whose size stays: a process that maps it is safe from the others."""
        file = sealed_file("openinfer-records", cls.offset + nbytes)
        try:
            return cls(file, ranks, nbytes)
        finally:
            os.close(file)

    @property
    def ptr(self) -> int:
        """The address of the records in this process, a multiple of 4,096."""
        return int(self.records.ctypes.data)


class Others:
    """The ranks after the first. tell: gives them the kind of a batch and its copies, as lists of group, block and
    place in the records; it raises RankLost where one is gone. lost: whether one is gone: its copies never end."""

    def __init__(
        self,
        shared: SharedRecords,
        tell: Callable[[str, list[list[int]]], None],
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shared, self._tell, self.lost = shared, tell, lost

    def tell(self, kind: Kind, copies: Sequence[TierCopy]) -> None:
        """They make these copies too."""
        start = self.shared.ptr
        self._tell(kind, [[group, block, record - start] for group, block, record in copies])

    @property
    def done(self) -> int:
        """Batches that all of them have done."""
        done = int(self.shared.done[1:].min())
        memory_fence()  # the counters before the records
        return done


class Mover:
    """Copies of one rank. steps: the stream of the steps.

    A copy from a block waits for nothing. The stream of the steps waits for it. It does not wait for a swap,
    because no step has these blocks before the load has ended; so swaps have a stream of their own. A copy to a
    block waits for the copies from it and to its record. So both directions of the link are busy at once. `others`:
    of the first rank of several. after_steps: copies wait for the steps before them. A later rank needs that,
    because its steps may end after those of the first.
    """

    def __init__(
        self, layout: Layout, steps: Stream, others: Others | None = None, *, after_steps: bool = False
    ) -> None:
        self._layout, self._steps, self._others = layout, steps, others
        self._streams: dict[Kind, Stream] = {kind: Stream(steps.device) for kind in ("d2h", "swap", "h2d")}
        self._saved = Event(steps.device)  # all copies from blocks so far, but for swaps
        # Used again and again, the oldest first.
        self._marks = deque(Event(steps.device) for _ in range(_MARKS))
        self._swapped: dict[tuple[int, int] | int, Event] = {}  # by block and by record: after the copy out
        self._stepped = Event(steps.device) if after_steps else None
        self._idle: list[Event] = []
        self._number = 0

    def copy(self, kind: Kind, copies: Sequence[TierCopy]) -> Ticket:
        stream = self._streams[kind]
        if self._stepped is not None:
            self._stepped.record(self._steps)
            stream.wait(self._stepped)
        if kind == "h2d":
            stream.wait(self._saved)
        for start in range(0, len(copies), _RUN):
            self._copy_run(stream, kind, copies[start : start + _RUN])
        if kind == "d2h":
            self._saved.record(stream)
            self._steps.wait(self._saved)
        if self._others is not None:
            self._others.tell(kind, copies)
        self._number += 1
        event = self._idle.pop() if self._idle else Event(stream.device)
        event.record(stream)
        return Ticket(event, self._number)

    def _copy_run(self, stream: Stream, kind: Kind, copies: Sequence[TierCopy]) -> None:
        ends = [end for group, block, record in copies for end in ((group, block), record)]
        if kind == "h2d":
            marks = {id(mark): mark for end in ends if (mark := self._swapped.pop(end, None)) is not None}
            for mark in marks.values():
                stream.wait(mark)
        for group, block, record in copies:
            self._layout.copy(stream, group, block, record, "h2d" if kind == "h2d" else "d2h")
        if kind == "swap":
            mark = self._marks[0]  # recorded again, it stands for more copies, which is right too
            self._marks.rotate(-1)
            mark.record(stream)
            self._swapped.update(dict.fromkeys(ends, mark))

    def ended(self, ticket: Ticket) -> bool:
        """Whether a batch has ended. Do not ask again once it has."""
        if not ticket.event.query() or (self._others is not None and self._others.done < ticket.number):
            return False
        self._idle.append(ticket.event)
        return True

    @property
    def lost(self) -> bool:
        """Whether a rank is gone. Its copies never end."""
        return self._others is not None and self._others.lost()

    def wait(self, ticket: Ticket) -> None:
        """Wait for this rank's copies of a batch. From any thread."""
        ticket.event.synchronize()
        self._idle.append(ticket.event)

    def synchronize(self) -> None:
        """Wait for this rank's copies."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for this rank's copies and give everything back. Tickets are void."""
        for stream in self._streams.values():
            stream.close()
        for event in (*self._idle, *self._marks, self._saved, *([self._stepped] if self._stepped else [])):
            event.close()


class Copier:
    """The copies of rank `rank` above 0, which the first rank tells it. layout: of its part of the records. pieces:
    those of the first rank's tiers. saves: its blocks are copied to records too; False: all ranks hold the cache
    alike, and the records are the first rank's.

    A thread locks the memory for the device, piece by piece: a device refuses a copy that begins in one and ends in
    another. Copies before that are right and slow. Another thread counts the batches that have ended.
    """

    def __init__(
        self,
        layout: Layout,
        steps: Stream,
        shared: SharedRecords,
        rank: int,
        pieces: Sequence[int],
        *,
        saves: bool,
    ) -> None:
        self._mover, self._shared, self._rank = Mover(layout, steps, after_steps=True), shared, rank
        self._pieces, self._saves = pieces, saves
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._count, args=(steps.device,), name="kv-offload-copies", daemon=True),
            threading.Thread(target=self._lock, args=(steps.device,), name="kv-offload-memory", daemon=True),
        ]
        self._locked: list[PinnedBuffer] = []
        for thread in self._threads:
            thread.start()

    def copy(self, kind: Kind, copies: Sequence[Sequence[int]]) -> None:
        """Make a batch of copies, as Others tells them."""
        start = self._shared.ptr
        mine = copies if self._saves or kind == "h2d" else ()
        found = [TierCopy(group, block, start + place) for group, block, place in mine]
        self._tickets.put(self._mover.copy(kind, found))

    def _count(self, device: Device) -> None:
        device.activate()
        while (ticket := self._tickets.get()) is not None:
            self._mover.wait(ticket)
            memory_fence()  # the records before the counter
            self._shared.done[self._rank] += 1

    def _lock(self, device: Device) -> None:
        records, ends = self._shared.records, list(itertools.accumulate(self._pieces))
        for start, end in zip((0, *ends), ends, strict=False):
            if self._stop.is_set():
                return
            try:
                self._locked.append(PinnedBuffer.over(device, records[start:end]))
            except TensorError as error:
                log.warning(
                    "KV offload: rank %d could lock only %d of %d bytes of host memory (%s); other copies are slow",
                    self._rank, start, len(records), error,
                )  # fmt: skip
                return

    def close(self) -> None:
        """Wait for the copies and end the threads."""
        self._stop.set()
        self._tickets.put(None)
        for thread in self._threads:
            thread.join()
        self._mover.close()
        for buffer in self._locked:
            buffer.close()
