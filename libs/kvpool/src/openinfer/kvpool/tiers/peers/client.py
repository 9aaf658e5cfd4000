"""Peers: other engines whose host memory is asked for blocks, each by a thread of its own.

A question ("which of these blocks have you?") comes before a load, because a pool looks its prefixes up at once and can
wait for no network. Answers become claims, which `has` looks up; `read` then brings a record into host memory.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import PeerRefused
from ...group import Group
from ..disk import Done
from ..host import Slot
from .link import Link, differences, greet
from .server import READ_AT_ONCE, READ_BYTES
from .transport import Record, StillWriting, Transport

log = logging.getLogger("openinfer.kvpool")

Address = tuple[str, int]
"""Host and port."""
RETRY_S = 5.0
"""Seconds without an attempt after a peer could not be reached."""
MAX_PEERS = 256
MAX_CLAIMS = 1 << 20
_KEEP_EVERY_S = 5.0


class Answer(NamedTuple):
    """The end of a question: what went wrong, by peer; "" if all went well."""

    key: int
    problem: str


class _Ask(NamedTuple):
    key: int
    names: Sequence[Sequence[bytes]]


class _End(NamedTuple):
    lease: str


class _Answered(NamedTuple):
    key: int
    address: Address
    found: list[tuple[int, bytes]]
    problem: str


_CLOSE = None
_Job = _Ask | _End | Slot | None


@dataclass(slots=True)
class _Question:
    """A question that is not answered by all yet."""

    left: set[Address]
    until: float
    problems: list[str] = field(default_factory=list)


class Peers:
    """The peers of one engine. One thread calls it.

    transports: the best first. addresses: the peers that every question goes to. about: what blocks depend on; a peer
    whose differs is refused. timeout_s: for a question, and for each step of a transfer.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        transports: Sequence[Transport],
        secret: bytes,
        about: dict[str, Any],
        addresses: Sequence[Address] = (),
        timeout_s: float = 5.0,
    ) -> None:
        self._sizes, self._transports = [g.block_bytes for g in groups], transports
        self._secret, self._about = secret, about
        self._addresses, self._timeout_s = tuple(addresses), timeout_s
        self._peers: dict[Address, _Peer] = {}
        self._claims: OrderedDict[tuple[int, bytes], Address] = OrderedDict()
        self._questions: dict[int, _Question] = {}
        self._news: queue.SimpleQueue[_Answered | Done] = queue.SimpleQueue()
        self._ended: list[Answer] = []
        self._done: list[Done] = []

    def ask(self, key: int, names: Sequence[Sequence[bytes]], address: Address | None = None) -> bool:
        """Ask one peer, or all of `addresses`, which of these blocks it has; `names` are by group. False: there is no
        peer to ask."""
        asked = {address} if address is not None else set(self._addresses)
        for one in asked:
            peer = self._peer(one)
            if peer is None:
                log.warning(
                    "KV peers: %s:%d is not asked, because %d peers are known already", *one, MAX_PEERS
                )
                asked = asked - {one}
                continue
            peer.jobs.put(_Ask(key, names))
        if asked:
            self._questions[key] = _Question(asked, time.monotonic() + self._timeout_s)
        return bool(asked)

    def _peer(self, address: Address) -> _Peer | None:
        peer = self._peers.get(address)
        if peer is None and len(self._peers) < MAX_PEERS:
            peer = self._peers[address] = _Peer(
                address, self._sizes, self._transports, self._secret, self._about, self._timeout_s,
                self._news.put,
            )  # fmt: skip
        return peer

    def answers(self, wait_s: float) -> list[Answer]:
        """Questions that have ended since the last call: all peers have answered, or time is over. Waits up to wait_s
        seconds for one, if there are questions."""
        now = time.monotonic()
        until = min([now + wait_s, *(q.until for q in self._questions.values())])
        self._pump(0.0)
        while self._questions and not self._ended and (left := until - time.monotonic()) > 0:
            self._pump(left)
        now = time.monotonic()
        for key in [key for key, question in self._questions.items() if question.until <= now]:
            late = ", ".join(f"{host}:{port}" for host, port in self._questions[key].left)
            self._questions[key].problems.append(f"no answer from {late} in {self._timeout_s:g} s")
            self._end(key)
        ended, self._ended = self._ended, []
        return ended

    def forget(self, key: int) -> None:
        """The answers to a question are not wanted any more."""
        self._questions.pop(key, None)
        self._ended = [answer for answer in self._ended if answer.key != key]

    def has(self, group: int, name: bytes) -> bool:
        """Whether a peer has said that it has the block."""
        return (group, name) in self._claims

    def read(self, slot: Slot) -> None:
        """Fill a slot, whose group and name say with what. Its end comes from `done`."""
        peer = self._peer(self._claims.pop((slot.group, slot.name)))
        if peer is None:
            self._done.append(Done(slot, 0, "too many peers"))
        else:
            peer.jobs.put(slot)

    def done(self, wait_s: float) -> list[Done]:
        """Reads that have ended. Waits up to wait_s seconds for one."""
        if not self._done:
            self._pump(wait_s)
        done, self._done = self._done, []
        return done

    def keep(self, address: Address, lease: str) -> None:
        """Keep a lease that the peer has granted alive until `end`."""
        peer = self._peer(address)
        if peer is not None:
            peer.leases.add(lease)

    def end(self, address: Address, lease: str) -> None:
        """Tell the peer that the lease's blocks are here, or not wanted any more."""
        peer = self._peers.get(address)
        if peer is not None:
            peer.leases.discard(lease)
            peer.jobs.put(_End(lease))

    def _pump(self, wait_s: float) -> None:
        """Take the news of the threads. Waits up to wait_s seconds for the first."""
        try:
            news = self._news.get(timeout=wait_s) if wait_s > 0 else self._news.get_nowait()
            while True:
                self._take(news)
                news = self._news.get_nowait()
        except queue.Empty:
            pass

    def _take(self, news: _Answered | Done) -> None:
        if isinstance(news, Done):
            self._done.append(news)
            return
        for block in news.found:
            self._claims[block] = news.address
        while len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)
        question = self._questions.get(news.key)
        if question is None:
            return
        question.left.discard(news.address)
        if news.problem:
            question.problems.append(news.problem)
        if not question.left:
            self._end(news.key)

    def _end(self, key: int) -> None:
        self._ended.append(Answer(key, "; ".join(self._questions.pop(key).problems)))

    def clear(self) -> None:
        """Forget what peers have: it is of other weights now."""
        self._claims.clear()

    def close(self) -> None:
        """End all conversations, and wait for the threads."""
        for peer in self._peers.values():
            peer.jobs.put(_CLOSE)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()


