"""Tiers case by case: what is kept, what is refused, and what a broken disk costs. Histories are in another file."""

import errno
import json
import logging
import mmap
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from openinfer.kvpool import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Group,
    InvalidTiers,
    Pool,
    adapter_salt,
    hash_blocks,
)
from openinfer.kvpool.eviction import Lru
from openinfer.kvpool.tiers import Disk, HostMemory, Layout, Tiers, host, tiers
from openinfer.kvpool.tiers.disk import Done
from openinfer.kvpool.tiers.host import KEPT_BYTES, Slot
from openinfer.kvpool.tiers.tiers import FIRST_PIECES, PIECES
from openinfer.tensor import Device, Stream, Tensor
from openinfer.tensor.testing import fake_driver

PAGES = Group("pages", 4, 4, 16)  # three pages of 4 tokens, 4 bytes a token
HOST = 64 * 4096
ABOUT = {"model": "m"}
FIRST, OTHER = [1] * 13, [2] * 13


class Engine:
    """A pool with tiers over CPU memory. Computing a page writes its first token into it."""

    def __init__(self, groups=(PAGES,), host=HOST, disk=None, device="cpu", **options):
        device = Device(device)
        self.tiers = Tiers(groups, host, disk, **options)
        self.pool = Pool(groups, loader=self.tiers, saver=self.tiers, events=options.get("events", False))
        self.stream = Stream(device)
        self.cache = [
            Tensor.empty((group.num_blocks, group.block_bytes), "uint8", device) for group in groups
        ]
        self.tiers.attach([[tensor] for tensor in self.cache], self.stream)
        until = time.monotonic() + 5
        while not self.tiers._host.has_room and time.monotonic() < until:
            time.sleep(0.001)

    def serve(self, tokens, salt=b""):
        """Tokens that were cached or loaded. Checks that the pages hold what was computed."""
        with self.pool.acquire(tokens, salt) as lease:
            if lease.load():
                assert self.pool.poll(10.0) == [lease]
            lease.reserve(len(tokens))
            for index, block in enumerate(lease.block_table()):
                page = self.cache[0].numpy()[block]
                if index < lease.num_cached // 4:
                    assert set(page.tolist()) == {tokens[0]}
                else:
                    page[:] = tokens[0]
            lease.commit(tokens, len(tokens))
            return lease.num_cached

    def close(self):
        self.pool.check_integrity()
        self.tiers.close()


def disk_in(folder, room=1 << 20, fingerprint=b"f" * 32, groups=(PAGES,)):
    return Disk(folder, room, groups, fingerprint, ABOUT)


def settle(tiers):
    """All writes have ended."""
    until = time.monotonic() + 10
    while (tiers._saves or tiers._disk.num_writing) and time.monotonic() < until:
        tiers.collect(0.01)
    tiers.collect()


def test_an_evicted_prefix_comes_back_from_host_memory():
    engine = Engine()
    assert [engine.serve(tokens) for tokens in (FIRST[:12], OTHER[:12], FIRST[:12], FIRST[:12])] == [
        0,
        0,
        8,
        8,
    ]
    stats = engine.tiers.stats
    assert (stats.saved, stats.from_host, stats.failed) == (6, 2, 0)
    assert engine.tiers.host_bytes == 6 * 4096
    engine.close()


def test_all_that_is_cached_goes_to_the_tiers_the_newest_last(monkeypatch):
    monkeypatch.setattr("openinfer.kvpool.tiers.tiers._AT_ONCE", 2)
    pages = Group("pages", 4, 12, 16)
    engine = Engine((pages,), host=4 * 4096)  # room for four of nine blocks
    for first in (1, 2, 3):
        engine.serve([first] * 13)
    engine.tiers.take_all(engine.pool)
    assert not engine.pool.cached()
    engine.cache[0].numpy()[:] = 0  # as after a sleep
    assert engine.serve([3] * 13) == 12
    engine.close()


def test_another_salt_finds_nothing():
    engine = Engine()
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    assert engine.serve(FIRST[:12], b"salt") == 0
    engine.close()


