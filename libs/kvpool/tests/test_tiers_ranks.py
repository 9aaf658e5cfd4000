"""Tiers of several ranks: each has its part of every record, and a copy has ended when all have made theirs."""

import dataclasses
import threading
import time

import pytest

from openinfer.kvpool import Group, Pool
from openinfer.kvpool.tiers import Copier, Disk, Layout, Others, SharedRecords, Tiers, host, mover
from openinfer.tensor import Device, PinnedBuffer, Stream, Tensor, TensorError

RANKS = 3
OWN = Group("pages", 4, 4, 16)  # three pages of 4 tokens, 4 bytes a token
WHOLE = dataclasses.replace(OWN, block_bytes=RANKS * OWN.block_bytes)
CPU = Device("cpu")


class Rig:
    """The first rank's pool and tiers, and the copiers of the others, in one process. A rank's bytes are its own."""

    def __init__(self, disk=None, alike=False):
        self.alike, self.slow, self.lost = alike, 0, False
        groups = [OWN if alike else WHOLE]
        self.tiers = Tiers(groups, 64 * 4096, disk, parts=1 if alike else RANKS)
        self.pool = Pool([OWN], loader=self.tiers, saver=self.tiers)
        self.caches = [Tensor.empty((OWN.num_blocks, OWN.block_bytes), "uint8", CPU) for _ in range(RANKS)]
        first = SharedRecords.new(sum(self.tiers.pieces), RANKS)
        shared = [first, *(SharedRecords(first.file, RANKS, sum(self.tiers.pieces)) for _ in range(1, RANKS))]
        self.late = []
        self.copiers = [
            Copier(Layout([OWN], [[self.caches[r]]], 0 if alike else r), Stream(CPU), shared[r], r,
                   self.tiers.pieces, saves=not alike)
            for r in range(1, RANKS)
        ]  # fmt: skip
        self.tiers.attach([[self.caches[0]]], Stream(CPU), Others(shared[0], self.tell, lambda: self.lost))
        until = time.monotonic() + 5
        while not self.tiers._host.has_room and time.monotonic() < until:
            time.sleep(0.001)

    def tell(self, kind, copies):
        self.late.append((kind, copies))
        if not self.slow:
            self.work()

    def work(self):
        for kind, copies in self.late:
            for copier in self.copiers:
                copier.copy(kind, copies)
        self.late = []

    def serve(self, tokens):
        """Tokens that were found. Checks each rank's pages, and writes those that were computed."""
        with self.pool.acquire(tokens) as lease:
            if lease.load():
                assert self.pool.poll(10.0) == [lease]
            lease.reserve(len(tokens))
            for index, block in enumerate(lease.block_table()):
                for rank, cache in enumerate(self.caches):
                    page, mine = cache.numpy()[block], tokens[0] + (0 if self.alike else 10 * rank)
                    if index < lease.num_cached // 4:
                        assert set(page.tolist()) == {mine}
                    else:
                        page[:] = mine
            lease.commit(tokens, len(tokens))
            return lease.num_cached

    def close(self):
        self.pool.check_integrity()
        self.tiers.close()
        for copier in self.copiers:
            copier.close()


@pytest.mark.parametrize("alike", [False, True])
def test_each_rank_has_its_part_of_a_prefix_again(alike):
    rig = Rig(alike=alike)
    assert [rig.serve([first] * 12) for first in (1, 2, 1, 2)] == [0, 0, 8, 8]
    assert rig.tiers.stats.failed == 0
    rig.close()


def test_a_load_waits_for_the_slowest_rank():
    rig = Rig()
    rig.serve([1] * 12)
    rig.serve([2] * 12)
    rig.slow = 1
    with rig.pool.acquire([1] * 12) as lease:
        assert lease.load()
        assert rig.pool.poll(0.05) == []
        rig.work()
        assert rig.pool.poll(10.0) == [lease]
    rig.slow = 0
    rig.work()
    rig.close()


def test_the_disk_has_the_parts_of_all_ranks(tmp_path):
    for found in (0, 8):
        rig = Rig(Disk(tmp_path, 1 << 20, [WHOLE], b"f" * 32, {}))
        until = time.monotonic() + 10
        while found and not rig.tiers.disk_bytes and time.monotonic() < until:
            rig.tiers.collect()
        assert rig.serve([1] * 12) == found
        rig.serve([2] * 12)
        rig.close()


def test_a_lost_rank_holds_up_no_end():
    rig = Rig()
    rig.slow = 1
    rig.serve([1] * 12)
    rig.serve([2] * 12)  # copies that the others never make
    timer = threading.Timer(0.05, lambda: setattr(rig, "lost", True))  # while these copies are waited for
    timer.start()
    rig.tiers.take_all(rig.pool)
    rig.tiers.close()
    timer.join()
    for copier in rig.copiers:
        copier.close()


def test_no_rank_locks_a_record_in_two_pieces(monkeypatch):
    """A device refuses a copy that begins in one piece of locked memory and ends in another."""
    monkeypatch.setattr(host, "SLAB_BYTES", 3 * 4096)
    locked = []

    class Noting:
        @staticmethod
        def over(device, memory):
            locked.append((memory.ctypes.data, memory.nbytes))
            return PinnedBuffer.over(device, memory)

    monkeypatch.setattr(mover, "PinnedBuffer", Noting)
    rig = Rig()
    for thread in (rig.tiers._host._thread, *(copier._threads[1] for copier in rig.copiers)):
        thread.join()
    assert rig.tiers._host.has_room
    assert len(locked) == (RANKS - 1) * len(rig.tiers.pieces) > 10
    slots = sorted(slot.ptr for slot in rig.tiers._host._free[0])
    for copier in rig.copiers:
        starts = [copier._shared.ptr + ptr - slots[0] for ptr in slots]
        for start in starts:
            assert any(piece <= start and start + 4096 <= piece + size for piece, size in locked)
    rig.close()


def test_a_rank_says_once_that_memory_cannot_be_locked(monkeypatch, caplog):
    class Refusing:
        @staticmethod
        def over(device, memory):
            raise TensorError("no memory is left to lock")

    monkeypatch.setattr(mover, "PinnedBuffer", Refusing)
    rig = Rig()
    assert [rig.serve([first] * 12) for first in (1, 2, 1)] == [0, 0, 8]
    rig.close()
    said = sorted(record.getMessage() for record in caplog.records)
    assert [line.split(" bytes")[0] for line in said] == [
        f"KV offload: rank {rank} could lock only 0 of {sum(rig.tiers.pieces)}" for rank in range(1, RANKS)
    ]
    assert all("no memory is left to lock" in line for line in said)
