"""Holds and pins."""

import pytest

from openinfer.kvpool import BlockState, Group, InvalidBlocks, Pool


def computed(pool, tokens, salt=b"", **options):
    lease = pool.acquire(tokens, salt, **options)
    assert lease.reserve(len(tokens)) is not None
    lease.commit(tokens, len(tokens))
    return lease


def test_held_blocks_and_what_they_descend_from_stay():
    pool = Pool([Group("kv", 4, 6)])
    computed(pool, [1] * 12).release()
    hold = pool.hold([2])
    assert [pool.block_state(block).name for block in (1, 2, 3)] == ["SHARED", "SHARED", "CACHED"]
    assert pool.num_free == 3
    with pool.acquire([9]) as lease:
        assert lease.reserve(12) is not None
        assert lease.reserve(13) is None
        pool.check_integrity()
    assert not pool.reset_prefix_cache()
    hold.release()
    hold.release()
    assert pool.num_free == 5
    with pool.acquire([1] * 12) as lease:
        assert lease.num_cached == 8
    pool.check_integrity()


def test_a_hold_outlives_the_lease_and_is_a_context_manager():
    pool = Pool([Group("kv", 4, 6)])
    lease = computed(pool, [1] * 8)
    with pool.hold([1, 2]), pool.hold([2, 1]):
        lease.release()
        pool.check_integrity()
        assert pool.num_free == 3
    assert pool.num_free == 5
    pool.check_integrity()


def test_a_held_duplicate():
    pool = Pool([Group("kv", 4, 9)])
    first, second = pool.acquire([1] * 8), pool.acquire([1] * 8)
    for lease in (first, second):
        lease.reserve(8)
        lease.commit([1] * 8, 8)
    hold = pool.hold([4])
    second.release()
    pool.check_integrity()
    first.release()
    assert pool.block_state(4) is BlockState.SHARED  # it carries the registration now
    pool.check_integrity()
    hold.release()
    pool.check_integrity()
    assert pool.num_free == 8


def test_only_complete_blocks_can_be_held():
    pool = Pool([Group("kv", 4, 6)])
    with pool.acquire([1]) as lease:
        lease.reserve(1)
        for block in (0, 1, 5, 99, -1):
            with pytest.raises(
                InvalidBlocks, match=f"block {block} of group 'kv' is not complete.*keep its lease"
            ):
                pool.hold([block])
        pool.check_integrity()


def test_a_pinned_prefix_stays_in_every_group():
    pool = Pool([Group("kv", 4, 20), Group("window", 4, 20, window=4), Group("state", 4, 5, snapshots=True)])
    lease = pool.acquire([1] * 8)
    lease.reserve(8)
    lease.snapshot(8)
    lease.commit([1] * 8, 8)
    lease.release()
    with pool.pin([1] * 8) as pin:
        assert pin.num_tokens == 8
        pool.check_integrity()
        with pool.acquire([9]) as other:
            other.reserve(17 * 4)
            other.commit([9] * 68, 60)
            assert other.snapshot(64) is not None
            assert pool.num_free == pool.num_total - 17 - 3 - 2 - (2 + 1 + 1)
            pool.check_integrity()
        with pool.acquire([1] * 9) as again:
            assert again.num_cached == 8
    assert pool.num_free == pool.num_total
    assert pool.pin([5] * 8).num_tokens == 0
    with Pool([Group("kv", 4, 20)], prefix_cache=False).pin([1] * 8) as nothing:
        assert nothing.num_tokens == 0


def test_a_hold_that_is_dropped_releases_itself_and_warns():
    pool = Pool([Group("kv", 4, 6)])
    computed(pool, [1] * 8).release()
    holds = [pool.hold([1])]
    with pytest.warns(ResourceWarning, match="a hold was never released"):
        holds.clear()
    assert pool.num_free == 5
