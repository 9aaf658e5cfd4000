"""Records of an engine on the same host: the receiver maps the sender's host memory and copies from it."""

import ctypes
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer.tensor.handover import Giver, receive_file

from ..mover import Array, SharedRecords
from .link import Link
from .transport import TransferRecord, Transport, hear_places, runs

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
            fresh = _map(name)  # without the lock: the process behind the socket may be silent
            with self._lock:
                found = self._maps.setdefault(name, fresh)
        return found

    def send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        link.say(at=[record.ptr - self._start for record in records])
        link.hear()
        link.say(kept=True)

    def receive(self, link: Link, far: Array, rooms: Sequence[TransferRecord]) -> None:
        wanted = runs(rooms, hear_places(link, len(rooms))["at"])
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


def _map(name: str) -> Array:
    """The memory that the socket of this name hands out. Raises OSError."""
    _, (file,) = receive_file("\0" + name, 1, 1, MEET_S)
    try:
        return np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)
    except ValueError as error:  # it is empty
        raise ConnectionError(f"its memory cannot be mapped: {error}") from None
    finally:
        os.close(file)
