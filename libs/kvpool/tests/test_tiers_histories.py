"""Random histories of a pool with tiers, over bytes: device memory, host memory, files, restarts, faults.

A fake driver runs the work of a stream only when something waits for it, or when the history lets it. So copies are
late in every possible way. Free blocks and blocks that load are filled with a poison. A prefix that a lease calls
cached must be in device memory, byte by byte.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import queue
import random
import zlib
from contextlib import contextmanager

import numpy as np
import pytest

from openinfer.kvpool import BlockState, Group, Pool
from openinfer.kvpool.testing import Broken, History
from openinfer.kvpool.tiers import Disk, Layout, Tiers
from openinfer.kvpool.tiers.mover import Mover
from openinfer.kvpool.tiers.record import Files
from openinfer.tensor import Device, Event, Stream, Tensor
from openinfer.tensor.testing import fake_driver

POISON, EMPTY = -0x5A5A5A5A5A5A5A5B, 0
PAGES = Group("pages", 4, 13, 4 * 8)
WINDOW = Group("window", 4, 13, 4 * 8, window=6)
COARSE = Group("coarse", 8, 10, 8 * 8)
STATE = Group("state", 4, 9, 8, snapshots=True)
KINDS = {"pages": [PAGES], "windows": [WINDOW, PAGES], "sizes": [COARSE, PAGES], "states": [PAGES, STATE]}


def small(group):
    """History's contents are hashes; a page that is not written yet is EMPTY."""
    return group.block_size if not group.snapshots else 1


class Memory:
    """Blocks of a group in device memory, behind the mapping that a History writes to. The steps' stream does its work
    at once: it overwrites blocks as early as the order of the streams allows."""

    def __init__(self, fake, stream, group, device):
        self.fake, self.stream, self.group = fake, stream, group
        self.tensor = Tensor.empty((group.num_blocks, small(group)), np.int64, device)

    def view(self, block):
        queue_ = self.fake.streams[self.stream.handle]
        queue_.run(len(queue_.work))
        size = small(self.group)
        raw = (ctypes.c_int64 * size).from_address(self.tensor.ptr + block * size * 8)
        return np.frombuffer(raw, np.int64)

    def get(self, block, default=None):
        values = self.view(block)
        if self.group.snapshots:
            return int(values[0])
        return {offset: int(value) for offset, value in enumerate(values) if value != EMPTY}

    __getitem__ = get

    def __setitem__(self, block, content):
        if self.group.snapshots:
            self.view(block)[0] = content
            return
        self.view(block)[:] = [content.get(offset, EMPTY) for offset in range(small(self.group))]

    def setdefault(self, block, default):
        return _Page(self.view(block))


class _Page:
    def __init__(self, view):
        self.view = view

    def __setitem__(self, offset, content):
        self.view[offset] = content


class FaultyFiles(Files):
    """Some writes fail as a full disk does, some files get wrong bytes."""

    def __init__(self, fingerprint, rng, faults):
        super().__init__(fingerprint, direct=False)
        self.rng, self.faults = rng, faults

    def write(self, path, group, name, record, nbytes):
        if self.rng.random() < self.faults:
            raise OSError(28, "No space left on device")
        super().write(path, group, name, record, nbytes)
        if self.rng.random() < self.faults:
            damage(path, self.rng)


def damage(path, rng):
    """A wrong byte, or a file that is cut or gone."""
    kind, size = rng.randrange(3), path.stat().st_size
    if kind == 0:
        with path.open("r+b") as file:
            place = rng.choice([rng.randrange(92), 4096 + rng.randrange(8)])
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ (1 + rng.randrange(255))]))
    elif kind == 1:
        os.truncate(path, rng.randrange(size))
    else:
        path.unlink()


class StepwiseDisk(Disk):
    """A disk without threads: each call of work() does one job, of reads and writes in any order to each other."""

    def __init__(self, *args, rng, faults):
        super().__init__(*args)
        self.rng, self.files = rng, FaultyFiles(args[3], rng, faults)

    def start(self):
        readers, self._work = self._work, lambda jobs: None
        super().start()
        self._work = readers

    def work(self):
        for jobs in self.rng.sample([self._reads, self._writes], 2):
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                continue
            if job is not None:
                try:
                    job(self.files)
                except OSError:
                    pass
                return True
        return False


