"""Disk: records of blocks as files in a folder, written and read by threads of its own."""

import contextlib
import fcntl
import json
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openinfer.tensor.handover import distrust

from ..errors import InvalidTiers
from ..group import Group
from .host import Slot
from .record import Files, Wrong, file_bytes, takes_direct

log = logging.getLogger("openinfer.kvpool")

READERS = 8
"""Threads that read, and check what they read, which takes as long as a fast disk's read. One thread writes, so that a
write and the removal of an older file keep their order."""
PAUSE_S = 30.0
"""Seconds without writes after a write has failed, and without a word after a read has."""


class Done(NamedTuple):
    """A read or a write that has ended."""

    slot: Slot
    ticket: int
    """Number of the write; 0: a read."""
    problem: str | None


class Disk:
    """`num_bytes` of files in `folder`, under a subfolder that is named by the fingerprint.

    fingerprint: 32 bytes that stand for everything the blocks depend on besides tokens and salt: model, weights, number
    formats, layout. Records under another fingerprint are not read. about: is written beside the records, for people.

    One thread calls the methods. Raises InvalidTiers for a folder that cannot be used, or that another process uses.
    """

    def __init__(
        self, folder: Path, num_bytes: int, groups: Sequence[Group], fingerprint: bytes, about: dict[str, Any]
    ) -> None:
        self._sizes, self._num_bytes = [g.block_bytes for g in groups], num_bytes
        self._fingerprint = fingerprint
        if num_bytes < max(map(file_bytes, self._sizes)):
            raise InvalidTiers(f"{num_bytes / 1e9:g} GB of disk have no room for a block; give more")
        self.folder = folder / fingerprint.hex()[:16]
        """The records are in its subfolders."""
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            for one in (folder, self.folder):
                linked = one is self.folder and one.is_symlink()
                why = "is a link" if linked else distrust(one, sticky=one is folder)
                if why:
                    raise InvalidTiers(
                        f"{one} {why}: its blocks would become answers. Give another folder, as a new one in it"
                    )
            _describe(self.folder / "about.json", json.dumps(about, indent=1).encode())
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidTiers(f"the folder {folder} for KV blocks cannot be used: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InvalidTiers(
                f"another engine uses {self.folder}; give each engine a folder of its own"
            ) from None
        self._unlock = weakref.finalize(self, _unlock, lock)
        refusal = takes_direct(self.folder)
        others = [path.parent.name for path in folder.glob("*/about.json") if path.parent != self.folder]
        if others:
            log.info("KV offload: %s has blocks of other models or versions, not used: %s", folder, others)
        if refusal is not None:
            log.info("KV offload: %s has no O_DIRECT (%s); blocks go through the page cache", folder, refusal)
        self._direct = refusal is None
        self.used_bytes = 0
        """Bytes of the files."""
        self.num_writing = 0
        """Writes that have not ended."""
        self.num_reading = 0
        """Reads that have not ended."""
        self.evicted: list[tuple[int, bytes]] = []
        """Group and name of the records that were dropped; the caller clears it."""
        self.found: list[tuple[int, bytes]] = []
        """Group and name of the records of an earlier process; the caller clears it."""
        self._index: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # the oldest first
        self._writing: dict[tuple[int, bytes], int] = {}  # the ticket of the last write
        self._tickets = 0
        self._paused_until = self._quiet_until = 0.0
        self._done: queue.SimpleQueue[Done | list[tuple[int, bytes]]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[Files], None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Callable[[Files], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. The records of an earlier process are found soon after."""
        self._writes.put(lambda files: self._done.put(_records(self.folder, self._sizes)))
        for jobs in (self._writes, *[self._reads] * READERS):
            thread = threading.Thread(target=self._work, args=(jobs,), name="kv-offload-disk", daemon=True)
            self._threads.append(thread)
            thread.start()

    def has(self, group: int, name: bytes) -> bool:
        return (group, name) in self._index

    @property
    def takes_writes(self) -> bool:
        """False for a time after a write has failed."""
        return time.monotonic() >= self._paused_until

    def write(self, slot: Slot) -> bool:
        """Start to write a slot's record, and drop older records for it. The slot must stay in use until done() names
        it. False: the record is there already."""
        key = slot.group, slot.name
        if key in self._index or key in self._writing:
            return False
        self.used_bytes += file_bytes(self._sizes[slot.group])
        while self.used_bytes > self._num_bytes and self._index:
            self.drop(*next(iter(self._index)))
        self._tickets += 1
        ticket = self._writing[key] = self._tickets
        self.num_writing += 1
        self._writes.put(lambda files: self._run(files, Files.write, slot, ticket))
        return True

    def read(self, slot: Slot) -> None:
        """Start to read a slot's record. The slot must stay in use until done() names it."""
        if (slot.group, slot.name) in self._index:
            self._index.move_to_end((slot.group, slot.name))
        self.num_reading += 1
        self._reads.put(lambda files: self._run(files, Files.read, slot, 0))

    def drop(self, group: int, name: bytes) -> None:
        if (group, name) in self._index:
            del self._index[group, name]
            self.used_bytes -= file_bytes(self._sizes[group])
            self.evicted.append((group, name))
            self._remove(group, name)

    def done(self, wait_s: float) -> list[Done]:
        """Reads and writes that have ended. Waits up to wait_s seconds for the first."""
        ended: list[Done] = []
        with contextlib.suppress(queue.Empty):
            while True:
                one = self._done.get(timeout=wait_s) if wait_s and not ended else self._done.get_nowait()
                if isinstance(one, list):
                    self._take_found(one)
                    continue
                if one.ticket:
                    self._written(one)
                else:
                    self._was_read(one)
                ended.append(one)
        return ended

    def _was_read(self, one: Done) -> None:
        self.num_reading -= 1
        if one.problem is None:
            return
        self.drop(one.slot.group, one.slot.name)
        if time.monotonic() >= self._quiet_until:  # a folder that is gone has many
            self._quiet_until = time.monotonic() + PAUSE_S
            log.warning(
                "KV offload: a block could not be read, so its tokens are computed: %s; other blocks are not named for "
                "%d s", one.problem, PAUSE_S,
            )  # fmt: skip

    def _written(self, one: Done) -> None:
        key = one.slot.group, one.slot.name
        self.num_writing -= 1
        if self._writing.get(key) != one.ticket:  # cleared meanwhile; a later write replaces the file
            if key not in self._writing and key not in self._index:
                self._remove(*key)
            return
        del self._writing[key]
        if one.problem is None:
            self._index[key] = None
            return
        self.used_bytes -= file_bytes(self._sizes[one.slot.group])
        if self.takes_writes:
            self._paused_until = time.monotonic() + PAUSE_S
            log.warning(
                "KV offload: a block could not be written (%s); no block is written for %d s. No request is lost: "
                "blocks stay in host memory or are computed again", one.problem, PAUSE_S,
            )  # fmt: skip

    def _take_found(self, names: Sequence[tuple[int, bytes]]) -> None:
        for group, name in names:
            if (group, name) not in self._index and (group, name) not in self._writing:
                self._index[group, name] = None
                self.found.append((group, name))
                self.used_bytes += file_bytes(self._sizes[group])
        while self.used_bytes > self._num_bytes and self._index:
            self.drop(*next(iter(self._index)))
        count, size = len(self._index), self.used_bytes / 1e9
        log.info("KV offload: %d blocks (%.1f GB) are in %s", count, size, self.folder)

    def clear(self) -> None:
        for group, name in list(self._index):
            self.drop(group, name)
        for group, _ in self._writing:
            self.used_bytes -= file_bytes(self._sizes[group])
        self._writing.clear()

    def close(self) -> None:
        """Finish the writes that were begun, and stop the threads."""
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join()
        self._unlock()

    def _remove(self, group: int, name: bytes) -> None:
        self._writes.put(lambda files: self._path(group, name).unlink(missing_ok=True))

    # -- in the threads --

    def _path(self, group: int, name: bytes) -> Path:
        """The file of a record. Raises OSError where its shard is a link, whose files are not the tier's."""
        text = name.hex()
        shard = self.folder / text[:2]
        if shard.is_symlink():
            raise OSError(f"{shard} is a link, which is not followed")
        return shard / f"{text}.{group}"

    def _work(self, jobs: queue.SimpleQueue[Callable[[Files], None] | None]) -> None:
        files = Files(self._fingerprint, direct=self._direct)
        while (job := jobs.get()) is not None:
            with contextlib.suppress(OSError):  # of a removal; reads and writes report their own
                job(files)
        files.close()

    def _run(self, files: Files, act: Callable[..., None], slot: Slot, ticket: int) -> None:
        problem = None
        try:
            path = self._path(slot.group, slot.name)
            if ticket:
                path.parent.mkdir(exist_ok=True)
            act(files, path, slot.group, slot.name, slot.memory, self._sizes[slot.group])
        except (OSError, Wrong) as error:
            problem = str(error)
        self._done.put(Done(slot, ticket, problem))


def _describe(path: Path, text: bytes) -> None:
    """Write a file that is not there or says something else. A full disk takes not even the same text again."""
    if path.is_symlink():
        raise OSError(f"{path.name} is a link")
    if not path.exists() or path.read_bytes() != text:
        path.write_bytes(text)


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may have the file open too
    os.close(lock)


def _records(folder: Path, sizes: Sequence[int]) -> list[tuple[int, bytes]]:
    """The records in a folder, the oldest first. Removes unfinished ones, and those of another size or group. Other
    files are somebody's: it follows no link, and leaves alone what has another name."""
    found = []
    for shard in os.scandir(folder):
        if not re.fullmatch("[0-9a-f]{2}", shard.name) or not shard.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            for entry in os.scandir(shard):
                match = re.fullmatch("([0-9a-f]{64})[.]([0-9]{1,3}|part)", entry.name)
                if not match or match[1][:2] != shard.name or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError):
                    status, group = entry.stat(), len(sizes) if match[2] == "part" else int(match[2])
                    if group < len(sizes) and status.st_size == file_bytes(sizes[group]):
                        found.append((status.st_mtime_ns, (group, bytes.fromhex(match[1]))))
                    else:
                        os.unlink(entry.path)
    return [record for _, record in sorted(found)]
