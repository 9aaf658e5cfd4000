"""Peers: other engines whose host memory is asked for blocks, by threads of their own.

A question ("which of these blocks have you?") comes before a load, because a pool looks its prefixes up at once and can
wait for no network. Answers become claims, which `has` looks up; `read` then brings a record into host memory.
"""

import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...group import Group
from ..disk import Done
from ..host import Slot
from .lane import Address, Answered, Ask, End, Jobs, Lane, Outage, Own
from .transport import Transport

log = logging.getLogger("openinfer.kvpool")

LANES = 8
"""Connections to a peer that bring records at once. One does not reach what a network or a host's memory can do."""
MAX_PEERS = 256
"""A peer more takes the place of the one that was asked longest ago."""
MAX_CLAIMS = 1 << 18
"""Blocks that peers have promised and that no load has taken; the oldest are forgotten, because each takes memory."""


class PeerAnswer(NamedTuple):
    """The end of a question: what went wrong, by peer; "" if all went well."""

    key: int
    problem: str


@dataclass(slots=True)
class _Question:
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
        self._news: queue.SimpleQueue[Answered | Done] = queue.SimpleQueue()
        sizes = [group.block_bytes for group in groups]
        self._own = Own(sizes, transports, secret, about, timeout_s, self._news.put)
        self._addresses, self._timeout_s = tuple(addresses), timeout_s
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()  # the one asked longest ago first
        self._left: list[_Peer] = []  # their last jobs may be under way
        self._claims: OrderedDict[tuple[int, bytes], Address] = OrderedDict()
        self._questions: dict[int, _Question] = {}
        self._ended: list[PeerAnswer] = []
        self._done: list[Done] = []

    def ask(self, key: int, names: Sequence[Sequence[bytes]], address: Address | None = None) -> bool:
        """Ask one peer, or all of `addresses`, for these blocks, by group. False: there is none to ask."""
        asked = {address} if address is not None else set(self._addresses)
        for one in asked:
            peer = self._peer(one)
            if peer is None:
                log.warning(
                    "KV peers: %s:%d is not asked, because %d peers keep blocks for requests", *one, MAX_PEERS
                )
                asked = asked - {one}
                continue
            peer.jobs.put(Ask(key, names))
        if asked:
            self._questions[key] = _Question(asked, time.monotonic() + self._timeout_s)
        return bool(asked)

    def _peer(self, address: Address) -> "_Peer | None":
        peer = self._peers.get(address)
        if peer is None and (len(self._peers) < MAX_PEERS or self._part()):
            peer = self._peers[address] = _Peer(address, self._own)
        if peer is not None:
            self._peers.move_to_end(address)
        return peer

    def _part(self) -> bool:
        """Part with the peer that was asked longest ago. False: all keep leases, or are asked for every prompt."""
        for address, peer in self._peers.items():
            if not peer.leases and address not in self._addresses:
                del self._peers[address]
                peer.stop()
                self._left = [*(one for one in self._left if one.talks), peer]
                return True
        return False

    def answers(self, wait_s: float) -> list[PeerAnswer]:
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
            peer.read(slot)

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
            peer.jobs.put(End(lease))

    def _pump(self, wait_s: float) -> None:
        """Take the news of the threads. Waits up to wait_s seconds for the first."""
        with suppress(queue.Empty):
            self._take(self._news.get(timeout=wait_s) if wait_s > 0 else self._news.get_nowait())
            while True:
                self._take(self._news.get_nowait())

    def _take(self, news: Answered | Done) -> None:
        if isinstance(news, Done):
            self._done.append(news)
            return
        self._claims |= dict.fromkeys(news.found, news.address)
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
        self._ended.append(PeerAnswer(key, "; ".join(self._questions.pop(key).problems)))

    def clear(self) -> None:
        """Forget what peers have: it is of other weights now."""
        self._claims.clear()

    def close(self) -> None:
        """End all conversations, and wait for the threads."""
        for peer in self._peers.values():
            peer.stop()
        for peer in (*self._peers.values(), *self._left):
            peer.join()
        self._peers.clear()


class _Peer:
    """A lane for questions and leases, and lanes that share the reads of records."""

    def __init__(self, address: Address, own: Own) -> None:
        self._address, self._own = address, own
        self.jobs: Jobs = queue.SimpleQueue()
        self._reads: Jobs = queue.SimpleQueue()
        self.outage = Outage()
        """Its lanes share this."""
        self._lanes = [Lane(address, own, self.jobs, self.outage)]

    @property
    def talks(self) -> bool:
        """Whether a lane has not ended."""
        return any(lane.runs for lane in self._lanes)

    @property
    def leases(self) -> set[str]:
        return self._lanes[0].leases

    def read(self, slot: Slot) -> None:
        if len(self._lanes) == 1 or (self._reads.qsize() and len(self._lanes) <= LANES):
            self._lanes.append(Lane(self._address, self._own, self._reads, self.outage))
        self._reads.put(slot)

    def stop(self) -> None:
        for jobs in (self.jobs, *[self._reads] * (len(self._lanes) - 1)):
            jobs.put(None)

    def join(self) -> None:
        for lane in self._lanes:
            lane.close()