class Setup:
    """A pool with tiers, and what a History asks of a loader."""

    def __init__(self, fake, groups, rng, folder, faults):
        self.fake, self.groups, self.rng, self.folder, self.faults = fake, groups, rng, folder, faults
        self.device, self.looks = Device("cuda"), 0
        self.totals = collections.Counter()  # of the tiers before the last restart
        self.stream = Stream(self.device)
        self.memory = [Memory(fake, self.stream, group, self.device) for group in groups]
        self.start()

    def start(self):
        rng, disk = self.rng, None
        if self.folder is not None:
            room = rng.choice([8192 * 3, 8192 * 12, 1 << 20])
            disk = StepwiseDisk(self.folder, room, self.groups, b"f" * 32, {}, rng=rng, faults=self.faults)
        self.disk = disk
        self.tiers = Tiers(
            self.groups, 4096 * rng.choice([8, 24, 100]), disk, events=rng.random() < 0.5,
            load_timeout_s=rng.choice([0.0, 0.001, 5.0, 5.0]),
        )  # fmt: skip
        self.pool = Pool(
            self.groups, loader=self.tiers, saver=self.tiers, eviction=rng.choice(["lru", "s3fifo", "lineage"])
        )  # fmt: skip
        self.tiers.attach([[memory.tensor] for memory in self.memory], self.stream)
        self.tiers._host._thread.join()

    def progress(self):
        """Streams and disk do some of their work."""
        for _ in range(self.rng.choice([0, 1, 12])):
            if self.disk is not None and self.rng.random() < 0.7:
                self.disk.work()
            else:
                work = self.fake.streams[self.rng.choice(sorted(self.fake.streams))]
                work.run(min(len(work.work), work.done + self.rng.randint(1, 3)))

    def finish(self):
        """All work that was begun is done."""
        busy = True
        while busy:
            self.fake._cuCtxSynchronize()
            worked = self.disk is not None and self.disk.work()
            self.pool.poll(0.0)
            self.tiers.collect()
            busy = worked or self.tiers._loads or self.tiers._saves or (self.disk and self.disk.num_writing)

    def close(self):
        self.tiers.close()
        self.totals.update(dataclasses.asdict(self.tiers.stats))

    # of a loader

    @property
    def loads(self):
        if self.tiers._loads:
            self.finish()
        return self.tiers._loads

    @property
    def num_failed(self):
        """Another number at each look once a block did not come: History then expects no prefix to be whole."""
        self.looks += self.tiers.stats.failed > 0
        return self.looks

    def store(self, tokens, salt, unit):
        self.progress()