def test_before_attach_nothing_is_saved_or_found():
    tiers = Tiers([PAGES], HOST)
    tiers.save(0, [b"n"], [1])
    assert tiers.holds(0, [b"n"]) == [False]
    tiers.close()


def test_a_change_of_weights_clears_every_tier(tmp_path):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    settle(engine.tiers)
    assert engine.tiers.disk_bytes
    assert engine.pool.reset_prefix_cache()
    assert (engine.tiers.host_bytes, engine.tiers.disk_bytes) == (0, 0)
    with engine.pool.acquire(FIRST[:12]) as lease:
        assert lease.num_loadable == 0
    engine.close()
    engine = Engine(disk=disk_in(tmp_path))
    time.sleep(0.05)
    engine.tiers.collect(0.1)
    assert engine.tiers.disk_bytes == 0
    engine.close()


def test_copies_wait_for_nothing_on_the_host_and_are_one_a_page():
    with fake_driver() as fake:
        engine = Engine(device="cuda")
        pool, steps = engine.pool, fake.streams[engine.stream.handle]
        with pool.acquire(FIRST[:12]) as lease:
            lease.reserve(12)
            lease.commit(FIRST[:12], 12)
        before = fake.count("cuMemcpyDtoHAsync")
        with pool.acquire(OTHER[:12]) as lease:
            lease.reserve(12)
            assert fake.count("cuMemcpyDtoHAsync") - before == 3
            assert len(steps.work) == 1  # the wait, before the step that overwrites the pages
        assert fake.count("cuStreamSynchronize") == fake.count("cuEventSynchronize") == 0
        with pool.acquire([*FIRST[:12], 1]) as lease:
            assert lease.load()
            assert pool.poll(0.0) == []
            fake._cuCtxSynchronize()
            assert pool.poll(0.0) == [lease]
            assert lease.num_cached == 12
        assert fake.count("cuStreamSynchronize") == fake.count("cuEventSynchronize") == 0
        engine.tiers.close()


@pytest.mark.parametrize("comes", [True, False])
def test_steps_do_not_wait_for_what_makes_room_for_a_load(comes):
    with fake_driver() as fake:
        engine = Engine(device="cuda")
        pool, tiers, steps = engine.pool, engine.tiers, fake.streams[engine.stream.handle]
        for tokens in (FIRST[:12], OTHER[:12]):
            with pool.acquire(tokens) as lease:
                lease.reserve(12)
                lease.commit(tokens, 12)
        fake._cuCtxSynchronize()
        waits, out = len(steps.work), fake.streams[tiers._mover._streams["swap"].handle]
        with pool.acquire([*FIRST[:12], 1]) as lease:
            assert lease.num_loadable == 12
            if not comes:
                tiers.clear()
            assert lease.load()
            assert len(steps.work) == waits
            assert len(out.work) > out.done
            assert pool.poll(0.0) == []  # also where nothing came: the pages are still on their way out
            fake._cuCtxSynchronize()
            assert pool.poll(0.0) == [lease]
            assert lease.num_cached == (12 if comes else 0)
        with pool.acquire([*OTHER[:12], 1]) as lease:
            assert lease.num_loadable == 12
        engine.tiers.close()


def test_a_long_load_is_begun_in_portions():
    """The copies of each turn fit beside a step."""
    count = FIRST_PIECES + PIECES + 1
    with fake_driver() as fake:
        group = Group("pages", 4, count + 1, 16)
        engine = Engine([group], host=4 * count * 4096, device="cuda")
        pool = engine.pool
        prompts = [[first] * (4 * count) for first in (1, 2)]
        for tokens in prompts:
            with pool.acquire(tokens) as lease:
                lease.reserve(len(tokens))
                lease.commit(tokens, len(tokens))
        fake._cuCtxSynchronize()
        names = "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"
        with pool.acquire([*prompts[0], 1]) as lease:
            copies, before = [], [fake.count(name) for name in names]
            assert lease.load()
            for _ in range(3):
                copies.append([fake.count(name) - old for name, old in zip(names, before, strict=True)])
                assert pool.poll(0.0) == []
            fake._cuCtxSynchronize()
            assert pool.poll(0.0) == [lease]
            assert lease.num_cached == 4 * count
        assert copies == [[FIRST_PIECES] * 2, [FIRST_PIECES + PIECES] * 2, [count] * 2]
        engine.tiers.close()


