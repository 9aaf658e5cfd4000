"""HostMemory: records of blocks in page-locked host memory, by name, with an eviction policy."""

import ctypes
import logging
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.tensor import Device, OutOfMemory, PinnedBuffer, TensorError

from ..errors import InvalidTiers
from ..eviction import Factory
from ..group import Group
from .layout import ALIGNMENT, align_up, huge

KEPT_BYTES = 1 << 30
"""Bytes that stay free for all else."""
_MEMINFO, _OWN, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def room_bytes() -> int:
    """Bytes that a tier may still take: of the host, and of the control groups (version 2) of this process. More than
    any host has where the system tells neither."""
    room = [sys.maxsize]
    with suppress(OSError, StopIteration):
        lines = _MEMINFO.read_text().splitlines()
        room.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, StopIteration):
        own = next(line[4:] for line in _OWN.read_text().splitlines() if line.startswith("0::/"))
        names = Path(own).parts
        room += [_of_group(_GROUPS.joinpath(*names[:count])) for count in range(len(names) + 1)]
    return max(0, min(room) - KEPT_BYTES)


def _of_group(group: Path) -> int:
    """Pages of files that are not in use count as free, because the kernel takes them back."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # "max": no limit; or the group of all processes
        return sys.maxsize


log = logging.getLogger("openinfer.kvpool")

Array = np.ndarray[Any, Any]
Register = Callable[[int, int], None]
"""Gets the address and the bytes of a piece of memory."""

SLAB_BYTES = 64 << 20
"""Memory is locked in pieces of about this size, so that the tier can be used while it grows."""


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one record."""

    group: int
    ptr: int
    """Its address, a multiple of 4,096."""
    memory: memoryview = field(repr=False)
    """Its bytes, a multiple of 4,096."""
    name: bytes = b""
    users: int = 0
    """Copies, reads and writes under way. A slot in use is not evicted."""
    readable: bool = False
    """Whether the record is there, or will be when the store stream has done its work."""
    whole: bool = False
    """Whether the record is there, so that another thread may read it."""


