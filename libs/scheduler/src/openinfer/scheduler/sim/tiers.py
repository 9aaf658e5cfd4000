"""SimTiers: host memory and a disk behind a pool, in virtual time."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .runner import SimRunner

BACKLOG_BYTES = 1 << 30
"""Bytes that wait for the disk at most; blocks beyond are not written."""


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """Bytes a second: host memory to the device, the disk to host memory, and back to the disk."""

    host: float
    disk_read: float
    disk_write: float


@dataclass(slots=True)
class SimTierStats:
    """Blocks so far."""

    saved: int = 0
    from_host: int = 0
    from_disk: int = 0
    not_written: int = 0


class SimTiers:
    """Loader and saver of an `openinfer.kvpool.Pool`, as `openinfer.kvpool.tiers.Tiers` is one.

    groups: of the pool; num_blocks and block_bytes are those on the device. host_bytes are divided among the groups as
    the device's memory is. The disk has disk_bytes; 0: there is no disk.
    Records leave each tier in the order of their last use. Loads share a link, and reads and writes the disk, one after
    the other. Copies out run beside the steps and are free. `simulate` sets the clock.
    """

    def __init__(
        self, groups: Sequence[Any], host_bytes: float, disk_bytes: float, speeds: TierSpeeds
    ) -> None:
        whole = sum(group.num_blocks * group.block_bytes for group in groups)
        self.host_blocks = [int(host_bytes * group.num_blocks // whole) for group in groups]
        """Blocks of each group that host memory has room for."""
        self.stats = SimTierStats()
        self.clock: SimRunner | None = None
        self._sizes = [group.block_bytes for group in groups]
        self._speeds, self._disk_bytes, self._disk_used = speeds, disk_bytes, 0
        self._host: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in groups]
        self._kept: set[tuple[int, bytes]] = set()  # of the load that is about to begin, and of copies out
        # With the time at which it is written.
        self._disk: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._link_free = self._reads_free = self._writes_free = 0.0
        self._loads: list[tuple[float, int, Any]] = []  # a heap by the end
        self._numbers = itertools.count()

    # -- saving --

    def save(self, group: int, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        copied = []
        for name in names:
            if name in self._host[group]:
                self._host[group].move_to_end(name)
            elif self._take(group, name):
                copied.append(name)
                self._kept.add((group, name))  # in use until the copies have ended
                self._write(group, name)
        for name in copied:
            self._kept.discard((group, name))
            self._host[group].move_to_end(name)
        self.stats.saved += len(copied)

    def _take(self, group: int, name: bytes) -> bool:
        """Room for a record in host memory. False: all records are in use."""
        host = self._host[group]
        if len(host) >= self.host_blocks[group]:
            oldest = next((one for one in host if (group, one) not in self._kept), None)
            if oldest is None:
                return False
            del host[oldest]
        host[name] = None
        return True

    def _write(self, group: int, name: bytes) -> None:
        size, now = self._sizes[group], self._now
        if (group, name) in self._disk or size > self._disk_bytes:
            return
        begin = max(self._writes_free, now)
        if (begin - now) * self._speeds.disk_write > BACKLOG_BYTES:
            self.stats.not_written += 1
            return
        while self._disk_used + size > self._disk_bytes:
            (old, _), _ = self._disk.popitem(last=False)
            self._disk_used -= self._sizes[old]
        self._writes_free = begin + size / self._speeds.disk_write
        self._disk[group, name] = self._writes_free
        self._disk_used += size

    def clear(self) -> None:
        for host in self._host:
            host.clear()
        self._disk.clear()
        self._disk_used = 0

    def take_events(self) -> Sequence[Any]:
        return ()

    # -- loading --

    def holds(self, group: int, names: Sequence[bytes]) -> Sequence[bool]:
        """Which blocks are in host memory or on the disk."""
        return [name in self._host[group] or self._on_disk(group, name) for name in names]

    def _on_disk(self, group: int, name: bytes) -> bool:
        return self._disk.get((group, name), float("inf")) <= self._now

    def expect(self, group: int, names: Sequence[bytes]) -> None:
        """Keep the records of a load until it begins."""
        self._kept.update((group, name) for name in names)

    def begin(self, load: Any) -> None:
        """Start a load: its `pieces` have a group and a name; pieces that are nowhere are added to `failed`."""
        num_bytes, read = 0, self._now
        for piece in load.pieces:
            key, size = (piece.group, piece.name), self._sizes[piece.group]
            if piece.name in self._host[piece.group]:
                self._host[piece.group].move_to_end(piece.name)
            elif self._on_disk(*key) and self._take(*key):
                self._disk.move_to_end(key)
                self._reads_free = max(self._reads_free, self._now) + size / self._speeds.disk_read
                read = self._reads_free
                self.stats.from_disk += 1
            else:
                load.failed.add(piece)
                continue
            num_bytes += size
            self.stats.from_host += 1
        self._kept.clear()
        self._link_free = max(self._link_free, self._now) + num_bytes / self._speeds.host
        heapq.heappush(self._loads, (max(self._link_free, read), next(self._numbers), load))

    def poll(self, wait_s: float | None) -> Sequence[Any]:
        """Loads that have ended. The time passes while the caller waits for one."""
        if not self._loads or self.clock is None:
            return ()
        if wait_s is None or wait_s > 0:
            end = self._loads[0][0]
            self.clock.now = max(self._now, end if wait_s is None else min(end, self._now + wait_s))
        ended = []
        while self._loads and self._loads[0][0] <= self._now:
            ended.append(heapq.heappop(self._loads)[2])
        return ended

    @property
    def _now(self) -> float:
        return 0.0 if self.clock is None else self.clock.now
