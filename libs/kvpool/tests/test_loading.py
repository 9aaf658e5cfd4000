"""Blocks that come from elsewhere. The rules are in testing.LoadingSuite; here are the cases of this pool."""

import pytest

from openinfer.kvpool import Group, LeaseLoading, Pool
from openinfer.kvpool.loading import LoadPart
from openinfer.kvpool.testing import Broken, FakeLoader, History, LoadingSuite

FULL = Group("full", 4, 12)
WINDOW = Group("window", 4, 12, window=6)
STATE = Group("state", 4, 6, snapshots=True)


class TestPool(LoadingSuite):
    def make_pool(self, groups, loader):
        return Pool(groups, loader=loader)


class TestPoolWithPriorityAndEvents(LoadingSuite):
    def make_pool(self, groups, loader):
        return Pool(groups, loader=loader, eviction="priority", events=True)


def loaded(groups, tokens, stored, **options):
    loader = FakeLoader(groups, failures=0.0)
    pool = Pool(groups, loader=loader, **options)
    loader.store(stored, b"", pool.hash_block_size)
    return pool, loader, pool.acquire(tokens)


def test_a_lease_that_loads_can_only_be_released():
    pool, _, lease = loaded([FULL], [1] * 9, [1] * 8)
    assert lease.load()
    for use in (lambda: lease.reserve(9), lambda: lease.commit([1] * 9, 0), lease.load):
        with pytest.raises(LeaseLoading, match="wait until"):
            use()
    pool.poll(None)
    assert lease.reserve(9) == [(0, 2, [3])]
    lease.release()


def test_nothing_can_be_loaded_without_a_loader_without_a_cache_or_after_a_reserve():
    with Pool([FULL]).acquire([1] * 9) as lease:
        assert (lease.num_loadable, lease.load()) == (0, False)
    for prefix_cache, before in ((False, 0), (True, 9)):
        _, _, lease = loaded([FULL], [1] * 9, [1] * 8, prefix_cache=prefix_cache)
        lease.reserve(before)
        assert lease.num_loadable == 0
        lease.release()


def test_what_is_cached_of_the_prefix_is_kept_and_not_loaded():
    pool, loader, lease = loaded([FULL], [1] * 13, [1] * 12)
    with lease, pool.acquire([1] * 5) as first:
        first.reserve(5)
        first.commit([1] * 5, 5)
    with pool.acquire([1] * 13) as lease:
        assert (lease.num_cached, lease.num_loadable) == (4, 8)
        assert lease.load()
        [load] = loader.loads
        assert [piece.block for piece in load.pieces] == [2, 3]
        pool.check_integrity()
        pool.poll(None)
        assert (lease.num_cached, list(lease.block_table())) == (12, [1, 2, 3])


def test_of_a_window_only_what_the_next_token_reaches_is_loaded():
    pool, loader, lease = loaded([FULL, WINDOW], [1] * 21, [1] * 20)
    with lease:
        assert lease.load()
        [load] = loader.loads
        assert [sum(piece.group == group for piece in load.pieces) for group in (0, 1)] == [5, 2]
        pool.poll(None)
        assert lease.num_cached == 20
        assert [bool(block) for block in lease.block_table(1)] == [False] * 3 + [True] * 2


def test_of_snapshots_only_the_last_is_loaded_and_then_copied():
    pool, loader, lease = loaded([FULL, STATE], [1] * 11, [1] * 8)
    with lease:
        assert lease.load()
        [load] = loader.loads
        assert [sum(piece.group == group for piece in load.pieces) for group in (0, 1)] == [2, 1]
        [snapshot] = [piece.block for piece in load.pieces if piece.group]
        pool.poll(None)
        assert lease.num_cached == 8
        lease.reserve(11)
        [copy] = lease.copies
        assert (copy.group, copy.source, copy.num_tokens) == (1, snapshot, 8)


