"""Link: a conversation of two engines over a socket: JSON objects, each behind its length, and bytes of records.

Both sides prove that they know one secret before either believes a word: an HMAC-SHA-256 over both sides' random
numbers, the protocol, the speaker's side and the addresses of both ends. So a proof is worth nothing on another
connection. Later objects carry an HMAC by a key of the two numbers, over their direction and their place in the
conversation too. Records are neither signed nor encrypted, so peers need a network of their own.
"""

import hashlib
import hmac
import json
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import PeerRefused

T = TypeVar("T")

PROTOCOL = "openinfer-kv/3"
"""Changes with the meaning of any message. Engines of other protocols refuse each other."""
BEFORE_PROOF, BRIEF, CARD, MAX_WORDS = 4 << 10, 1 << 16, 8 << 20, 32 << 20
"""Bytes of a JSON object at most: from a stranger; that has no list; of a card; and any."""
_LENGTH = struct.Struct("!I")
_PARTS = 1024
"""Pieces of memory that the kernel takes in one call at most."""
_PIECE = 1 << 20


class Link:
    """One end of a connected socket, which it owns. Not thread-safe.

    An exchange begins now, and anew with each `begin`. All methods raise OSError once the other end is lost, or the
    exchange has taken timeout_s, however many of its bytes have come.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.settimeout(None)  # the kernel keeps the time, so that one call moves many records
        self._socket = connected
        self._key = b""
        self._counts = {True: 0, False: 0}  # objects that the server has said, and the client
        self.server = False
        """Which side this end is, for the addresses and the tags."""
        self.begin(timeout_s)

    def begin(self, timeout_s: float, began: float | None = None) -> None:
        """The limit of all that is said until the next call, from now on or since `began` (time.monotonic())."""
        self._timeout_s = timeout_s
        self._until = (time.monotonic() if began is None else began) + timeout_s

    def say(self, **words: Any) -> None:
        data = json.dumps(words).encode()
        self.give([memoryview(_LENGTH.pack(len(data)) + data + self._tag(data, server=self.server))])

    def hear(self, at_most: int = BRIEF, exchange_s: float | None = None) -> dict[str, Any]:
        """The next object, of so many bytes at most; from a stranger always of few. Memory is taken as bytes come.
        exchange_s: an exchange of so long begins with it."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if exchange_s is not None:
            self.begin(exchange_s)
        at_most = at_most if self._key else BEFORE_PROOF
        if length > at_most:
            raise PeerRefused(f"a message of {length} bytes came; {at_most} are allowed here")
        data = self._take(length)
        tag = self._tag(data, server=not self.server)
        if not hmac.compare_digest(self._take(len(tag)), tag):
            raise PeerRefused("a message was changed on its way")
        try:
            words = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PeerRefused(f"a message is no JSON: {error}") from None
        if not isinstance(words, dict):
            raise PeerRefused("a message is no JSON object")
        return words

    def trust(self, secret: bytes, text: str) -> None:
        """The other end has proved itself: from now on objects are longer and carry tags."""
        self._key = hmac.digest(secret, text.encode(), hashlib.sha256)

    def _tag(self, data: bytes, *, server: bool) -> bytes:
        if not self._key:
            return b""
        self._counts[server] += 1
        place = f"{'server' if server else 'client'} {self._counts[server]} ".encode()
        return hmac.digest(self._key, place + data, hashlib.sha256)

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = bytearray(min(count - len(data), _PIECE))
            self.fill([memoryview(piece)])
            data += piece
        return bytes(data)

    def heard(self, wait_s: float) -> bool:
        """Whether the other end has said more, or has gone. Waits up to wait_s seconds."""
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1e3 * wait_s))

    @property
    def ends(self) -> str:
        """The addresses of the server and of the client, as this end sees them."""
        names = [self._socket.getsockname(), self._socket.getpeername()]
        server, client = names if self.server else reversed(names)
        return f"{_address(server)} {_address(client)}"

    @property
    def within_host(self) -> bool:
        """Whether both ends have one address, so that they are of one host and see the same names of sockets."""
        return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])

    def give(self, parts: Sequence[memoryview]) -> None:
        while parts:
            parts = _after(
                parts,
                self._in_time(socket.SO_SNDTIMEO, lambda: self._socket.sendmsg(parts[:_PARTS])),  # noqa: B023
            )

    def fill(self, rooms: Sequence[memoryview]) -> None:
        """Receive as many bytes as there is room for."""
        while rooms:
            count = self._in_time(
                socket.SO_RCVTIMEO,
                lambda: self._socket.recvmsg_into(rooms[:_PARTS], 0, socket.MSG_WAITALL)[0],  # noqa: B023
            )
            if not count:
                raise ConnectionResetError("the other engine has closed the connection")
            rooms = _after(rooms, count)

    def _in_time(self, option: int, talk: Callable[[], T]) -> T:
        left = self._until - time.monotonic()
        if left > 0:
            micros = max(1, int(left * 1e6))  # 0 is no limit
            limit = struct.pack("ll", *divmod(micros, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
            with suppress(BlockingIOError):
                return talk()
        raise TimeoutError(f"it took more than {self._timeout_s:.3g} s")

    def end(self) -> None:
        """End the conversation, from any thread. The one that talks closes the link then: a descriptor that is closed
        under a thread could be another connection's a moment later."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the conversation and give the socket back."""
        self.end()
        self._socket.close()


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """The bytes of `parts` behind the first `count`."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _address(name: Any) -> str:
    """A socket's name as text, the same at both ends: without the scope of an IPv6 address."""
    return f"{name[0].partition('%')[0]} {name[1]}" if isinstance(name, tuple) else ""


def greet(link: Link, secret: bytes, card: dict[str, Any], *, server: bool) -> dict[str, Any]:
    """Exchange proofs; then the server says its card, which the client gets. Raises PeerRefused, OSError."""
    link.server, own = server, os.urandom(32).hex()
    link.say(protocol=PROTOCOL, number=own)
    hello = link.hear()
    if hello.get("protocol") != PROTOCOL:
        raise PeerRefused(
            f"it speaks {str(hello.get('protocol'))[:40]!r}, this engine {PROTOCOL!r}; run one version"
        )
    other = hello.get("number")
    if not isinstance(other, str) or not re.fullmatch("[0-9a-f]{64}", other):
        raise PeerRefused("it sent no number")
    # The client's first.
    about = f"{PROTOCOL} {other if server else own} {own if server else other} {link.ends}"
    if not server:  # whoever calls proves itself first
        link.say(proof=_proof(secret, "client", about))
    proof = str(link.hear().get("proof")).encode("utf-8", "replace")
    if not hmac.compare_digest(proof, _proof(secret, "client" if server else "server", about).encode()):
        if server:
            link.say(proof="")  # so that the other end knows why
        raise PeerRefused(
            "it does not know this engine's secret, or its addresses are translated on the way; give both the same "
            "secret_file, and a kv_ip that peers reach directly"
        )
    if server:
        link.say(proof=_proof(secret, "server", about))
    link.trust(secret, f"key {about}")
    if server:
        link.say(card=card)
        return {}
    found = link.hear(CARD).get("card")
    if not isinstance(found, dict):
        raise PeerRefused("it sent no card")
    return found


def _proof(secret: bytes, side: str, about: str) -> str:
    return hmac.digest(secret, f"{side} {about}".encode(), hashlib.sha256).hex()


def differences(own: dict[str, Any], other: object) -> list[str]:
    """The names of the entries that differ; [] if the blocks of both engines are equal."""
    if not isinstance(other, dict):
        return ["everything"]
    own = json.loads(json.dumps(own))  # tuples become lists, as the other's did
    differ = sorted(key for key in own if own[key] != other.get(key))
    return [*differ, *["entries that this engine does not know"] * bool(other.keys() - own.keys())]
