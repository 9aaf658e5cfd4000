"""Tiers: the loader and saver of a pool, over host memory and a disk.

A block is copied out when the pool evicts it, and the stream of the steps waits for that copy on the device. So the
step that overwrites the block runs after it, and the host waits for nothing. A load takes blocks that no step uses; its
lease comes back when its copies have ended. Other streams copy (`mover`).
"""

import dataclasses
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer.tensor import Stream, Tensor

from ..events import BlockRemoved, BlockStored
from ..eviction import Factory, Lru
from ..group import Group
from ..loading import Load, Piece
from ..pool import Pool
from .disk import Disk
from .host import HostMemory, Slot
from .layout import Layout
from .mover import Kind, Mover, Others, SharedRecords, Ticket, TierCopy
from .peers import Sharing
from .told import LoadTime, TierStats, Told

log = logging.getLogger("openinfer.kvpool")

LOADS_KEPT = 256
_TICK_S = 0.0002
_AT_ONCE = 64
"""Blocks of a group that `take_all` evicts before it waits: the host's memory must have room for them."""

PIECES, FIRST_PIECES = 256, 64
"""Copies begun in a turn of a load, and in its first, which evicts too. More would hold up the next step."""
LEAVING_BYTES = 128 << 20
"""Bytes on their way out for a load at most. A block that the next step overwrites leaves behind them."""

BACKLOG_BYTES = 1 << 30
"""Bytes that wait for the disk at most, so that an engine ends soon."""

Save = tuple[TierCopy, Slot]
"""A block on its way to a record."""


@dataclass(slots=True, eq=False)
class Copies:
    """A batch of copies, and the slots that they use until it has ended."""

    ticket: Ticket
    slots: list[Slot]


@dataclass(slots=True, eq=False)
class Loading:
    """A load under way. begun, deadline: by time.monotonic(). saves: number of the last batch of copies that made room
    for it. That batch must end first, because a step may then write a block that the load could not fill. swaps: what
    is to be copied out of its blocks first, by block. expected: records that it uses, by piece."""

    load: Load
    waiting: deque[Piece]
    begun: float
    deadline: float
    saves: int
    swaps: dict[tuple[int, int], Save]
    expected: dict[tuple[int, bytes], Slot]
    reading: dict[tuple[int, bytes], Piece] = field(default_factory=dict)
    """Pieces whose records are on their way to host memory."""
    from_disk: int = 0
    from_peer: int = 0
    copies: deque[Copies] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        """Whether its pieces have come, or have failed to."""
        return not (self.waiting or self.reading or self.copies or self.swaps)

    def was_read(self, slot: Slot) -> bool:
        """A read has ended. Returns whether it was for this load, whose piece is then looked at next."""
        piece = self.reading.pop((slot.group, slot.name), None)
        if piece is not None:
            self.waiting.appendleft(piece)
        return piece is not None

    def time(self, now: float) -> LoadTime:
        """The time of a load that has ended."""
        counts = self.from_disk, self.from_peer, len(self.load.failed)
        return LoadTime(now - self.begun, len(self.load.pieces), *counts)


