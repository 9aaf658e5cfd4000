"""Transport: how the bytes of records go from one engine's host memory to another's.

The conversation around it is the same for all transports.
"""

import ctypes
import mmap
import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from openinfer.tensor.handover import Giver, receive_file

from ..mover import Array, SharedRecords
from .link import BRIEF, Link

SLOWEST = 8e6
"""Bytes of records a second; a peer that sends fewer counts as lost."""


class TransferRecord(NamedTuple):
    """A record in page-locked host memory, or room for one."""

    ptr: int
    memory: memoryview
    """Its bytes."""


class Transport(ABC):
    """Moves records. Threads of several conversations call it at once."""

    name: ClassVar[str]
    """Both sides must have a transport of this name."""
    local: ClassVar[bool]
    """Whether it joins engines of one host alone."""

    def card(self) -> dict[str, Any]:
        """The facts that the other side must know, for JSON."""
        return {}

    def meet(self, card: dict[str, Any]) -> Any:
        """The side whose card this is, for `receive`. Raises OSError where it cannot be reached in this way."""
        return None

    def register(self, ptr: int, nbytes: int) -> None:
        """Records will be in this memory. Raises OSError."""
        return

    @abstractmethod
    def send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        """Let the other side have the records. Returns once it no longer needs them. Raises OSError."""

    @abstractmethod
    def receive(self, link: Link, far: Any, rooms: Sequence[TransferRecord]) -> None:
        """Fill the rooms with what the side `far` sends. Raises OSError; then no room is written to any more. Raises
        StillWriting where that cannot be said."""

    def close(self) -> None:
        """Give everything back. No record is on its way."""
        return


class StillWriting(ConnectionError):
    """A transfer has failed and could not be stopped: its rooms may be written to at any time."""


class Tcp(Transport):
    """Sends records as bytes of the conversation."""

    name, local = "tcp", False

    def send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        link.give([record.memory for record in records])

    def receive(self, link: Link, far: None, rooms: Sequence[TransferRecord]) -> None:
        link.fill([room.memory for room in rooms])


def transfer_s(records: Sequence[TransferRecord]) -> float:
    """Seconds that their bytes may take, beside those of any exchange."""
    return sum(len(record.memory) for record in records) / SLOWEST


class Run(NamedTuple):
    """Bytes that lie behind each other on both sides. ptr: here; at: there."""

    ptr: int
    at: int
    nbytes: int


def runs(rooms: Sequence[TransferRecord], at: Sequence[int]) -> list[Run]:
    """Rooms and their places on the other side; neighbours become one. Raises ValueError for too few, or no address."""
    found: list[Run] = []
    if not all(type(place) is int and 0 <= place < 1 << 63 for place in at):
        raise ValueError("a place is no address")
    for room, place in sorted(zip(rooms, at, strict=True), key=lambda pair: pair[0].ptr):
        size = len(room.memory)
        last = found[-1] if found else Run(0, 0, 0)
        if last.nbytes and (last.ptr + last.nbytes, last.at + last.nbytes) == (room.ptr, place):
            found[-1] = Run(last.ptr, last.at, last.nbytes + size)
        else:
            found.append(Run(room.ptr, place, size))
    return found


MEET_S = 1.0
"""Seconds that a process of this host has to hand out its memory."""


class Shared(Transport):
    """Copies records out of memory that both engines map.

    The sender's memory lies behind a descriptor. A Unix socket in the host's table of names, not in its files, hands
    the descriptor to processes of the same user.
    """

    name, local = "shared", True

    def __init__(self) -> None:
        self._file, self._start = -1, 0
        self._giver: Giver | None = None
        self._maps: weakref.WeakValueDictionary[str, Array] = weakref.WeakValueDictionary()  # by socket
        self._lock = threading.Lock()  # of the maps

    def lend(self, records: SharedRecords) -> None:
        """Peers may read this memory, and not write to it. Call it once."""
        self._start = records.ptr - records.offset
        self._file = os.open(f"/proc/self/fd/{records.file}", os.O_RDONLY)
        name = f"openinfer-kv-{os.urandom(16).hex()}"
        self._giver = Giver("\0" + name, self._hand_out, "KV peers of this host")

    def _hand_out(self, asking: socket.socket) -> None:
        socket.send_fds(asking, [b"m"], [self._file])

    def card(self) -> dict[str, Any]:
        return {"socket": self._giver.address[1:] if self._giver is not None else ""}

    def meet(self, card: dict[str, Any]) -> Array:
        """The other engine's memory, uint8 [bytes of the file]. All conversations with it share one mapping."""
        name = str(card.get("socket"))
        with self._lock:
            found = self._maps.get(name)
        if found is None:
            fresh = _mapped(name)  # without the lock: the process behind the socket may be silent
            with self._lock:
                found = self._maps.setdefault(name, fresh)
        return found

    def send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        link.say(at=[record.ptr - self._start for record in records])
        link.hear()
        link.say(kept=True)

    def receive(self, link: Link, far: Array, rooms: Sequence[TransferRecord]) -> None:
        wanted = runs(rooms, link.hear(BRIEF + 24 * len(rooms))["at"])
        if any(not 0 <= run.at <= len(far) - run.nbytes for run in wanted):
            raise ValueError("a place is not in the memory of the other engine")
        base = int(far.ctypes.data)
        for run in wanted:
            ctypes.memmove(run.ptr, base + run.at, run.nbytes)  # without the interpreter's lock
        link.say(copied=True)
        link.hear()  # the sender has kept the records until now, so their bytes are those of their names

    def close(self) -> None:
        if self._giver is not None:
            self._giver.close()
            os.close(self._file)
            self._giver = None  # the next call does nothing


def _mapped(name: str) -> Array:
    """The memory that the socket of this name hands out. Raises OSError."""
    _, (file,) = receive_file("\0" + name, 1, 1, MEET_S)
    try:
        return np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)
    except ValueError as error:  # it is empty
        raise ConnectionError(f"its memory cannot be mapped: {error}") from None
    finally:
        os.close(file)
