"""Server: answers peers from threads of its own: which records are here, and their bytes."""

import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any

from openinfer.tensor.handover import accepted

from ...errors import InvalidConfig, PeerRefused
from ...group import Group
from .lending import Lending
from .link import MAX_WORDS, Link, greet
from .transport import Tcp, TransferRecord, Transport, transfer_s

log = logging.getLogger("openinfer.kvpool")

MAX_LINKS = 512
"""Connections at once; a peer has several. A quarter is the share of strangers, who have proved nothing yet: of these
one more takes the place of the oldest."""
READ_AT_ONCE, READ_BYTES = 1024, 32 << 20
"""Records in an answer at most, and their bytes, if they are more than one."""
GREETING_S = 5.0
"""A stranger that has not proved itself by then is left."""
EXCHANGE_S = 5.0
"""Seconds that a peer's question and its answer may take, beside those of records' bytes."""
IDLE_S = 600.0
"""A peer that says nothing for so long is taken for lost."""
_TICK_S = 0.5


class PeerServer:
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
        self._strangers: OrderedDict[Link, None] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()  # of both
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
        for found in accepted(self._listener, "KV peers"):
            if self._closing:
                return
            self._lending.expire()
            if found is None:
                continue
            connected, address = found
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            link = Link(connected, GREETING_S)
            thread = threading.Thread(target=self._serve, args=(link, address), name="kv-serve", daemon=True)
            with self._lock:
                while len(self._strangers) >= max(1, MAX_LINKS // 4):
                    self._strangers.popitem(last=False)[0].end()
                self._strangers[link] = None
                self._links.add(link)
            try:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread.start()
                self._threads.append(thread)
            except (OSError, RuntimeError) as error:  # it has gone, or no thread can be started
                log.warning("KV peers: %s is turned away: %s", address, error)
                self._leave(link)

    def _leave(self, link: Link) -> None:
        link.close()
        with self._lock:
            self._links.discard(link)
            self._strangers.pop(link, None)

    def _serve(self, link: Link, address: tuple[str, int]) -> None:
        """Answer one peer until it leaves. Whatever it says ends its connection at worst."""
        try:
            greet(link, self._secret, self._card, server=True)
            with self._lock:
                self._strangers.pop(link, None)
                known = len(self._links) - len(self._strangers)
            if known > MAX_LINKS - MAX_LINKS // 4:
                raise PeerRefused(f"{known - 1} connections of peers are here already")
            transport: Transport = Tcp()
            while True:
                link.begin(IDLE_S)
                words = link.hear(MAX_WORDS, EXCHANGE_S)
                if words["op"] == "transport":
                    transport = self._choose(link, words)
                else:
                    self._answer(link, words, transport)
        except PeerRefused as error:
            log.warning("KV peers: %s is refused: %s", address, error)
        except Exception as error:
            if not self._closing and not isinstance(error, OSError):
                log.warning("KV peers: %s sent what cannot be read: %s", address, repr(error)[:400])
        finally:
            self._leave(link)

    def _choose(self, link: Link, words: dict[str, Any]) -> Transport:
        transport = self._transports.get(str(words["transport"]))
        if transport is None:
            raise PeerRefused(
                f"it wants transport {str(words['transport'])[:40]!r}, here are {', '.join(self._transports)}"
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
                records = [TransferRecord(slot.ptr, slot.memory[: self._sizes[slot.group]]) for slot in lent]
                link.begin(EXCHANGE_S + transfer_s(records))
                transport.send(link, records)
        finally:
            for slot in lent:
                self._lending.back(slot)

    def close(self) -> None:
        """Turn all peers away, and wait for their threads."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._acceptor.join()  # before the links are closed, because it could add one more
        with self._lock:
            for link in self._links:
                link.end()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def names_of(text: str) -> list[bytes]:
    """Names from their hexadecimal digits, one after the other."""
    data = bytes.fromhex(text)
    return [data[start : start + 32] for start in range(0, len(data), 32)]
