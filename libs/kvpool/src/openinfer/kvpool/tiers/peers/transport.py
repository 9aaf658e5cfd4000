"""Transport: how the bytes of records go from one engine's host memory to another's.

The conversation around it is the same for all transports.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

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


def hear_places(link: Link, count: int) -> dict[str, Any]:
    """What a sender says of its records: their places, one for each of `count` rooms."""
    return link.hear(BRIEF + 24 * count)


class Run(NamedTuple):
    """Bytes that lie behind each other on both sides. ptr: here; at: there."""

    ptr: int
    at: int
    nbytes: int


def runs(rooms: Sequence[TransferRecord], at: Sequence[int]) -> list[Run]:
    """Rooms and their places on the other side; neighbours become one. Raises ValueError for too few, and for what is
    no address."""
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