class Tiers:
    """Loader and Saver of a pool of these groups. One thread calls it, that of the pool's owner.

    host_bytes: page-locked memory. eviction: makes the policy of a group's records in it; the pool's policy fits.
    disk: a tier behind it, which this object closes; records then go on to the disk, and survive a restart. events:
    keep events for `take_events`, which the caller must call then. load_timeout_s: a load that waits longer for the
    disk or a peer fails, and its tokens are computed. sharing: other engines that blocks come from and go to, which
    this object opens and closes. parts: of a record; `groups` have the bytes of all, and each rank copies one.

    Before `attach` nothing is saved or loaded. Raises InvalidTiers for too little memory.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        host_bytes: int,
        disk: Disk | None = None,
        *,
        eviction: Factory = Lru,
        events: bool = False,
        load_timeout_s: float = 5.0,
        sharing: Sharing | None = None,
        parts: int = 1,
    ) -> None:
        self.groups, self.stats = tuple(groups), TierStats()
        self._host, self._disk = HostMemory(groups, host_bytes, eviction), disk
        # behind: a load has timed out, and the disk has read nothing since
        self._load_timeout_s, self._behind = load_timeout_s, False
        self.sharing, self._peers = sharing, sharing.peers if sharing is not None else None
        self._expected: dict[tuple[int, bytes], Slot] = {}  # of the load that is about to begin
        self._swaps: dict[tuple[int, int], Save] | None = None  # what makes room for that load, by block
        self._told, self._parts = Told(self.groups, keep=events), parts
        self._mover: Mover | None = None
        self._saves, self._loads = deque[Copies](), list[Loading]()
        self.load_times: deque[LoadTime] = deque(maxlen=LOADS_KEPT)
        """The last loads that have ended. The caller takes them out."""

    def attach(self, cache: Sequence[Sequence[Tensor]], stream: Stream, others: Others | None = None) -> None:
        """Begin to work. cache: see Layout. stream: the one that steps run on. others: ranks that have parts of the
        cache too. Host memory is locked in a thread from now on; the tier grows with it. Raises InvalidTiers."""
        own = [dataclasses.replace(one, block_bytes=one.block_bytes // self._parts) for one in self.groups]
        self._mover, sharing = Mover(Layout(own, cache), stream, others), self.sharing
        shared = others.shared if others is not None else None
        if shared is None and sharing is not None and sharing.config.serves:
            shared = SharedRecords.new(sum(self.pieces))
        register = sharing.register if sharing is not None else None
        self._host.grow(stream.device, register, shared.records if shared is not None else None)
        if sharing is not None and shared is not None:
            sharing.open(self._host, shared)
        if self._disk is not None:
            self._disk.start()

    @property
    def keeps_after_reset(self) -> bool:
        """Whether blocks may be found that were there before the pool was reset: on a disk, or at peers."""
        return self._disk is not None or self.sharing is not None

    @property
    def pieces(self) -> list[int]:
        """Bytes of each piece of host memory that the tier will have."""
        return self._host.pieces

    @property
    def ready(self) -> bool:
        """Whether blocks of every group may go to host memory, which is locked in the background."""
        return self._host.has_room

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in host memory."""
        return self._host.used_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the blocks on the disk."""
        return self._disk.used_bytes if self._disk is not None else 0

    # -- saving --

    def save(self, group: int, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        if self._mover is None:
            return
        self.collect()
        saves, absent = [], self._host.absent(group, names)
        for name, block in itertools.compress(zip(names, blocks, strict=True), absent):
            slot = self._host.take(group, name)
            if slot is None:
                self.stats.dropped += 1
                continue
            saves.append((TierCopy(group, block, slot.ptr), slot))
        self._told.removed(self._host.evicted, "CPU")
        if self._swaps is None:
            self._save("d2h", saves)
        else:
            self._swaps |= {(group, copy.block): (copy, slot) for copy, slot in saves}

    def _save(self, kind: Kind, saves: Sequence[Save]) -> None:
        if self._mover is None or not saves:
            return
        for slot in (slots := [slot for _, slot in saves]):
            self._host.fill(slot)
        self._saves.append(Copies(self._mover.copy(kind, [copy for copy, _ in saves]), slots))
        self.stats.saved += len(slots)
        names = [slot.name for slot in slots if self._host.find(slot.group, slot.name) is slot]
        self._told.stored(slots[0].group, names, "CPU")

    def keep(self, pool: Pool, seconds: float = 2.0) -> None:
        """Write the pool's cached blocks to the disk, for at most this time, so that the next engine finds them."""
        until, disk = time.monotonic() + seconds, self._disk
        if disk is None or self._mover is None:
            return
        for group in range(len(self.groups)):
            for name, block in pool.cached(group):
                while disk.num_writing + len(self._saves) >= self._backlog(group):
                    if time.monotonic() >= until:
                        return
                    self.collect(_TICK_S)
                if not disk.has(group, name):
                    self.save(group, [name], [block])

    def take_all(self, pool: Pool) -> None:
        """Evict all cached blocks of a pool into the tiers, and wait for the copies. The pool then has none."""
        while pool.evict(_AT_ONCE):
            self.settle()

    def settle(self) -> None:
        """Wait for copies, but those of a lost rank, so that the blocks' memory can go. No load may be under way."""
        if self._mover is None:
            return
        self._mover.synchronize()
        self.collect()
        while self._saves and not self._mover.lost:  # until other ranks have made theirs
            self.collect(_TICK_S)

    def _backlog(self, group: int) -> int:
        """Records that may wait for the disk: half of a group's, and no more than BACKLOG_BYTES."""
        most = BACKLOG_BYTES // max(1, self.groups[group].block_bytes)
        return max(1, min(self._host.num_slots[group] // 2, most))

    def clear(self) -> None:
        """Forget every block, as after a change of weights. Nothing loads."""
        if self.sharing is not None:
            self.sharing.clear()
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    # -- loading --

    def holds(self, group: int, names: Sequence[bytes]) -> Sequence[bool]:
        """Which blocks are in host memory or on the disk, or have been promised by a peer."""
        if self._mover is None or not self._host.has_room:
            return [False] * len(names)
        self.collect()
        there = self._host.has(group, names)
        sources = [s for s in (None if self._behind else self._disk, self._peers) if s is not None]
        if sources and not all(there):
            pairs = zip(names, there, strict=True)
            there = [here or any(source.has(group, name) for source in sources) for name, here in pairs]
        return there

    def expect(self, group: int, names: Sequence[bytes]) -> None:
        """Keep the records of a load until they are copied. Blocks that the pool evicts until then make room for it."""
        self._swaps = self._swaps or {}
        self._expected |= self._host.expect(group, names)

    def begin(self, load: Load) -> None:
        begun, pieces = time.monotonic(), deque(load.pieces)
        until, saves = begun + self._load_timeout_s, self._saves[-1].ticket.number if self._saves else 0
        loading = Loading(load, pieces, begun, until, saves, self._swaps or {}, self._expected)
        self._swaps, self._expected = None, {}
        self._loads.append(loading)
        self._advance(loading, FIRST_PIECES)

    def poll(self, wait_s: float | None) -> Sequence[Load]:
        until = None if wait_s is None else time.monotonic() + wait_s
        while self._loads:
            self.collect()
            for loading in self._loads:
                self._advance(loading)
            saving = self._saves[0].ticket.number if self._saves else sys.maxsize
            ended = [one for one in self._loads if one.done and one.saves < saving]
            if ended:
                self._loads = [loading for loading in self._loads if loading not in ended]
                now = time.monotonic()
                self.load_times += [one.time(now) for one in ended]
                return [loading.load for loading in ended]
            left = _TICK_S if until is None else min(_TICK_S, until - time.monotonic())
            if left <= 0:
                break
            self.collect(left)
        return []

    def _advance(self, loading: Loading, most: int = PIECES) -> None:
        """Start the copies of up to `most` pieces that are in host memory, and the reads of others."""
        slots: list[Slot] = []
        copies: list[TierCopy] = []
        late, waited, started = time.monotonic() > loading.deadline, not loading.done, 0
        leaving = (self.groups[slot.group].block_bytes for saves in self._saves for slot in saves.slots)
        room = LEAVING_BYTES - sum(leaving)
        if late:  # look at the pieces whose records do not come
            loading.waiting += loading.reading.values()
            loading.reading.clear()
        for _ in range(len(loading.waiting)):
            if started == most or (loading.swaps and room <= 0):
                break
            piece = loading.waiting.popleft()
            pinned = loading.expected.pop((piece.group, piece.name), None)
            slot = pinned or self._host.find(piece.group, piece.name)
            sources = (self._disk, self._peers) if slot is None and not late else ()
            source = next((s for s in sources if s is not None and s.has(piece.group, piece.name)), None)
            if source is not None:
                slot = self._host.take(piece.group, piece.name)
                if slot is None:  # until other copies have ended
                    loading.waiting.append(piece)
                    break
                source.read(slot)
                loading.reading[piece.group, piece.name] = piece
                loading.from_disk += source is self._disk
                loading.from_peer, started = loading.from_peer + (source is self._peers), started + 1
                continue
            if slot is not None and slot.readable:
                slots.append(slot if slot is pinned else self._host.use(slot))
                copies.append(TierCopy(piece.group, piece.block, slot.ptr))
                started, room = started + 1, room - self.groups[piece.group].block_bytes
                continue
            if pinned is not None:
                self._host.leave(pinned)
            if slot is None or late:
                loading.load.failed.add(piece)
                self.stats.failed += 1
            else:
                loading.waiting.append(piece)
        if late and waited and self._disk is not None and self._disk.num_reading and not self._behind:
            self._behind = True
            wait_s = self._load_timeout_s
            log.warning("KV offload: reads from the disk take more than %g s; tokens are computed", wait_s)
        if self._mover is None:
            return
        more = max(room, 0) // max(group.block_bytes for group in self.groups)
        self._swap(loading, copies, min(most, len(copies) + more))
        if slots:
            loading.copies.append(Copies(self._mover.copy("h2d", copies), slots))
            self.stats.from_host += len(slots)
        while loading.copies and self._mover.ended(loading.copies[0].ticket):
            self._end(loading.copies.popleft())

    def _swap(self, loading: Loading, copies: Sequence[TierCopy], most: int) -> None:
        """Begin to copy out what is in the blocks of these copies, and in others that the load has, up to `most`."""
        swaps = loading.swaps
        taken = [swaps.pop(key) for key in ((c.group, c.block) for c in copies) if key in swaps]
        taken += [swaps.popitem()[1] for _ in range(min(len(swaps), most - len(taken)))]
        for group in {copy.group for copy, _ in taken}:
            self._save("swap", [save for save in taken if save[0].group == group])
        if taken:
            loading.saves = self._saves[-1].ticket.number

    # -- both --

    def collect(self, wait_s: float = 0.0) -> None:
        """Record copies, reads and writes that have ended, so that peers get what has come. Waits up to wait_s seconds
        for a read or write."""
        self._told.removed(self._host.evicted, "CPU")  # before the same blocks may come again
        while self._saves and self._mover is not None and self._mover.ended(self._saves[0].ticket):
            self._end(self._saves.popleft())
        if self._peers is not None:
            for slot, _, problem in self._peers.done(0.0 if self._disk is not None else wait_s):
                self.stats.from_peer += problem is None
                self._read(slot, problem)
                self._host.leave(slot)
        elif self._disk is None and wait_s:
            time.sleep(wait_s)
        if self._disk is not None:
            ended = self._disk.done(wait_s)
            self._tell_disk()
            for slot, ticket, problem in ended:
                if ticket:
                    self.stats.to_disk += problem is None
                    self.stats.not_written += problem is not None
                    if self._disk.has(slot.group, slot.name):
                        self._told.stored(slot.group, [slot.name], "DISK")
                else:
                    self._behind = False
                    self.stats.from_disk += problem is None
                    self._read(slot, problem)
                self._host.leave(slot)

    def _read(self, slot: Slot, problem: str | None) -> None:
        for loading in self._loads:
            if loading.was_read(slot) and problem is None:
                loading.expected[slot.group, slot.name] = self._host.use(slot)
        if problem is None:
            self._host.fill(slot)
            slot.whole = True
            if self._host.find(slot.group, slot.name) is slot:  # not cleared meanwhile
                self._told.stored(slot.group, [slot.name], "CPU")
        else:
            self._host.forget(slot)

    def _end(self, copies: Copies) -> None:
        """Copies have ended: give back their slots, or write them to the disk."""
        for slot in copies.slots:
            slot.whole = slot.readable
            if not self._write(slot):
                self._host.leave(slot)

    def _write(self, slot: Slot) -> bool:
        """Start to write a slot's record, unless the disk already has it or is falling behind."""
        disk = self._disk
        if disk is None or not slot.readable or disk.has(slot.group, slot.name):
            return False
        if not disk.takes_writes or disk.num_writing >= self._backlog(slot.group):
            self.stats.not_written += 1
            return False
        return disk.write(slot)

    # -- events --

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """The events since the last call, of the media CPU and DISK."""
        self._told.removed(self._host.evicted, "CPU")
        self._tell_disk()
        return self._told.take()

    def _tell_disk(self) -> None:
        if self._disk is not None:
            for group, name in self._disk.found:
                self._told.stored(group, [name], "DISK")
            self._disk.found.clear()
            self._told.removed(self._disk.evicted, "DISK")

    def close(self) -> None:
        """Wait for the copies and the writes under way, and give everything back."""
        if self._mover is None:
            return
        self.settle()
        for loading in self._loads:
            for copies in loading.copies:
                while not (self._mover.lost or self._mover.ended(copies.ticket)):
                    time.sleep(_TICK_S)
        if self.sharing is not None:
            self.sharing.close()
        self.collect()
        if self._disk is not None:
            self._disk.close()
        self._mover.close()
        self._host.close()
        self._mover = None
