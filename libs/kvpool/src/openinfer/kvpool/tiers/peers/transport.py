"""Transport: how the bytes of records go from one engine's host memory to another's. The conversation around it is the
same for all transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from .link import Link


class Record(NamedTuple):
    """A record in page-locked host memory, or room for one."""

    ptr: int
    memory: memoryview
    """Its bytes."""


class Transport(Protocol):
    """Moves records. Threads of several conversations call it at once."""

    @property
    def name(self) -> str:
        """Both sides must have a transport of this name."""

    def card(self) -> dict[str, Any]:
        """The facts that the other side must know, for JSON."""

    def register(self, ptr: int, nbytes: int) -> None:
        """Records will be in this memory."""

    def send(self, link: Link, records: Sequence[Record]) -> None:
        """Let the other side have the records. Returns when it needs them no more. Raises OSError."""

    def receive(self, link: Link, card: dict[str, Any], rooms: Sequence[Record]) -> None:
        """Fill the rooms with what the other side sends, whose card this is. Raises OSError; then no room is written to
        any more. Raises StillWriting where that cannot be said."""

    def close(self) -> None:
        """Give everything back. No record is on its way."""


class StillWriting(ConnectionError):
    """A transfer has failed and could not be stopped: its rooms may be written to at any time."""


class Tcp:
    """Sends records as bytes of the conversation."""

    name = "tcp"

    def card(self) -> dict[str, Any]:
        return {}

    def register(self, ptr: int, nbytes: int) -> None:
        pass

    def send(self, link: Link, records: Sequence[Record]) -> None:
        for record in records:
            link.give(record.memory)

    def receive(self, link: Link, card: dict[str, Any], rooms: Sequence[Record]) -> None:
        for room in rooms:
            link.fill(room.memory)

    def close(self) -> None:
        pass