class HostMemory:
    """`num_bytes` of host memory, divided among groups as the pool's. One thread calls it; others may `lend`, `leave`.

    eviction: makes the policy of a group; it says which blocks are worth their room.

    `grow` starts a thread that locks the memory piece by piece. Raises InvalidTiers where a group would have no slot.
    """

    def __init__(self, groups: Sequence[Group], num_bytes: int, eviction: Factory) -> None:
        whole = sum(group.num_blocks * group.block_bytes for group in groups)
        self._sizes = [align_up(group.block_bytes) for group in groups]
        self.num_slots = [0] * len(groups)
        """Slots that each group will have."""
        for index, group in enumerate(groups):
            if not group.block_bytes:
                continue
            share = num_bytes * group.num_blocks * group.block_bytes // whole
            self.num_slots[index] = share // self._sizes[index]
            if not self.num_slots[index]:
                raise InvalidTiers(
                    f"{num_bytes / 1e9:g} GB of host memory have no room for a block of group {group.name!r} "
                    f"({group.block_bytes / 1e9:g} GB); give more"
                )
        self.used_bytes = 0
        """Bytes of the records."""
        self.evicted: list[tuple[int, bytes]] = []
        """Group and name of the records that were evicted; the caller clears it."""
        self._free: list[list[Slot]] = [[] for _ in groups]
        self._index: list[dict[bytes, Slot]] = [{} for _ in groups]
        self._idle = [eviction(group) for group in groups]  # records without a user
        self._made: deque[tuple[int, PinnedBuffer]] = deque()  # by the thread, not cut into slots yet
        self._lock = threading.RLock()  # of slots, the index and the policies
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def grow(self, device: Device, register: Register | None = None, memory: Array | None = None) -> None:
        """Start to lock the memory for copies of this device. register: gets the address and the bytes of each piece in
        that thread, before its use. memory: uint8 [nbytes], fresh, at a multiple of 4,096; None: its own."""
        self._thread = threading.Thread(
            target=self._lock_pages, args=(device, register, memory), name="kv-offload-memory", daemon=True
        )
        self._thread.start()

    @property
    def pieces(self) -> list[int]:
        """Bytes of each piece, in their order. No record lies in two, because a device copies from one alone."""
        return [nbytes for _, nbytes in self._pieces()]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        left = list(self.num_slots)
        while any(left):
            for group, size in enumerate(self._sizes):
                count = min(left[group], max(1, SLAB_BYTES // max(size, 1)))
                if count:
                    left[group] -= count
                    yield group, count * size + ALIGNMENT

    def _lock_pages(self, device: Device, register: Register | None, memory: Array | None) -> None:
        start, left = 0, room_bytes()
        for group, nbytes in self._pieces():
            if self._stop.is_set():
                return
            left = min(left, room_bytes())  # plain memory counts before it is used
            try:
                if nbytes > left:
                    raise OutOfMemory(f"the host needs the {KEPT_BYTES >> 20} MB that are left for all else")
                if memory is None and device.kind != "cuda":
                    slab = PinnedBuffer(device, nbytes)
                else:
                    piece = _pages(nbytes) if memory is None else memory[start : start + nbytes]
                    if device.kind == "cuda":
                        # The driver, which launches nothing meanwhile, locks pages fast that the kernel has given. This
                        # call leaves the interpreter's lock to others.
                        ctypes.memset(int(piece.ctypes.data), 0, nbytes)
                    slab = PinnedBuffer.over(device, piece)
                if register is not None:
                    register(slab.ptr, slab.nbytes)
            except (TensorError, OSError) as error:
                log.warning(
                    "KV offload: no more host memory could be locked than %.1f of %.1f GB (%s); the tier stays smaller",
                    start / 1e9, sum(map(mul, self.num_slots, self._sizes)) / 1e9, error,
                )  # fmt: skip
                return
            self._made.append((group, slab))
            start, left = start + nbytes, left - nbytes

    def _cut(self) -> None:
        """Make slots of the memory that the thread has locked."""
        while self._made:
            group, slab = self._made.popleft()
            size, start = self._sizes[group], -slab.ptr % ALIGNMENT
            # The last is taken first: records that are stored together lie behind each other, and travel as one.
            for offset in reversed(range(start, start + slab.nbytes - ALIGNMENT, size)):
                memory = slab.array[offset : offset + size].data
                self._free[group].append(Slot(group, slab.ptr + offset, memory))

    def find(self, group: int, name: bytes) -> Slot | None:
        """The slot of that name, readable or not."""
        return self._index[group].get(name)

    def has(self, group: int, names: Sequence[bytes]) -> list[bool]:
        """Which names have a slot, readable or not."""
        index = self._index[group]
        return [name in index for name in names]

    def take(self, group: int, name: bytes) -> Slot | None:
        """A slot for a new record, with one user. Evicts a record without a user for it. None: all slots are in use."""
        with self._lock:
            self._cut()
            if self._free[group]:
                slot = self._free[group].pop()
            elif len(self._idle[group]):
                old = self._idle[group].pop()
                slot = self._index[group].pop(old)
                self.evicted.append((group, old))
            else:
                return None
            if slot.readable:
                self.used_bytes -= self._sizes[group]
            slot.name, slot.users, slot.readable, slot.whole = name, 1, False, False
            self._index[group][name] = slot
            return slot

    def fill(self, slot: Slot) -> None:
        """The record is in its slot, or on its way there."""
        with self._lock:
            slot.readable = True
            self.used_bytes += self._sizes[slot.group]

    def use(self, slot: Slot) -> Slot:
        """Add a user. Returns the slot."""
        with self._lock:
            if not slot.users:
                self._idle[slot.group].use(slot.name)
            slot.users += 1
        return slot

    def leave(self, slot: Slot) -> None:
        """Take a user away. A slot without a record is free then."""
        with self._lock:
            slot.users -= 1
            if slot.users:
                return
            if slot.readable and self._index[slot.group].get(slot.name) is slot:
                self._idle[slot.group].add(slot.name, None, 0)
            else:
                self.forget(slot)
                self._free[slot.group].append(slot)

    def forget(self, slot: Slot) -> None:
        """Drop the record. The slot stays with its users."""
        with self._lock:
            if self._index[slot.group].get(slot.name) is slot:
                del self._index[slot.group][slot.name]
            if slot.readable:
                slot.readable = slot.whole = False
                self.used_bytes -= self._sizes[slot.group]

    def lend(self, group: int, name: bytes) -> Slot | None:
        """The slot of a whole record, with one user more, until `leave`. Any thread may call it."""
        with self._lock:
            slot = self._index[group].get(name)
            if slot is None or not slot.whole:
                return None
            self.use(slot)
            return slot

    def expect(self, group: int, names: Sequence[bytes]) -> dict[tuple[int, bytes], Slot]:
        """The slots of the names that have one, each with one user more, by group and name."""
        with self._lock:
            slots = ((name, self._index[group].get(name)) for name in names)
            return {(group, name): self.use(slot) for name, slot in slots if slot is not None}

    def absent(self, group: int, names: Sequence[bytes]) -> list[bool]:
        """Which names have no record. The records of the others are noted as wanted."""
        index, idle, found = self._index[group], self._idle[group], []
        with self._lock:
            for name in names:
                slot = index.get(name)
                found.append(slot is None)
                if slot is not None and not slot.users:
                    idle.use(name)
                    idle.add(name, None, 0)
        return found

    def clear(self) -> None:
        """Drop all records. Slots in use are free when their last user leaves."""
        with self._lock:
            for index, idle in zip(self._index, self._idle, strict=True):
                while len(idle):
                    slot = index[idle.pop()]
                    self.forget(slot)
                    self._free[slot.group].append(slot)
                for slot in list(index.values()):
                    self.forget(slot)

    @property
    def has_room(self) -> bool:
        """Whether every group has its first slots."""
        self._cut()
        each = zip(self._free, self._index, self.num_slots, strict=True)
        return all(bool(free or index) or not wanted for free, index, wanted in each)

    def close(self) -> None:
        """Stop to grow, and let go of the memory. No copy may be under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._made.clear()
        self._free, self._index = [[] for _ in self._free], [{} for _ in self._index]


def _pages(nbytes: int) -> Array:
    pages = mmap.mmap(-1, nbytes)
    huge(pages)
    return np.frombuffer(pages, np.uint8)