def test_few_bytes_of_a_load_are_on_their_way_out(monkeypatch):
    """A block that a step overwrites leaves behind them. Copies that make no room are begun at once."""
    monkeypatch.setattr(tiers, "LEAVING_BYTES", 10 * 16)
    with fake_driver() as fake:
        engine = Engine([Group("pages", 4, 41, 16)], host=160 * 4096, device="cuda")
        prompts = [[first] * 160 for first in (1, 2)]
        for tokens in prompts:
            with engine.pool.acquire(tokens) as lease:
                lease.reserve(len(tokens))
                lease.commit(tokens, len(tokens))
        fake._cuCtxSynchronize()
        names = "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"

        def load(tokens):
            before, copies = [fake.count(name) for name in names], []
            with engine.pool.acquire([*tokens, 1]) as lease:
                assert lease.load()
                while engine.pool.poll(0.0) == []:
                    copies.append([fake.count(name) - old for name, old in zip(names, before, strict=True)])
                    fake._cuCtxSynchronize()
                assert lease.num_cached == 160
            return copies

        assert load(prompts[0]) == [[10, 10], [20, 20], [30, 30], [40, 40]]
        assert load(prompts[1]) == [[0, 40]]  # the first is in host memory still
        engine.tiers.close()


def test_memory_is_divided_as_the_pool_is():
    groups = [Group("a", 4, 11, 3 * 4096), Group("b", 4, 2, 4096)]
    host = HostMemory(groups, 70 * 4096, Lru)
    assert host.num_slots == [22, 4]
    with pytest.raises(InvalidTiers, match="no room for a block of group 'b'"):
        HostMemory(groups, 16 * 4096, Lru)
    assert HostMemory([Group("a", 4, 11, 0), groups[0]], 8 * 4096, Lru).num_slots == [0, 2]


def test_a_cache_that_is_not_as_its_groups_say_is_refused():
    cpu = Device("cpu")
    for tensors, complaint in (
        ([Tensor.empty((4, 8), "uint8", cpu)], "8 bytes a block, 16 declared"),
        ([Tensor.empty((3, 16), "uint8", cpu)], "its first axis must be the 4 blocks"),
    ):
        with pytest.raises(InvalidTiers, match=complaint):
            Layout([PAGES], [tensors])
    with pytest.raises(InvalidTiers, match="0 lists of tensors for 1 groups"):
        Layout([PAGES], [])


def test_a_block_in_several_tensors_is_one_record():
    cpu = Device("cpu")
    parts = [Tensor.empty((4, n), "uint8", cpu) for n in (3, 0, 13)]
    layout, record, stream = Layout([PAGES], [parts]), np.zeros(16, np.uint8), Stream(cpu)
    for part in parts:
        part.numpy()[:] = np.arange(4)[:, None]
    layout.copy(stream, 0, 2, record.ctypes.data, "d2h")
    assert record.tolist() == [2] * 16
    record[:] = 9
    layout.copy(stream, 0, 3, record.ctypes.data, "h2d")
    assert [part.numpy()[3].tolist() for part in parts] == [[9] * 3, [], [9] * 13]


def test_events_name_the_place():
    engine = Engine(host=3 * 4096, events=True)
    engine.serve(FIRST[:12])
    engine.pool.take_events()
    engine.serve(OTHER[:12])
    events = engine.pool.take_events().events
    stored = [e for e in events if e.medium == "CPU"]
    [gone] = [e for e in events if isinstance(e, BlockRemoved)]
    assert [e.block_hashes for e in stored] == [[name] for name in gone.block_hashes]
    names = hash_blocks(FIRST, 4)
    assert {(e.block_hashes[0], e.parent_block_hash, *e.token_ids) for e in stored} == {
        (name, parent, 1, 1, 1, 1) for name, parent in zip(names, [None, *names], strict=False)
    }
    assert (stored[0].block_size, gone.medium) == (4, "GPU")
    engine.serve(FIRST[:12])
    assert [e.medium for e in engine.pool.take_events().events if isinstance(e, BlockRemoved)].count("CPU")
    engine.close()


