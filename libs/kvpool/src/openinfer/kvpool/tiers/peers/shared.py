"""Records of an engine on the same host: the receiver maps the sender's host memory and copies from it."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..mover import Array, SharedRecords
from .link import Link
from .transport import Record, runs

log = logging.getLogger("openinfer.kvpool")

MEET_S = 5.0
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Shared:
    """Copies records out of memory that both engines map.

    The sender's memory lies behind a descriptor. A Unix socket in the host's table of names, not in its files, hands
    the descriptor to processes of the same user.
    """

    name, local = "shared", True

    def __init__(self) -> None:
        self._file, self._start = -1, 0
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._maps: weakref.WeakValueDictionary[str, Array] = weakref.WeakValueDictionary()  # by socket
        self._lock = threading.Lock()  # of the maps

    def lend(self, records: SharedRecords) -> None:
        """Peers may read this memory, and not write to it. Call it once."""
        self._start = records.ptr - records.offset
        self._file = os.open(f"/proc/self/fd/{records.file}", os.O_RDONLY)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0openinfer-kv-{os.urandom(16).hex()}")
        self._listener.listen()
        self._thread = threading.Thread(
            target=self._hand_out, args=(self._listener,), name="kv-memory", daemon=True
        )
        self._thread.start()

    def _hand_out(self, listener: socket.socket) -> None:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return  # closed
            with asking, suppress(OSError):
                packed = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                user = _CREDENTIALS.unpack(packed)[1]
                if user == os.getuid():
                    socket.send_fds(asking, [b"m"], [self._file])
                else:
                    log.warning("KV peers: user %d asks for the memory of user %d", user, os.getuid())

    def card(self) -> dict[str, Any]:
        return {"socket": str(self._listener.getsockname()[1:], "ascii") if self._listener else ""}

    def meet(self, card: dict[str, Any]) -> Array:
        """The other engine's memory, uint8 [bytes of the file]. All conversations with it share one mapping."""
        name = str(card.get("socket"))
        with self._lock:
            found = self._maps.get(name)
            if found is None:
                found = self._maps[name] = _map(name)
            return found

    def register(self, ptr: int, nbytes: int) -> None:
        pass

    def send(self, link: Link, records: Sequence[Record]) -> None:
        link.say(at=[record.ptr - self._start for record in records])
        link.hear()
        link.say(kept=True)

    def receive(self, link: Link, far: Array, rooms: Sequence[Record]) -> None:
        wanted = runs(rooms, link.hear()["at"])
        if any(not 0 <= run.at <= len(far) - run.nbytes for run in wanted):
            raise ValueError("a place is not in the memory of the other engine")
        base = int(far.ctypes.data)
        for run in wanted:
            ctypes.memmove(run.ptr, base + run.at, run.nbytes)  # without the interpreter's lock
        link.say(copied=True)
        link.hear()  # the sender has kept the records until now, so their bytes are those of their names

    def close(self) -> None:
        if self._listener is not None and self._thread is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._thread.join()
            self._listener.close()
            os.close(self._file)
            self._listener = None  # the next call does nothing


def _map(name: str) -> Array:
    """The memory that the socket of this name hands out. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(MEET_S)
        asking.connect("\0" + name)
        _, files, _, _ = socket.recv_fds(asking, 1, 1)
    if not files:
        raise ConnectionError("it gave no descriptor of its memory")
    try:
        return np.frombuffer(mmap.mmap(files[0], 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        for file in files:
            os.close(file)
