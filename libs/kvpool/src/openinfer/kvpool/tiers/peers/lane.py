"""Lane: a thread that talks to one peer over a connection of its own."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import PeerRefused
from ..disk import Done
from ..host import Slot
from .link import Link, differences, greet
from .server import READ_AT_ONCE, READ_BYTES
from .transport import Record, StillWriting, Transport

log = logging.getLogger("openinfer.kvpool")

Address = tuple[str, int]
"""Host and port."""
RETRY_S, RETRY_TIMES = 5.0, 10
"""Seconds without an attempt after a peer could not be reached; and how many times as long as the attempt, if that is
more. Requests wait for an attempt."""
_KEEP_EVERY_S = 5.0


class Ask(NamedTuple):
    """A question which of these blocks, by group, the peer has."""

    key: int
    names: Sequence[Sequence[bytes]]


class End(NamedTuple):
    """The end of a lease."""

    lease: str


class Answered(NamedTuple):
    """The blocks that a peer has, or the problem."""

    key: int
    address: Address
    found: list[tuple[int, bytes]]
    problem: str


Jobs = queue.SimpleQueue[Ask | End | Slot | None]
"""Slots are to be filled. None: the lane ends."""


@dataclass(frozen=True, slots=True)
class Own:
    """This engine's side of all conversations. sizes: bytes of a record, by group. The others: see Peers."""

    sizes: Sequence[int]
    transports: Sequence[Transport]
    secret: bytes
    about: dict[str, Any]
    timeout_s: float
    tell: Callable[[Answered | Done], None]


@dataclass(slots=True)
class Outage:
    """No lane of a peer connects to it until this time (time.monotonic()), for this reason."""

    until: float = 0.0
    why: str = ""


class Lane:
    """A thread that talks to one peer, and connects when there is a job. Several lanes may take jobs from one queue."""

    def __init__(self, address: Address, own: Own, jobs: Jobs, outage: Outage) -> None:
        self.leases: set[str] = set()
        """Leases that the thread keeps alive."""
        self._address, self._name, self._own, self._jobs = address, f"{address[0]}:{address[1]}", own, jobs
        self._link: Link | None = None
        self._offered: Sequence[str] = ()  # transports of the other side
        self._transport: Transport | None = None  # chosen by the first read of a connection
        self._far: Any = None
        self._outage = outage
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
                job = self._jobs.get(timeout=_KEEP_EVERY_S)
            except queue.Empty:
                continue
            match job:
                case None:
                    self._drop()
                    return
                case Ask(key, names):
                    found: list[tuple[int, bytes]] = []
                    problem = self._attempt(lambda link: self._ask(link, names, found))  # noqa: B023
                    self._own.tell(Answered(key, self._address, found, problem))
                case End(lease):
                    if self._link is not None:
                        self._attempt(lambda link: link.say(op="end", lease=lease))
                case Slot():
                    self._read(job)

    def _attempt(self, talk: Callable[[Link], None]) -> str:
        """Talk to the peer. Returns why that was not possible; "" if it was."""
        now = time.monotonic()
        if self._link is None and now < self._outage.until:
            return self._outage.why
        try:
            if not self._again(talk):
                talk(self._connect())
            return ""
        except (OSError, KeyError, ValueError, TypeError) as error:
            self._drop()
            if self._closing:
                return "the engine ends"
            why = f"{self._name}: {error or type(error).__name__}"
            told, self._outage.why = self._outage.why, why
            failed = time.monotonic()
            self._outage.until = failed + max(RETRY_S, RETRY_TIMES * (failed - now))
            if why != told:
                log.warning("KV peers: %s; tokens are computed", why)
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
        connected = socket.create_connection(self._address, self._own.timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._link = Link(connected, self._own.timeout_s)
        card = greet(link, self._own.secret, {}, server=False)
        differs = differences(self._own.about, card.get("about"))
        if differs:
            raise PeerRefused(
                f"its blocks are of another model or version; these differ: {', '.join(differs)}"
            )
        self._offered, self._outage.why = card.get("transports") or (), ""
        return link

    def _choose(self, link: Link) -> Transport:
        """The best transport that both sides have and that works."""
        for transport in self._own.transports:
            if transport.name not in self._offered or (transport.local and not link.within_host):
                continue
            link.say(op="transport", transport=transport.name)
            try:
                self._far = transport.meet(link.hear()["transport"])
            except OSError as error:
                log.warning("KV peers: %s is not reached by %s: %s", self._name, transport.name, error)
                continue
            log.info("KV peers: %s is reached by %s", self._name, transport.name)
            return transport
        own = ", ".join(transport.name for transport in self._own.transports)
        raise PeerRefused(f"it has none of the transports {own}; give both the same kv_connector")

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = self._transport = self._far = None

    def _keep(self, link: Link) -> None:
        link.say(op="keep", leases=list(self.leases))

    def _ask(self, link: Link, names: Sequence[Sequence[bytes]], found: list[tuple[int, bytes]]) -> None:
        link.say(op="ask", names=["".join(name.hex() for name in group) for group in names])
        has = link.hear()["has"]
        for group, (asked, there) in enumerate(zip(names, has, strict=True)):
            found += [(group, name) for name, mark in zip(asked, there, strict=True) if mark == "1"]

    def _read(self, first: Slot) -> None:
        """Read this slot, and others that are wanted by now."""
        slots, left, last = [first], READ_BYTES - len(first.memory), False
        while len(slots) < READ_AT_ONCE and left > 0 and not last:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if isinstance(job, Slot):
                slots.append(job)
                left -= len(job.memory)
            else:
                self._jobs.put(job)
                last = True
        come: set[int] = set()
        try:
            problem = self._attempt(lambda link: self._receive(link, slots, come))
        except StillWriting:
            return  # the slots stay in use for ever, because bytes may still arrive in them
        for slot in slots:
            missing = None if id(slot) in come else problem or f"{self._name} has it no more"
            self._own.tell(Done(slot, 0, missing))

    def _receive(self, link: Link, slots: Sequence[Slot], come: set[int]) -> None:
        transport = self._transport = self._transport or self._choose(link)
        link.say(op="read", wants=[[slot.group, slot.name.hex()] for slot in slots])
        found = [slot for slot, there in zip(slots, link.hear()["found"], strict=True) if there]
        rooms = [Record(slot.ptr, slot.memory[: self._own.sizes[slot.group]]) for slot in found]
        if rooms:
            transport.receive(link, self._far, rooms)
        come.update(map(id, found))

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the conversation that is under way, and wait for the thread."""
        self._closing = True
        link = self._link
        if link is not None:
            link.close()
        self._thread.join()