def test_what_comes_back_has_the_salt_that_it_had():
    engine = Engine(events=True)
    salt = adapter_salt(b"tenant", "adapter", bytes(32))
    engine.serve(FIRST[:12], salt)
    engine.serve(OTHER[:12])
    engine.pool.take_events()
    assert engine.serve(FIRST[:12], salt) == 8
    stored = [
        e for e in engine.pool.take_events().events if isinstance(e, BlockStored) and e.token_ids[0] == 1
    ]
    assert {e.medium for e in stored} == {"GPU"}
    assert {(e.salt, e.lora_name) for e in stored} == {(b"tenant", "adapter")}
    engine.serve(OTHER[:12])
    engine.close()


def test_nothing_is_told_of_blocks_that_a_reset_has_dropped(tmp_path):
    engine = Engine(disk=disk_in(tmp_path), events=True)
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    assert engine.pool.reset_prefix_cache()
    settle(engine.tiers)
    events = engine.pool.take_events().events
    assert events[-1] == AllBlocksCleared()
    assert "CPU" not in {e.medium for e in events[:-1]}
    engine.serve(FIRST[:12])
    assert {e.medium for e in engine.pool.take_events().events} == {"GPU"}
    engine.close()


# -- the disk --


def test_blocks_of_an_earlier_process_are_told_once_their_tokens_are_known(tmp_path):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    settle(engine.tiers)
    engine.close()
    engine = Engine(disk=disk_in(tmp_path), events=True)
    until = time.monotonic() + 10
    while not engine.tiers.disk_bytes and time.monotonic() < until:
        engine.tiers.collect(0.01)
    assert engine.pool.take_events() is None
    assert engine.serve(FIRST[:12]) == 8
    told = [(e.medium, e.block_hashes[0], e.token_ids[:4]) for e in engine.pool.take_events().events]
    first, second = hash_blocks(FIRST[:8], 4)
    assert {(medium, name) for medium, name, _ in told if name in (first, second)} == {
        (medium, name) for medium in ("GPU", "CPU", "DISK") for name in (first, second)
    }
    assert all(tokens == [1] * 4 for _, _, tokens in told)
    engine.close()


def test_a_restart_finds_what_the_disk_has(tmp_path):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()
    assert json.loads((next(tmp_path.iterdir()) / "about.json").read_text()) == ABOUT
    engine = Engine(disk=disk_in(tmp_path))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 8
    assert engine.tiers.stats.from_disk == 2
    engine.close()


def test_what_is_cached_at_the_end_is_kept_if_the_engine_wants(tmp_path):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.tiers.keep(engine.pool)
    engine.close()
    engine = Engine(disk=disk_in(tmp_path))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 8
    assert engine.tiers.stats.from_disk == 2
    engine.tiers.keep(engine.pool, 0.0)
    engine.close()


def test_what_host_memory_evicts_is_on_the_disk(tmp_path):
    engine = Engine(host=8 * 4096, disk=disk_in(tmp_path))
    prompts = [[token] * 12 for token in range(1, 9)]
    for prompt in prompts:
        engine.serve(prompt)
        settle(engine.tiers)
    assert engine.tiers.host_bytes <= 8 * 4096
    assert [engine.serve(prompt) for prompt in prompts[:4]] == [8] * 4
    assert engine.tiers.stats.from_disk
    engine.close()


def test_wrong_bytes_are_computed_again_and_said(tmp_path, caplog):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()
    for path in tmp_path.glob("*/??/*"):
        data = bytearray(path.read_bytes())
        data[4100] ^= 1
        path.write_bytes(data)
    engine = Engine(disk=disk_in(tmp_path))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 0
    assert engine.tiers.stats.failed == 2
    assert "the checksum or the header is wrong" in caplog.text
    assert engine.serve(FIRST[:12]) == 8  # computed, and in the pool
    engine.close()