class _Peer:
    """A thread that talks to one peer, and connects when there is something to ask."""

    def __init__(
        self,
        address: Address,
        sizes: Sequence[int],
        transports: Sequence[Transport],
        secret: bytes,
        about: dict[str, Any],
        timeout_s: float,
        tell: Callable[[_Answered | Done], None],
    ) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.leases: set[str] = set()
        """Leases that the thread keeps alive."""
        self._address, self._name = address, f"{address[0]}:{address[1]}"
        self._sizes, self._transports, self._secret = sizes, transports, secret
        self._about, self._timeout_s, self._tell = about, timeout_s, tell
        self._link: Link | None = None
        self._transport, self._far = transports[-1], None
        self._down_until, self._why = 0.0, ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-peer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        keep_at = time.monotonic() + _KEEP_EVERY_S
        while True:
            if time.monotonic() >= keep_at:
                keep_at = time.monotonic() + _KEEP_EVERY_S
                if self._link is not None and self.leases:
                    self._attempt(self._keep)
            try:
                job = self.jobs.get(timeout=_KEEP_EVERY_S)
            except queue.Empty:
                continue
            match job:
                case None:
                    self._drop()
                    return
                case _Ask(key, names):
                    found: list[tuple[int, bytes]] = []
                    problem = self._attempt(lambda link: self._ask(link, names, found))  # noqa: B023
                    self._tell(_Answered(key, self._address, found, problem))
                case _End(lease):
                    if self._link is not None:
                        self._attempt(lambda link: link.say(op="end", lease=lease))
                case Slot():
                    self._read(job)

    def _attempt(self, talk: Callable[[Link], None]) -> str:
        """Talk to the peer. Returns why that was not possible; "" if it was."""
        now = time.monotonic()
        if self._link is None and now < self._down_until:
            return self._why
        try:
            if not self._again(talk):
                talk(self._connect())
            return ""
        except (OSError, KeyError, ValueError, TypeError) as error:
            self._drop()
            if self._closing:
                return "the engine ends"
            self._down_until = now + RETRY_S
            why = f"{self._name}: {error or type(error).__name__}"
            if why != self._why:
                log.warning("KV peers: %s; tokens are computed", why)
            self._why = why
            if isinstance(error, StillWriting):
                raise
            return why

    def _again(self, talk: Callable[[Link], None]) -> bool:
        """Talk over the connection that is there. False: it is lost, which may be for its long silence only."""
        if self._link is None:
            return False
        try:
            talk(self._link)
            return True
        except ConnectionError as error:
            if self._closing or isinstance(error, StillWriting):
                raise
            self._drop()
            return False

    def _connect(self) -> Link:
        connected = socket.create_connection(self._address, self._timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._link = Link(connected, self._timeout_s)
        card = greet(link, self._secret, {}, server=False)
        differs = differences(self._about, card.get("about"))
        if differs:
            raise PeerRefused(
                f"its blocks are of another model or version; these differ: {', '.join(differs)}"
            )
        self._choose(link, card.get("transports") or ())
        self._why = ""
        return link

    def _choose(self, link: Link, offered: Sequence[str]) -> None:
        """Take the best transport that both sides have and that works."""
        for transport in self._transports:
            if transport.name not in offered or (transport.local and not link.within_host):
                continue
            link.say(op="transport", transport=transport.name)
            try:
                self._far = transport.meet(link.hear()["transport"])
            except OSError as error:
                log.warning("KV peers: %s is not reached by %s: %s", self._name, transport.name, error)
                continue
            self._transport = transport
            log.info("KV peers: %s is reached by %s", self._name, transport.name)
            return
        own = ", ".join(transport.name for transport in self._transports)
        raise PeerRefused(f"it has none of the transports {own}; give both the same kv_connector")

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = self._far = None

    def _keep(self, link: Link) -> None:
        link.say(op="keep", leases=list(self.leases))

    def _ask(self, link: Link, names: Sequence[Sequence[bytes]], found: list[tuple[int, bytes]]) -> None:
        link.say(op="ask", names=["".join(name.hex() for name in group) for group in names])
        has = link.hear()["has"]
        for group, (asked, there) in enumerate(zip(names, has, strict=True)):
            found += [(group, name) for name, mark in zip(asked, there, strict=True) if mark == "1"]

    def _read(self, first: Slot) -> None:
        """Read this slot, and others that are wanted by now."""
        slots, left = [first], READ_BYTES - len(first.memory)
        while len(slots) < READ_AT_ONCE and left > 0:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            if not isinstance(job, Slot):
                self.jobs.put(job)
                break
            slots.append(job)
            left -= len(job.memory)
        come: list[Slot] = []
        try:
            problem = self._attempt(lambda link: self._receive(link, slots, come))
        except StillWriting:
            return  # the slots stay in use for ever, because bytes may still arrive in them
        for slot in slots:
            self._tell(Done(slot, 0, None if slot in come else problem or f"{self._name} has it no more"))

    def _receive(self, link: Link, slots: Sequence[Slot], come: list[Slot]) -> None:
        link.say(op="read", wants=[[slot.group, slot.name.hex()] for slot in slots])
        found = [slot for slot, there in zip(slots, link.hear()["found"], strict=True) if there]
        rooms = [Record(slot.ptr, slot.memory[: self._sizes[slot.group]]) for slot in found]
        if rooms:
            self._transport.receive(link, self._far, rooms)
        come += found

    def close(self) -> None:
        """End the conversation that is under way, and wait for the thread."""
        self._closing = True
        link = self._link
        if link is not None:
            link.close()
        self._thread.join()
