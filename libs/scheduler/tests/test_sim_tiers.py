"""The simulator's tiers by themselves: room, order and time. tests/test_sim_tiers.py compares them with an engine."""

from types import SimpleNamespace
from typing import NamedTuple

from openinfer.scheduler.sim import SimTiers, TierSpeeds

GROUPS = [SimpleNamespace(num_blocks=4, block_bytes=100), SimpleNamespace(num_blocks=2, block_bytes=300)]
SPEEDS = TierSpeeds(host=100.0, disk_read=50.0, disk_write=50.0)


class Piece(NamedTuple):
    group: int
    name: bytes


def make(host, disk=0):
    tiers = SimTiers(GROUPS, host, disk, SPEEDS)
    tiers.clock = SimpleNamespace(now=0.0)
    return tiers


def load(*pieces):
    return SimpleNamespace(pieces=pieces, failed=set())


def test_host_memory_is_divided_as_the_devices_and_forgets_the_least_recently_used():
    tiers = make(500)
    assert tiers.host_blocks == [2, 1]
    for name in (b"a", b"b", b"a", b"c"):
        tiers.save(0, [name], [1])
    assert tiers.holds(0, [b"a", b"b", b"c"]) == [True, False, True]
    assert tiers.stats.saved == 3
    tiers.clear()
    assert tiers.holds(0, [b"a"]) == [False]


def test_loads_share_the_link_and_come_in_their_time():
    tiers = make(1000)
    tiers.save(0, [b"a", b"b"], [1, 2])
    tiers.save(1, [b"s"], [1])
    first, second = load(Piece(0, b"a"), Piece(0, b"b")), load(Piece(1, b"s"), Piece(0, b"gone"))
    tiers.begin(first)
    tiers.begin(second)
    assert second.failed == {Piece(0, b"gone")}
    assert tiers.poll(0.0) == []
    assert tiers.poll(1.5) == []
    assert tiers.clock.now == 1.5
    assert tiers.poll(1.0) == [first]
    assert tiers.clock.now == 2.0
    assert tiers.poll(None) == [second]
    assert (tiers.clock.now, tiers.stats.from_host, tiers.stats.from_disk) == (5.0, 3, 0)
    assert list(tiers.poll(None)) == []


def test_the_disk_has_what_was_written_in_time():
    tiers = make(250, disk=200)  # one block of group 0 in host memory, two on the disk
    assert tiers.host_blocks[0] == 1
    tiers.save(0, [b"a"], [1])
    tiers.save(0, [b"b", b"dropped"], [2, 3])
    assert tiers.holds(0, [b"a", b"b", b"dropped"]) == [False, True, False]  # not written yet
    tiers.clock.now = 4.0
    assert tiers.holds(0, [b"a", b"b"]) == [True, True]
    tiers.expect(0, [b"a"])
    tiers.begin(load(Piece(0, b"a")))
    assert len(tiers.poll(None)) == 1
    assert (tiers.clock.now, tiers.stats.from_disk) == (6.0, 1)
    tiers.save(0, [b"c"], [1])  # for it b leaves the disk: a was read last
    tiers.clock.now = 9.0
    assert tiers.holds(0, [b"a", b"b", b"c"]) == [True, False, True]


def test_a_record_that_a_load_waits_for_is_not_evicted():
    tiers = make(250)
    tiers.save(0, [b"a"], [1])
    tiers.expect(0, [b"a"])
    tiers.save(0, [b"b"], [2])
    assert tiers.holds(0, [b"a", b"b"]) == [True, False]