def test_blocks_of_another_model_are_not_read(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()
    engine = Engine(disk=disk_in(tmp_path, fingerprint=b"g" * 32))
    assert "blocks of other models or versions" in caplog.text
    assert engine.serve(FIRST[:12]) == 0
    engine.close()
    # Nor when their files are put into its folder.
    ours, theirs = (tmp_path / (name * 32).hex()[:16] for name in (b"g", b"f"))
    for path in theirs.glob("??/*"):
        (ours / path.parent.name).mkdir(exist_ok=True)
        path.rename(ours / path.parent.name / path.name)
    engine = Engine(disk=disk_in(tmp_path, fingerprint=b"g" * 32))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 0
    assert engine.tiers.stats.failed
    engine.close()


def test_a_full_disk_costs_no_request(tmp_path, caplog, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    disk = Disk.__new__(Disk)
    monkeypatch.setattr("openinfer.kvpool.tiers.disk.takes_direct", lambda folder: None)
    disk.__init__(tmp_path, 1 << 20, (PAGES,), b"f" * 32, ABOUT)
    engine = Engine(disk=disk)
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    settle(engine.tiers)
    assert engine.serve(FIRST[:12]) == 8  # from host memory
    assert engine.tiers.stats.not_written
    assert engine.tiers.disk_bytes == 0
    assert caplog.text.count("No space left on device") == 1
    assert not list(tmp_path.glob("*/??/*"))
    engine.close()


def test_a_slow_disk_is_not_waited_for(tmp_path, caplog, monkeypatch):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: time.sleep(0.2) or read(*args))
    engine = Engine(disk=disk_in(tmp_path), load_timeout_s=0.02)
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 0
    assert "take more than 0.02 s" in caplog.text
    engine.close()


def test_a_slow_peer_does_not_keep_the_disk_from_being_asked(tmp_path, caplog):
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()

    class Silent:
        """Peers that promise one block, and never send it."""

        promised = hash_blocks([3] * 4, 4)

        def has(self, group, name):
            return name in self.promised

        def read(self, slot):
            self.promised = []

        def done(self, wait_s):
            time.sleep(wait_s)
            return []

    engine = Engine(disk=disk_in(tmp_path), load_timeout_s=0.2)
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    engine.tiers._peers = Silent()
    assert engine.serve([3] * 12) == 0
    assert engine.tiers.stats.failed == 1
    assert engine.serve(FIRST[:12]) == 8
    assert "disk" not in caplog.text
    engine.close()


def test_a_folder_that_is_gone_is_said_once(tmp_path, caplog):
    engine = Engine(disk=disk_in(tmp_path))
    for token in (1, 2, 3):
        engine.serve([token] * 12)
    engine.close()
    engine = Engine(disk=disk_in(tmp_path))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    shutil.rmtree(tmp_path)
    assert engine.serve(FIRST[:12]) == engine.serve(OTHER[:12]) == 0
    assert engine.tiers.stats.failed >= 2
    assert caplog.text.count("could not be read") == 1
    settle(engine.tiers)
    assert engine.serve(FIRST[:12]) == 8  # from host memory
    engine.close()


def test_a_full_disk_does_not_keep_an_engine_from_its_folder(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    engine.close()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    engine = Engine(disk=disk_in(tmp_path))
    while not engine.tiers.disk_bytes:
        engine.tiers.collect(0.01)
    assert engine.serve(FIRST[:12]) == 8
    assert "O_DIRECT" not in caplog.text
    engine.close()


def test_old_files_go_when_the_disk_is_used_up(tmp_path):
    engine = Engine(host=2 * HOST, disk=disk_in(tmp_path, room=6 * 8192))
    for token in range(1, 12):
        engine.serve([token] * 12)
        settle(engine.tiers)
    assert engine.tiers.disk_bytes <= 6 * 8192
    engine.close()
    assert len(list(tmp_path.glob("*/??/*"))) <= 6


@pytest.mark.attack
def test_foreign_files_are_left_alone_at_start(tmp_path):
    """Records that are unfinished, or of another group or size, go; whatever else there is stays, also behind links."""
    folder = tmp_path / (b"f" * 32).hex()[:16]
    shard, precious = folder / "ab", tmp_path / "precious"
    for one in (shard, precious, shard / "folder", folder / "backup", folder / "zz"):
        one.mkdir(parents=True, mode=0o700)
    name = "ab" * 32
    ours = [f"{name}.part", f"{name}.7", "ab" + "c" * 62 + ".0"]
    for text in (f"{name}.0", *ours[:2], "notes", "cd" * 32 + ".0", f"{name}.0.bak", "AB" * 32 + ".0"):
        (shard / text).write_bytes(b"\0" * 8192)
    (shard / ours[2]).write_bytes(b"short")
    for place in (precious, folder / "backup", folder / "zz"):
        for text in ("1.txt", "cd" * 32 + ".7", f"{name}.part"):
            (place / text).write_text("x")
    (folder / "cd").symlink_to(precious)
    (folder / "link").symlink_to(precious)
    (shard / ("ab" + "e" * 62 + ".9")).symlink_to(precious / "1.txt")
    (shard / ("ab" + "d" * 62 + ".9")).mkdir()
    os.mkfifo(shard / ("ab" + "f" * 62 + ".9"))
    before = {path for path in tmp_path.rglob("*") if path.name not in ours or path.parent != shard}
    engine = Engine(disk=disk_in(tmp_path))
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    settle(engine.tiers)
    assert engine.tiers.stats.to_disk
    engine.close()
    assert before <= set(tmp_path.rglob("*"))
    assert not [text for text in ours if (shard / text).exists()]
    disk = disk_in(tmp_path)
    disk.start()
    until = time.monotonic() + 5
    while not disk.found and time.monotonic() < until:
        disk.done(0.1)
    assert (0, bytes.fromhex(name)) in disk.found
    disk.close()


@pytest.mark.attack
def test_a_shard_that_is_a_link_is_not_followed(tmp_path):
    """Neither to read nor to write nor to remove."""
    disk, slot = disk_in(tmp_path), Slot(0, 0, memoryview(mmap.mmap(-1, 4096)), b"\xab" * 32)
    precious, record = tmp_path / "precious", disk.folder / "ab" / ("ab" * 32 + ".0")
    disk.start()

    def ended():
        (one,) = disk.done(10.0)
        return one.problem

    assert disk.write(slot)
    assert ended() is None
    record.parent.rename(precious)
    record.parent.symlink_to(precious)
    disk.read(slot)
    assert "is a link" in ended()
    assert disk.write(slot)
    assert "is a link" in ended()
    record.parent.unlink()
    precious.rename(record.parent)
    record.rename(tmp_path / "moved")
    record.symlink_to(tmp_path / "moved")
    disk.read(slot)
    assert "symbolic links" in ended()
    disk.close()
    assert (tmp_path / "moved").stat().st_size == 8192


@pytest.mark.attack
@pytest.mark.parametrize("which", ["folder", "subfolder"])
@pytest.mark.parametrize("kind", ["of another user", 0o777, 0o775, 0o1777, "link"])
def test_a_folder_that_others_can_write_to_is_refused(which, kind, tmp_path, monkeypatch):
    """Records of others would become answers."""
    base = tmp_path / "kv"
    disk_in(base).close()
    (subfolder,) = base.iterdir()
    one = base if which == "folder" else subfolder
    words = "has mode"
    if kind == "link":
        words = "is a link"
        one.rename(tmp_path / "elsewhere")
        one.symlink_to(tmp_path / "elsewhere")
    elif kind == "of another user":
        words, real, number = "belongs to user 12345", Path.stat, os.stat(one).st_ino

        def stat(path, **how):
            found = real(path, **how)
            return os.stat_result((*found[:4], 12345, *found[5:])) if found.st_ino == number else found

        monkeypatch.setattr(Path, "stat", stat)
    else:
        one.chmod(kind)
    if which == "folder" and kind in (0o1777, "link"):  # as /tmp; and an operator may name a link
        disk_in(base).close()
        return
    with pytest.raises(InvalidTiers, match=f"{one.name} {words}"):
        disk_in(base)


def test_a_tier_leaves_the_host_room_for_all_else(tmp_path, caplog, monkeypatch):
    """The host has room for two pieces, and its control group for one."""
    piece = PAGES.num_blocks * 4096 + 4096
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {(KEPT_BYTES + 2 * piece) // 1024} kB\n"
    )
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OWN", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_GROUPS", tmp_path)
    (tmp_path / "cgroup").write_text("1:cpu:/\n0::/pod/engine\n")
    pod = tmp_path / "pod"
    (pod / "engine").mkdir(parents=True)
    monkeypatch.setattr(host, "SLAB_BYTES", PAGES.num_blocks * 4096)
    for name, text in (
        ("memory.max", "max\n"),
        ("memory.current", "5000\n"),
        ("memory.stat", "inactive_file 5000\n"),
    ):
        (pod / name).write_text(text)
    for limit, pieces in (("max\n", 2), (f"{KEPT_BYTES + piece}\n", 1)):
        (pod / "memory.max").write_text(limit)
        memory = HostMemory([PAGES], 64 * 4096, Lru)
        memory.grow(Device("cpu"))
        memory._thread.join()
        assert memory.has_room
        assert len(memory._free[0]) == pieces * PAGES.num_blocks
        memory.close()
    assert caplog.text.count("the tier stays smaller") == 2
    assert "0.0 of 0.0 GB (the host needs the 1024 MB that are left for all else)" in caplog.text


def test_memory_that_a_transport_does_not_take_is_not_used(caplog):
    def register(ptr, nbytes):
        raise OSError("the transport takes no more")

    memory = HostMemory([PAGES], 64 * 4096, Lru)
    memory.grow(Device("cpu"), register)
    memory._thread.join()
    assert not memory.has_room
    assert "the transport takes no more" in caplog.text
    memory.close()


def test_a_folder_is_one_engines(tmp_path):
    disk = disk_in(tmp_path)
    with pytest.raises(InvalidTiers, match="another engine uses"):
        disk_in(tmp_path)
    disk.close()
    disk_in(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidTiers, match="cannot be used"):
        disk_in(tmp_path / "file")
    with pytest.raises(InvalidTiers, match="no room for a block"):
        disk_in(tmp_path, room=100)


def test_a_file_system_without_o_direct_is_named(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    opened = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    engine = Engine(disk=disk_in(tmp_path))
    assert "has no O_DIRECT (Invalid argument)" in caplog.text
    engine.serve(FIRST[:12])
    engine.serve(OTHER[:12])
    settle(engine.tiers)
    assert engine.tiers.disk_bytes
    engine.close()


def test_a_slot_that_was_cleared_while_it_was_read_is_free():
    """Its record comes afterwards, and belongs to no name any more."""
    memory = HostMemory([PAGES], 4 * 4096, Lru)
    memory.grow(Device("cpu"))
    until = time.monotonic() + 5
    while not memory.has_room and time.monotonic() < until:
        time.sleep(0.001)
    room = memory.num_slots[0]
    slot = memory.take(0, b"a" * 32)
    memory.clear()
    memory.fill(slot)
    memory.leave(slot)
    assert memory.used_bytes == 0
    taken = [memory.take(0, bytes([number]) * 32) for number in range(room)]
    assert None not in taken
    assert memory.take(0, b"z" * 32) is None
    assert memory.evicted == []
    memory.close()


def test_a_write_that_began_before_a_reset_makes_no_record(tmp_path):
    """The same block is written again meanwhile: the disk has it when that write has ended, not before."""
    disk = Disk(tmp_path, 1 << 20, [PAGES], b"f" * 32, {})
    slots = [Slot(0, 0, memoryview(bytes(4096)), b"n" * 32) for _ in range(2)]
    assert disk.write(slots[0])
    disk.clear()
    assert disk.write(slots[1])
    for number, slot in enumerate(slots, 1):
        assert not disk.has(0, b"n" * 32)
        disk._done.put(Done(slot, number, None))
        assert [one.ticket for one in disk.done(0.0)] == [number]
    assert disk.has(0, b"n" * 32)
    assert (disk.num_writing, disk.used_bytes) == (0, 8192)