def test_a_page_whose_parent_did_not_come_is_not_findable():
    pool, loader, lease = loaded([FULL], [1] * 13, [1] * 12)
    with lease:
        assert lease.load()
        [load] = loader.loads
        loader._random.random = iter([0.9, -1.0, 0.9]).__next__  # the second fails
        loader._failures = 0.5
        pool.poll(None)
        assert load.failed == {load.pieces[1]}
        assert (lease.num_cached, pool.stats.loaded, pool.stats.failed) == (4, 2, 1)
        assert pool.num_used() == 1
        pool.check_integrity()


def test_what_another_lease_has_computed_meanwhile_is_shared():
    pool, _, lease = loaded([FULL], [1] * 9, [1] * 8)
    assert lease.load()
    with pool.acquire([1] * 9) as other, lease:
        other.reserve(9)
        other.commit([1] * 9, 8)
        pool.poll(None)
        pool.check_integrity()
        assert list(lease.block_table()) == list(other.block_table())[:2]
        assert pool.num_used() == 3
    pool.check_integrity()


def test_a_load_makes_events_and_a_hit():
    pool, _, lease = loaded([FULL], [1] * 9, [1] * 8, events=True)
    with lease:
        assert lease.load()
        assert pool.take_events() is None
        pool.poll(None)
        assert [len(event.block_hashes) for event in pool.take_events().events] == [1, 1]
        lease.reserve(9)
    assert (pool.stats.query_tokens, pool.stats.hit_tokens) == (9, 8)


def test_the_cache_is_not_reset_while_something_loads():
    pool, _, lease = loaded([FULL], [1] * 9, [1] * 8)
    assert lease.load()
    lease.release()
    assert not pool.reset_prefix_cache()
    pool.poll(None)
    assert pool.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, Group("fine", 2, 30))])
@pytest.mark.parametrize("eviction", ["lru", "lineage", "priority", "s3fifo"])
def test_long_histories(groups, eviction):
    loads = 0
    for seed in range(12):
        loader = FakeLoader(groups, seed, delay=seed % 5, failures=[0.0, 0.1, 0.5][seed % 3])
        pool = Pool(groups, loader=loader, eviction=eviction)
        history = History(pool, groups, seed, holds=True, loader=loader)
        history.run(1500)
        loads += history.num_loads
    assert loads > 100


class TrustsEveryPiece(LoadPart):
    """Makes findable what did not come."""

    def register(self, come):
        super().register(set(self.names))


class FreesAtOnce(Pool):
    """Gives the blocks of a released lease back while they are on their way."""

    def acquire(self, tokens, salt=b"", hashes=None, *, priority=0):
        under_way = self._loads._under_way
        for load, (lease, parts) in list(under_way.items()):
            if lease._released:
                for part in parts:
                    part.release()
                under_way[load] = lease, []
        return super().acquire(tokens, salt, hashes, priority=priority)


class FindsTooEarly(Pool):
    """Makes findable what is on its way."""

    def acquire(self, tokens, salt=b"", hashes=None, *, priority=0):
        for load, (_, parts) in self._loads._under_way.items():
            for group, part in enumerate(parts):
                if not all(map(part.ledger.complete, part.blocks)):
                    part.register({piece.name for piece in load.pieces if piece.group == group})
        return super().acquire(tokens, salt, hashes, priority=priority)


@pytest.mark.parametrize("broken", [TrustsEveryPiece, FreesAtOnce, FindsTooEarly])
def test_a_broken_pool_does_not_pass(broken, monkeypatch):
    class Suite(LoadingSuite):
        def make_pool(self, groups, loader):
            pool = (Pool if broken is TrustsEveryPiece else broken)(groups, loader=loader)
            pool.check_integrity = lambda: None  # the memory notices, or what can be seen from outside
            return pool

    if broken is TrustsEveryPiece:
        monkeypatch.setattr("openinfer.kvpool.loading.LoadPart", broken)
    with pytest.raises((Broken, KeyError, AttributeError)):
        Suite().test_random_histories()
