"""Server: answers peers from threads of its own: which records are here, and their bytes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any

from ...errors import InvalidConfig, PeerRefused
from ...group import Group
from .lending import Lending
from .link import Link, greet
from .transport import Record, Tcp, Transport

log = logging.getLogger("openinfer.kvpool")

MAX_LINKS = 512
"""Connections at once; a peer has several."""
READ_AT_ONCE, READ_BYTES = 1024, 32 << 20
"""Records in an answer at most, and their bytes, if they are more than one."""
GREETING_S = 5.0
"""A stranger that has not said who it is by then is left."""
IDLE_S = 600.0
"""A peer that says nothing for so long is taken for lost."""
_TICK_S = 0.5


class Server:
    """Answers the peers that connect to `listener`, from now on, and owns it.

    transports: by name; the peer chooses. card: what this engine says of itself; its "about" is what blocks depend on.
    """

    def __init__(
        self,
        listener: socket.socket,
        lending: Lending,
        groups: Sequence[Group],
        transports: Mapping[str, Transport],
        secret: bytes,
        card: dict[str, Any],
    ) -> None:
        self._lending, self._sizes, self._transports = lending, [g.block_bytes for g in groups], transports
        self._secret, self._card = secret, card
        self._links: set[Link] = set()
        self._closing = False
        self._listener = listener
        self._listener.settimeout(_TICK_S)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="kv-server", daemon=True)
        self._acceptor.start()

    @staticmethod
    def listen(host: str, port: int) -> socket.socket:
        """A socket at host:port (port 0: any). Raises InvalidConfig for an address that cannot be had."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=MAX_LINKS)
        except OSError as error:
            raise InvalidConfig(
                f"kv_ip {host}, kv_port {port} cannot be had: {error}; give another port"
            ) from None

    def _accept(self) -> None:
        while not self._closing:
            self._lending.expire()
            try:
                connected, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._links) >= MAX_LINKS:
                log.warning("KV peers: %s is turned away, because %d are here already", address, MAX_LINKS)
                connected.close()
                continue
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(connected, GREETING_S)
            self._links.add(link)
            thread = threading.Thread(target=self._serve, args=(link, address), name="kv-serve", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: Link, address: tuple[str, int]) -> None:
        """Answer one peer until it leaves."""
        try:
            greet(link, self._secret, self._card, server=True)
            link.wait_for(IDLE_S)
            transport: Transport = Tcp()
            while True:
                words = link.hear()
                if words["op"] == "transport":
                    transport = self._choose(link, words)
                else:
                    self._answer(link, words, transport)
        except PeerRefused as error:
            log.warning("KV peers: %s is refused: %s", address, error)
        except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
            if not self._closing and not isinstance(error, OSError):
                log.warning("KV peers: %s sent what cannot be read: %r", address, error)
        finally:
            link.close()
            self._links.discard(link)

    def _choose(self, link: Link, words: dict[str, Any]) -> Transport:
        """The transport that a peer wants."""
        transport = self._transports.get(str(words["transport"]))
        if transport is None:
            raise PeerRefused(
                f"it wants transport {words['transport']!r}, here are {', '.join(self._transports)}"
            )
        link.say(transport=transport.card())
        return transport

    def _answer(self, link: Link, words: dict[str, Any], transport: Transport) -> None:
        match words["op"]:
            case "ask":
                has = [self._lending.has(group, names_of(text)) for group, text in enumerate(words["names"])]
                link.say(has=["".join("01"[there] for there in group) for group in has])
            case "read":
                self._send(link, [(index(g), bytes.fromhex(name)) for g, name in words["wants"]], transport)
            case "keep":
                self._lending.keep([str(lease) for lease in words["leases"]])
            case "end":
                self._lending.end(str(words["lease"]))
            case other:
                raise PeerRefused(f"it asks for {str(other)[:40]!r}, which is unknown")

    def _send(self, link: Link, wants: Sequence[tuple[int, bytes]], transport: Transport) -> None:
        if len(wants) > READ_AT_ONCE:
            raise PeerRefused(f"it wants {len(wants)} records at once; {READ_AT_ONCE} are allowed")
        slots = [self._lending.lend(group, name) for group, name in wants]
        lent = [slot for slot in slots if slot is not None]
        try:
            link.say(found=[slot is not None for slot in slots])
            if lent:
                transport.send(
                    link, [Record(slot.ptr, slot.memory[: self._sizes[slot.group]]) for slot in lent]
                )
        finally:
            for slot in lent:
                self._lending.back(slot)

    def close(self) -> None:
        """Turn all peers away, and wait for their threads."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._acceptor.join()  # before the links are closed, because it could add one more
        for link in list(self._links):
            link.close()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def names_of(text: str) -> list[bytes]:
    """Names from their hexadecimal digits, one after the other."""
    data = bytes.fromhex(text)
    return [data[start : start + 32] for start in range(0, len(data), 32)]
