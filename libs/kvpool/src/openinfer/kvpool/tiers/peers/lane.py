"""Lane: a thread that talks to one peer over a connection of its own."""

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
from .link import BRIEF, Link, differences, greet
from .server import READ_AT_ONCE, READ_BYTES
from .transport import StillWriting, TransferRecord, Transport, transfer_s

log = logging.getLogger("openinfer.kvpool")

Address = tuple[str, int]
"""Host and port."""
RETRY_S, RETRY_TIMES = 5.0, 10
"""Seconds without an attempt after a peer could not be reached, or was slow; and how many times as long as the attempt,
if that is more. Requests wait for an attempt."""
SLOW = 0.25
"""An exchange that takes this part of the time that it may take is slow."""
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
    """No lane of a peer talks to it until this time (time.monotonic()), for this reason."""

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
                    self._attempt(lambda link: link.say(op="keep", leases=list(self.leases)))
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

    def _attempt(self, talk: Callable[[Link], None], more_s: float = 0.0) -> str:
        """Talk to the peer, which may take timeout_s, connecting included, and more_s for records. Returns why that was
        not possible; "" if it was. Whatever a peer says ends the conversation at worst, never the thread."""
        start = time.monotonic()
        if start < self._outage.until:
            return self._outage.why
        try:
            if not self._again(talk, start):
                talk(self._connect(start))
            taken = time.monotonic() - start
            if taken > SLOW * self._own.timeout_s + more_s:
                self._pause(f"{self._name} is slow: an exchange took {taken:.1f} s", taken)
            elif start + taken >= self._outage.until:  # it is back; another lane's news may be newer
                self._outage.why = ""
            return ""
        except Exception as error:
            self._drop()
            if self._closing:
                return "the engine ends"
            why = f"{self._name}: {error or type(error).__name__}"
            self._pause(why, time.monotonic() - start)
            if isinstance(error, StillWriting):
                raise
            return why

    def _pause(self, why: str, taken: float) -> None:
        said, self._outage.why = self._outage.why, why
        self._outage.until = time.monotonic() + max(RETRY_S, RETRY_TIMES * taken)
        if why != said:
            log.warning("KV peers: %s; tokens are computed", why[:400])

    def _again(self, talk: Callable[[Link], None], began: float) -> bool:
        """Talk over the connection that is there. False: it is lost, which may be for its long silence only."""
        if self._link is None:
            return False
        try:
            self._link.begin(self._own.timeout_s, began)
            talk(self._link)
            return True
        except ConnectionError as error:
            if self._closing or isinstance(error, StillWriting):
                raise
            self._drop()
            return False

    def _connect(self, began: float) -> Link:
        left = began + self._own.timeout_s - time.monotonic()
        connected = socket.create_connection(self._address, max(0.001, left))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._link = Link(connected, self._own.timeout_s)
        link.begin(self._own.timeout_s, began)
        card = greet(link, self._own.secret, {}, server=False)
        differs = differences(self._own.about, card.get("about"))
        if differs:
            raise PeerRefused(
                f"its blocks are of another model or version; these differ: {', '.join(differs)}"
            )
        self._offered = card.get("transports") or ()
        return link

    def _choose(self, link: Link) -> Transport:
        """The best transport that both sides have and that works."""
        for transport in self._own.transports:
            if transport.name not in self._offered or (transport.local and not link.within_host):
                continue
            link.say(op="transport", transport=transport.name)
            card = link.hear()["transport"]
            try:
                self._far = transport.meet(card)
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

    def _ask(self, link: Link, names: Sequence[Sequence[bytes]], found: list[tuple[int, bytes]]) -> None:
        link.say(op="ask", names=["".join(name.hex() for name in group) for group in names])
        has = link.hear(BRIEF + 8 * sum(map(len, names)))["has"]
        for group, (asked, there) in enumerate(zip(names, has, strict=True)):
            found += [(group, name) for name, mark in zip(asked, there, strict=True) if mark == "1"]

    def _read(self, first: Slot) -> None:
        """Read this slot, and others requested by now."""
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
            rooms = [TransferRecord(slot.ptr, slot.memory[: self._own.sizes[slot.group]]) for slot in slots]
            problem = self._attempt(lambda link: self._receive(link, slots, rooms, come), transfer_s(rooms))
        except StillWriting:
            return  # the slots stay in use for ever, because bytes may still arrive in them
        for slot in slots:
            missing = None if id(slot) in come else problem or f"{self._name} no longer has it"
            self._own.tell(Done(slot, 0, missing))

    def _receive(
        self, link: Link, slots: Sequence[Slot], rooms: Sequence[TransferRecord], come: set[int]
    ) -> None:
        transport = self._transport = self._transport or self._choose(link)
        link.say(op="read", wants=[[slot.group, slot.name.hex()] for slot in slots])
        there = link.hear(BRIEF + 8 * len(slots))["found"]
        wanted = [room for room, is_there in zip(rooms, there, strict=True) if is_there]
        if wanted:
            link.begin(self._own.timeout_s + transfer_s(wanted))
            transport.receive(link, self._far, wanted)
        come.update(id(slot) for slot, is_there in zip(slots, there, strict=True) if is_there)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the conversation that is under way, and wait for the thread."""
        self._closing = True
        link = self._link
        if link is not None:
            link.end()
        self._thread.join()