class TierHistory(History):
    """A History whose memory is bytes, with restarts and poison."""

    def __init__(self, setup, groups, seed):
        super().__init__(setup.pool, groups, seed, holds=True, loader=setup)
        self.setup = setup
        longest = 5 * max(group.block_size for group in groups)
        self.prompts = [[self.random.randint(0, 1) for _ in range(longest)] for _ in range(8)]

    def check(self):
        self.setup.progress()
        self.poison()
        if self.random.random() < 0.6:
            self.serve()
        super().check()
        if self.random.random() < 0.01:
            self.restart()

    def serve(self):
        """Compute one sequence to its end, and release it."""
        if len(self.live) < 4:
            self.acquire([*self.random.choice(self.prompts), 1])
        ready = [seq for seq in self.live if not seq.promised]
        if not ready:
            return
        seq, step = self.random.choice(ready), self.pool.boundary_size
        if seq.lease.num_tokens < len(seq.tokens) and not self.reserve_for(seq, len(seq.tokens), 0, 0.0):
            return
        if not seq.is_started:
            self._start(seq)
        if any(group.snapshots for group in self.groups) and len(seq.tokens) // step * step > seq.written:
            seq.snapshots += seq.lease.snapshot(len(seq.tokens) // step * step) or []
        while seq.written < len(seq.tokens):
            self._write(seq)
        seq.lease.commit(seq.tokens, seq.written)
        self.check_sequence(seq)
        self.live.remove(seq)
        seq.lease.release()

    def poison(self):
        """Free blocks and free records hold nonsense."""
        for group, spec in enumerate(self.groups):
            for block in range(1, spec.num_blocks):
                if self.pool.block_state(block, group) is BlockState.FREE:
                    self.memory[group].view(block)[:] = POISON
        for free in self.setup.tiers._host._free:
            for slot in free:
                slot.memory[:8] = b"\xa5" * 8

    def reserve_for(self, seq, num_tokens, kept_tokens, leave):
        before = [set(seq.lease.block_table(group)) for group in range(len(self.groups))]
        done = super().reserve_for(seq, num_tokens, kept_tokens, leave)
        taken = {(copy.group, copy.source) for copy in seq.lease.copies}
        for group, spec in enumerate(self.groups):
            for block in set(seq.lease.block_table(group)) - before[group]:
                if (group, block) not in taken and not self._is_source(seq, group, block):
                    self.memory[group].view(block)[:] = POISON if spec.snapshots else EMPTY
        return done

    def _is_source(self, seq, group, block):
        """The snapshot that a sequence starts from may itself become the live block."""
        return self.groups[group].snapshots and seq.lease.num_cached > 0

    def _load(self, seq):
        super()._load(seq)
        if seq.promised and self.random.random() < 0.5:  # what is to be loaded is not there yet
            self.setup.tiers._mover._streams["swap"].synchronize()  # what made room for it has left
            for loading in self.setup.tiers._loads[-1:]:
                for piece in loading.load.pieces:
                    self.memory[piece.group].view(piece.block)[:] = POISON

    def restart(self):
        while self.held:
            self.let_go()
        while self.live:
            self.release()
        self.setup.finish()
        self.setup.pool.poll(None)
        for path in (self.setup.folder or _NOWHERE).glob("*/??/*"):
            if self.random.random() < self.setup.faults:
                damage(path, self.random)
        self.setup.close()
        for group, spec in enumerate(self.groups):
            for block in range(spec.num_blocks):
                self.memory[group].view(block)[:] = POISON
        self.setup.start()
        self.pool = self.setup.pool

    def close(self):
        super().close()
        self.setup.finish()
        tiers = self.setup.tiers
        assert tiers._host.has_room
        assert not tiers._loads
        assert not tiers._saves
        for group, count in enumerate(tiers._host.num_slots):
            used = [slot for slot in tiers._host._index[group].values() if slot.users]
            assert len(tiers._host._free[group]) + len(tiers._host._idle[group]) == count, used


class _Nowhere:
    def glob(self, pattern):
        return []


_NOWHERE = _Nowhere()


@contextmanager
def history(kind, seed, folder, faults=0.05):
    rng = random.Random(seed)
    with fake_driver() as fake:
        setup = Setup(fake, KINDS[kind], rng, folder, faults)
        made = TierHistory(setup, KINDS[kind], seed)
        try:
            yield made
        finally:
            made.abandon()
            setup.close()


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_history_reads_what_is_not_there(kind, with_disk, count, tmp_path):
    found = collections.Counter()
    for seed in range(24, 24 + count):  # the first of them reads files of every kind
        with history(kind, seed, tmp_path / str(seed) if with_disk else None) as one:
            one.run(300)
        found += one.setup.totals
    assert found["from_host"]
    assert not with_disk or found["from_disk"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_long_history_reads_what_is_not_there(kind, tmp_path):
    for seed in range(50):
        folder = tmp_path / str(seed) if seed % 5 else None
        with history(kind, 1000 + seed, folder, faults=random.Random(seed).choice([0.0, 0.05, 0.5])) as one:
            one.run(500)


def without_marks(mover, stream, kind, copies, run=Mover._copy_run):
    mover._swapped.clear()
    run(mover, stream, kind, copies)


FAULTS = {
    "a load overwrites blocks on their way out": (Mover, "_copy_run", without_marks),
    "the steps do not wait for blocks on their way out": (Stream, "wait", lambda stream, event: None),
    "a load ends before its copies": (Event, "query", lambda event: True),
    "files are not checked": (Files, "read", lambda files, path, group, name, record, nbytes: None),
    "damaged files are taken": (zlib, "crc32", lambda data: 0),
    "blocks are named wrongly": (Layout, "copy", lambda *a, **k: None),
}


RARE = {"a load overwrites blocks on their way out", "files are not checked"}
"""Faults that show after tens of histories only."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.slow) if fault in RARE else fault for fault in FAULTS],
)
def test_a_fault_is_noticed(fault, tmp_path, monkeypatch):
    def histories():
        for seed in range(60):
            with history("pages", seed, tmp_path / str(seed), faults=0.3) as one:
                one.run(300)

    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(Broken):
        histories()
