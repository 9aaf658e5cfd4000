"""Link: a conversation of two engines over a socket: JSON objects, each behind its length, and bytes of records.

Both sides prove that they know one secret before either believes a word (HMAC-SHA-256 over both sides' random numbers).
Later messages are neither signed nor encrypted, so peers need a network of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import PeerRefused

T = TypeVar("T")

PROTOCOL = "openinfer-kv/2"
"""Changes with the meaning of any message. Engines of other protocols refuse each other."""
MAX_WORDS = 32 << 20
"""Bytes of a JSON object at most."""
_LENGTH = struct.Struct("!I")
_PARTS = 1024
"""Pieces of memory that the kernel takes in one call at most."""


class Link:
    """One end of a connected socket, which it owns. Not thread-safe.

    All methods raise OSError once the other end is lost, or silent for timeout_s.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.settimeout(None)  # the kernel keeps the time, so that one call moves many records
        self._socket = connected
        self.wait_for(timeout_s)

    def wait_for(self, timeout_s: float) -> None:
        """From now on the other end may be silent for so long."""
        self._timeout_s = timeout_s
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def say(self, **words: Any) -> None:
        """Send an object."""
        data = json.dumps(words).encode()
        self._in_time(lambda: self._socket.sendall(_LENGTH.pack(len(data)) + data))

    def hear(self) -> dict[str, Any]:
        """The next object."""
        head = bytearray(_LENGTH.size)
        self.fill([memoryview(head)])
        (length,) = _LENGTH.unpack(head)
        if length > MAX_WORDS:
            raise PeerRefused(f"a message of {length} bytes came; at most {MAX_WORDS} are allowed")
        data = bytearray(length)
        self.fill([memoryview(data)])
        try:
            words = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PeerRefused(f"a message is no JSON: {error}") from None
        if not isinstance(words, dict):
            raise PeerRefused("a message is no JSON object")
        return words

    def heard(self, wait_s: float) -> bool:
        """Whether the other end has said more, or has gone. Waits up to wait_s seconds."""
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1e3 * wait_s))

    @property
    def within_host(self) -> bool:
        """Whether both ends have one address, so that they are of one host and see the same names of sockets."""
        return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])

    def give(self, parts: Sequence[memoryview]) -> None:
        """Send bytes."""
        while parts:
            parts = _after(parts, self._in_time(lambda: self._socket.sendmsg(parts[:_PARTS])))  # noqa: B023

    def fill(self, rooms: Sequence[memoryview]) -> None:
        """Receive as many bytes as there is room for."""
        while rooms:
            count = self._in_time(
                lambda: self._socket.recvmsg_into(rooms[:_PARTS], 0, socket.MSG_WAITALL)[0]  # noqa: B023
            )
            if not count:
                raise ConnectionResetError("the other engine has closed the connection")
            rooms = _after(rooms, count)

    def _in_time(self, talk: Callable[[], T]) -> T:
        try:
            return talk()
        except BlockingIOError:
            raise TimeoutError(f"it was silent for {self._timeout_s:g} s") from None

    def close(self) -> None:
        """End the conversation, also for a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """The bytes of `parts` behind the first `count`."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def greet(link: Link, secret: bytes, card: dict[str, Any], *, server: bool) -> dict[str, Any]:
    """Exchange proofs and cards: what each side says of itself. Returns the other's. Raises PeerRefused, OSError."""
    own = os.urandom(32).hex()
    link.say(protocol=PROTOCOL, number=own)
    hello = link.hear()
    if hello.get("protocol") != PROTOCOL:
        raise PeerRefused(
            f"it speaks {str(hello.get('protocol'))[:40]!r}, this engine {PROTOCOL!r}; run one version"
        )
    other = str(hello.get("number"))
    link.say(proof=_proof(secret, own, other, server=server), card=card)
    answer = link.hear()
    if not hmac.compare_digest(
        str(answer.get("proof")).encode(), _proof(secret, other, own, server=not server).encode()
    ):
        raise PeerRefused("it does not know this engine's secret; give both the same secret_file")
    found = answer.get("card")
    if not isinstance(found, dict):
        raise PeerRefused("it sent no card")
    return found


def _proof(secret: bytes, speaker: str, listener: str, *, server: bool) -> str:
    role = "server" if server else "client"
    return hmac.digest(secret, f"{PROTOCOL} {role} {speaker} {listener}".encode(), hashlib.sha256).hex()


def differences(own: dict[str, Any], other: object) -> list[str]:
    """The names of the entries that differ; [] if the blocks of both engines are equal."""
    if not isinstance(other, dict):
        return ["everything"]
    own = json.loads(json.dumps(own))  # tuples become lists, as the other's did
    return sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
