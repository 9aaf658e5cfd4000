"""Pool and Lease case by case. Long random histories are in test_pool_histories.py."""

import tracemalloc

import pytest

from openinfer.kvpool import (
    Group,
    InvalidGroup,
    InvalidTokens,
    LeaseReleased,
    Pool,
    hash_blocks,
)


def make(*, blocks=10, size=4, **options):
    return Pool([Group("kv", size, blocks)], **options)


def computed(pool, tokens, salt=b""):
    """A lease whose tokens are all reserved and committed."""
    lease = pool.acquire(tokens, salt)
    assert lease.reserve(len(tokens)) is not None
    lease.commit(tokens, len(tokens))
    return lease


def test_blocks_grow_on_demand_and_block_0_is_never_handed_out():
    pool = make(blocks=6)
    with pool.acquire([1] * 5) as lease:
        assert (lease.num_cached, lease.num_tokens) == (0, 0)
        assert lease.reserve(5) == [(0, 0, [1, 2])]
        assert lease.reserve(8) == []
        assert lease.reserve(3) == []
        assert lease.reserve(9) == [(0, 2, [3])]
        assert (list(lease.block_table()), lease.num_tokens) == ([1, 2, 3], 12)
        assert (pool.num_free, pool.num_total, pool.capacity_tokens) == (2, 5, 20)
        assert lease.reserve(21) is None
        assert (list(lease.block_table()), pool.num_free) == ([1, 2, 3], 2)
        pool.check_integrity()
    assert pool.num_free == 5


def test_a_released_prefix_is_found_in_whole_blocks_with_one_token_left_to_compute():
    pool = make()
    computed(pool, list(range(12))).release()
    for tokens, hit in [
        (list(range(12)), 8),
        (list(range(13)), 12),
        (list(range(4)), 0),
        (list(range(5)), 4),
        ([0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 12], 4),
        ([9] * 13, 0),
        ([], 0),
    ]:
        with pool.acquire(tokens) as lease:
            assert lease.num_cached == lease.num_tokens == hit
            assert list(lease.block_table()) == [1, 2, 3][: hit // 4]
            pool.check_integrity()


def test_a_prefix_in_use_is_shared_and_outlives_its_first_user():
    pool = make()
    first = computed(pool, list(range(8)))
    second = pool.acquire(list(range(9)))
    assert list(second.block_table()) == [1, 2]
    first.release()
    assert pool.num_free == 7
    assert second.reserve(9 + 27) == [(0, 2, [3, 4, 5, 6, 7, 8, 9])]
    assert second.reserve(99) is None
    second.release()


def test_salts_do_not_share():
    pool = make()
    computed(pool, list(range(8)), b"alice").release()
    with pool.acquire(list(range(9)), b"bob") as bob, pool.acquire(list(range(9)), b"alice") as alice:
        assert (bob.num_cached, alice.num_cached) == (0, 8)


def test_only_confirmed_blocks_are_findable():
    pool = make()
    lease = pool.acquire(list(range(12)))
    lease.reserve(12)
    lease.commit(list(range(12)), 7)
    with pool.acquire(list(range(12))) as other:
        assert other.num_cached == 4
    lease.release()
    with pool.acquire(list(range(12))) as other:
        assert other.num_cached == 4
        assert pool.stats.registered == 1


def test_eviction_takes_the_least_recently_used_first_and_a_child_before_its_parent():
    pool = make(blocks=7)
    computed(pool, [1] * 12).release()
    computed(pool, [2] * 12).release()
    pool.acquire([1] * 12).release()  # touches two blocks of the first
    with pool.acquire([9]) as lease:
        order = []
        for count in range(1, 7):
            assert lease.reserve(count * 4) is not None
            pool.check_integrity()
            left = []
            for token in (1, 2):
                with pool.acquire([token] * 13) as probe:
                    left.append(probe.num_cached // 4)
            order.append(left)
    # 1's third block, then 2 from its tail, ... but every probe is a use: whom it finds moves behind.
    assert order[0] == [2, 3]
    assert [sum(left) for left in order] == [5, 4, 3, 2, 1, 0]
    assert pool.stats.evicted == 6


def test_free_blocks_are_taken_before_cached_ones():
    pool = make(blocks=6)
    computed(pool, [1] * 8).release()
    with pool.acquire([2] * 9) as lease:
        lease.reserve(12)
        assert pool.stats.evicted == 0
        lease.reserve(13)
        assert pool.stats.evicted == 1


def test_of_equal_blocks_the_first_is_registered():
    pool = make()
    tokens = [1] * 8
    first, second = pool.acquire(tokens), pool.acquire(tokens)  # neither finds anything yet
    for lease in (first, second):
        lease.reserve(8)
        lease.commit(tokens, 8)
        pool.check_integrity()
    assert pool.stats.registered == 2
    with pool.acquire([*tokens, 2]) as third:
        assert list(third.block_table()) == list(first.block_table()) == [1, 2]
    second.release()
    assert pool.num_free == 7  # second's copies are of no use: free, not cached
    first.release()
    pool.check_integrity()


def test_a_duplicate_is_promoted_when_the_registered_one_goes():
    pool = make()
    tokens = [1] * 8
    first, second = pool.acquire(tokens), pool.acquire(tokens)
    for lease in (first, second):
        lease.reserve(8)
        lease.commit(tokens, 8)
    first.release()
    pool.check_integrity()
    assert pool.num_free == 7  # first's copies are of no use: free, not cached
    third = pool.acquire([*tokens, 2])
    assert list(third.block_table()) == [3, 4]
    second.release()
    third.release()
    pool.check_integrity()
    assert pool.num_free == 9


def test_a_cached_copy_gives_way_to_one_in_use():
    pool = make(blocks=5)
    tokens = [1] * 4
    late = pool.acquire(tokens)
    computed(pool, tokens).release()
    late.reserve(4)
    late.commit(tokens, 4)
    pool.check_integrity()
    assert (pool.num_free, pool.stats.evicted) == (3, 0)
    with pool.acquire([1] * 5) as other:
        assert list(other.block_table()) == list(late.block_table())
    late.release()


def test_a_hit_needs_every_group():
    pool = Pool([Group("fine", 2, 20), Group("coarse", 8, 20)])
    tokens = list(range(17))
    lease = pool.acquire(tokens)
    assert lease.reserve(17) == [(0, 0, list(range(1, 10))), (1, 0, [1, 2, 3])]
    lease.commit(tokens, 15)  # seven fine blocks, one coarse
    with pool.acquire(tokens) as other:
        assert other.num_cached == 8
        assert (len(other.block_table(0)), len(other.block_table(1))) == (4, 1)
    assert lease.num_tokens == 18
    assert (pool.hash_block_size, pool.num_groups, pool.capacity_tokens) == (2, 2, 38)
    lease.release()
    pool.check_integrity()


def test_groups_grow_apart_and_one_that_is_dry_changes_nothing():
    pool = Pool([Group("fine", 2, 20), Group("coarse", 6, 3)])
    with pool.acquire([1] * 4) as lease:
        assert lease.reserve(5) == [(0, 0, [1, 2, 3]), (1, 0, [1])]
        assert lease.reserve(6) == []
        assert lease.reserve(13) is None
        assert lease.reserve(7) == [(0, 3, [4]), (1, 1, [2])]
        assert pool.num_free == 15


def test_hashes_may_come_from_elsewhere():
    pool = make()
    tokens = list(range(12))
    computed(pool, tokens, b"s").release()
    names = hash_blocks(tokens, pool.hash_block_size, b"s")
    for given in (names, names[:1], []):
        with pool.acquire(tokens, b"s", hashes=given) as lease:
            assert lease.num_cached == 8
            assert lease.hashes[: len(given)] == given
    with pytest.raises(InvalidTokens, match="3 hashes of 4 tokens each do not fit 11 tokens"):
        pool.acquire(tokens[:11], b"s", hashes=names)


def test_each_block_is_hashed_once_in_a_leases_life(monkeypatch):
    import openinfer.kvpool.hashing as hashing

    calls = []
    sha256 = hashing.hashlib.sha256
    monkeypatch.setattr(hashing.hashlib, "sha256", lambda data: calls.append(len(data)) or sha256(data))
    pool = make(blocks=40)
    tokens = list(range(64))
    lease = pool.acquire(tokens)
    lease.reserve(64)
    for confirmed in range(1, 65):
        lease.commit(tokens, confirmed)
    assert len(calls) == 1 + 16  # the root, and each block
    lease.release()


def test_without_the_prefix_cache_nothing_is_hashed_found_or_kept():
    pool = make(prefix_cache=False)
    lease = computed(pool, list(range(8)))
    assert (lease.hashes, pool.stats.registered) == ([], 0)
    lease.release()
    with pool.acquire(list(range(9))) as other:
        assert other.num_cached == 0
    pool.check_integrity()


def test_reset_forgets_what_is_cached_but_not_while_blocks_are_in_use():
    pool = make()
    lease = computed(pool, list(range(8)))
    assert not pool.reset_prefix_cache()
    lease.release()
    assert pool.reset_prefix_cache()
    pool.check_integrity()
    with pool.acquire(list(range(9))) as other:
        assert (other.num_cached, pool.stats.evicted) == (0, 0)


def test_cached_blocks_are_evicted_on_demand_and_used_ones_are_not():
    pool = make()
    used = computed(pool, list(range(8)))
    computed(pool, list(range(100, 112))).release()
    assert not pool.idle
    assert (pool.evict(2), len(pool.cached())) == (2, 1)
    assert (pool.evict(9), len(pool.cached())) == (1, 0)
    assert pool.stats.evicted == 3
    pool.check_integrity()
    used.release()
    assert pool.idle
    assert pool.evict(9) == 2
    pool.check_integrity()


def test_queries_count_once_a_lease_has_room():
    pool = make(blocks=5)
    computed(pool, list(range(8))).release()
    assert (pool.stats.query_tokens, pool.stats.hit_tokens) == (8, 0)
    for _ in range(3):  # looked up, but there is no room
        with pool.acquire(list(range(30))) as lease:
            assert lease.reserve(30) is None
    with pool.acquire(list(range(9))) as lease:
        lease.reserve(9)
        lease.reserve(10)
    assert (pool.stats.query_tokens, pool.stats.hit_tokens) == (17, 8)


def test_a_released_lease_is_of_no_more_use():
    pool = make()
    lease = computed(pool, [1] * 4)
    lease.release()
    lease.release()
    for use in (lambda: lease.reserve(4), lambda: lease.commit([1] * 4, 4)):
        with pytest.raises(LeaseReleased, match="acquire a new one"):
            use()
    assert list(lease.block_table()) == []


def test_a_lease_that_is_dropped_releases_itself_and_warns():
    pool = make()
    leases = [computed(pool, [1] * 4)]
    with pytest.warns(ResourceWarning, match="4 tokens was never released"):
        leases.clear()
    assert pool.num_free == 9
    pool.check_integrity()


def test_commit_beyond_what_is_there_is_refused():
    pool = make()
    with pool.acquire([1] * 6) as lease:
        lease.reserve(6)
        with pytest.raises(InvalidTokens, match="cannot commit 7 tokens: 6 given, room reserved for 8"):
            lease.commit([1] * 6, 7)
        with pytest.raises(InvalidTokens, match="room reserved for 8"):
            lease.commit([1] * 20, 9)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (list, "at least one group"),
        (lambda: [Group("a", 1, 2), Group("a", 2, 2)], r"names must differ, given \['a', 'a'\]"),
        (lambda: [Group("a", 0, 2)], "block_size is 0"),
        (lambda: [Group("a", 1, 1)], "num_blocks is 1, it must be at least 2"),
        (lambda: [Group("a", 1, 2, -1)], "block_bytes is -1"),
        (lambda: [Group("a", 1, 2, window=0)], "window is 0"),
        (lambda: [Group("a", 1, 2, window=4, snapshots=True)], "a snapshot has no window"),
    ],
)
def test_pools_that_cannot_be_are_refused(groups, message):
    with pytest.raises(InvalidGroup, match=message):
        Pool(groups())


def test_a_group_that_is_not_there_is_told_those_that_are():
    pool = Pool([Group("a", 4, 5), Group("b", 4, 5)])
    with (
        pool.acquire([1]) as lease,
        pytest.raises(InvalidGroup, match=r"no group 2; the pool has groups 0\.\.1"),
    ):
        lease.block_table(2)


def test_a_large_pool_takes_less_than_a_kilobyte_of_host_memory_a_block():
    tracemalloc.start()
    pool = make(blocks=10_001, size=1)
    for start in range(0, 100_000, 1000):
        computed(pool, range(start, start + 100)).release()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.stats.registered == 10_000
    assert size / 10_000 < 600  # about 300, and room for other Pythons
