"""Windows, snapshots and compressed pages, case by case."""

import sys

import pytest

from openinfer.kvpool import BlockState, Copy, Group, InvalidTokens, LeaseReleased, Pool


def computed(pool, tokens, steps=(), salt=b""):
    """A lease whose tokens are all reserved and committed, in steps as given, with snapshots where they end."""
    lease = pool.acquire(tokens, salt)
    assert lease.reserve(len(tokens)) is not None
    for end in [*steps, len(tokens)]:
        if end % pool.boundary_size == 0:
            assert lease.snapshot(end) is not None
        lease.commit(tokens, end)
    return lease


# -- windows --


def test_blocks_behind_the_window_are_given_back_and_the_table_keeps_its_indices():
    pool = Pool([Group("kv", 4, 20, window=6)])
    tokens = list(range(24))
    with pool.acquire(tokens) as lease:
        lease.reserve(24)
        assert list(lease.block_table()) == [1, 2, 3, 4, 5, 6]
        lease.commit(tokens, 9)  # the next token needs 3..8
        assert list(lease.block_table()) == [1, 2, 3, 4, 5, 6]
        lease.commit(tokens, 10)  # the next token needs 4..9
        assert list(lease.block_table()) == [0, 2, 3, 4, 5, 6]
        lease.commit(tokens, 23)  # 17..22
        assert list(lease.block_table()) == [0, 0, 0, 0, 5, 6]
        assert (pool.num_free, lease.num_tokens) == (17, 24)
        assert lease.reserve(25) == [(0, 6, [7])]
        pool.check_integrity()


def test_without_the_prefix_cache_a_window_slides_too():
    pool = Pool([Group("kv", 4, 20, window=4)], prefix_cache=False)
    with pool.acquire([1] * 16) as lease:
        lease.reserve(16)
        lease.commit([1] * 16, 16)
        assert list(lease.block_table()) == [0, 0, 0, 4]
        assert pool.block_state(1) is BlockState.FREE


def test_a_hit_needs_the_blocks_of_the_window_only():
    pool = Pool([Group("kv", 4, 8, window=6)])
    tokens = list(range(28))
    computed(pool, tokens).release()
    evicting = pool.acquire([99])
    evicting.reserve(16)  # takes the four that fell out of the window first
    with pool.acquire(tokens) as lease:
        assert lease.num_cached == 24  # 18..23 are needed, and in the blocks of 16..23
        assert list(lease.block_table())[:4] == [0, 0, 0, 0]
        assert 0 not in list(lease.block_table())[4:]
    with pool.acquire(tokens[:21]) as lease:
        assert lease.num_cached == 0  # the window before 20 has lost 12..15
    evicting.release()
    pool.check_integrity()


def test_a_window_beside_full_pages():
    pool = Pool([Group("full", 4, 20), Group("window", 4, 20, window=4)])
    tokens = list(range(17))
    lease = computed(pool, tokens)
    assert [list(lease.block_table(group)) for group in (0, 1)] == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]
    with pool.acquire(
        tokens
    ) as other:  # what is behind the window is still cached, so earlier hits are possible
        assert (other.num_cached, list(other.block_table(1))) == (16, [0, 0, 0, 4])
    with pool.acquire(tokens[:9]) as other:
        assert (other.num_cached, list(other.block_table(1))) == (8, [0, 2])
    lease.release()


def test_a_prompt_longer_than_its_window_group_passes_through_it_chunk_by_chunk():
    pool = Pool([Group("full", 4, 30), Group("window", 4, 5, window=6)])
    tokens = list(range(100))
    assert pool.capacity_tokens == 29 * 4
    lease = pool.acquire(tokens)
    assert lease.reserve(100) is None  # all of it at once: the window group has sixteen tokens of room
    assert (lease.reach(), pool.num_free) == (16, 33)
    [full, window] = lease.reserve(10, 100)
    assert (full[:2], len(full[2]), window) == ((0, 0), 25, (1, 0, [1, 2, 3]))
    assert lease.num_tokens == 12
    most = 0
    for end in range(10, 101, 6):
        lease.commit(tokens, end)
        most = max(most, pool.num_used(1))
        if end < 100:
            assert lease.reserve(end + 6) is not None  # the room was promised: only the window grows
        pool.check_integrity()
    assert most <= 4
    with pool.acquire([*tokens, 7]) as other:
        assert other.num_cached == 100
    lease.release()
    assert pool.num_free == pool.num_total


def test_room_that_was_promised_is_nobody_elses():
    pool = Pool([Group("full", 4, 11), Group("window", 4, 5, window=4)])
    first, second = pool.acquire([1] * 32), pool.acquire([2] * 12)
    assert first.reserve(4, 32) is not None
    assert second.reserve(4, 12) is None  # three blocks are wanted of the two that are left
    assert second.reserve(4, 8) == [(0, 0, [9, 10]), (1, 0, [2])]
    for end in range(4, 32, 4):
        first.commit([1] * 32, end)
        assert first.reserve(end + 4) is not None
    for lease in (first, second):
        lease.release()
    pool.check_integrity()


def test_reserve_leaves_a_part_of_each_group_of_pages_free_if_asked_to():
    pool = Pool(
        [Group("full", 4, 11), Group("window", 4, 11, window=4), Group("state", 4, 2, snapshots=True)]
    )
    lease = pool.acquire([1] * 40)
    assert [lease.reach(leave) for leave in (0.0, 0.25, 0.3, 1.0)] == [40, 28, 28, 0]
    assert lease.reserve(29, leave=0.3) is None
    assert lease.reserve(8, 32, leave=0.3) is None
    assert lease.reserve(8, 28, leave=0.3) == [(0, 0, list(range(1, 8))), (1, 0, [1, 2]), (2, 0, [1])]
    assert lease.reserve(8, 28, leave=0.9) == []  # nothing grows
    assert lease.reserve(12, leave=0.9) is None
    lease.release()


@pytest.mark.parametrize(
    ("group", "capacity"),
    [
        (Group("kv", 4, 5), 16),
        (Group("kv", 4, 5, window=9), sys.maxsize),  # on three blocks at most, and a fourth is written
        (Group("kv", 4, 5, window=13), 16),
        (Group("kv", 4, 2, snapshots=True), sys.maxsize),
    ],
)
def test_what_is_alone_in_a_group_can_be_as_long_as_its_capacity(group, capacity):
    pool = Pool([group])
    assert pool.capacity_tokens == group.capacity_tokens == capacity
    tokens = [1] * 50
    with pool.acquire(tokens) as lease:
        end = 0
        while end < len(tokens) and lease.reserve(end + 1) is not None:
            end += 1
            lease.commit(tokens, end)
        assert end == min(50, capacity)


# -- snapshots --

HYBRID = (Group("kv", 4, 30), Group("state", 8, 6, snapshots=True))


def test_a_hit_is_where_a_snapshot_is_and_names_the_one_to_copy():
    pool = Pool(HYBRID)
    tokens = list(range(30))
    assert pool.boundary_size == 8
    first = pool.acquire(tokens)
    assert first.reserve(30) == [(0, 0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 0, [1])]
    assert first.copies == []
    assert first.snapshot(16) == [Copy(1, 1, 2, 16)]
    assert first.snapshot(16) == [Copy(1, 1, 2, 16)]
    first.commit(tokens, 12)
    assert pool.block_state(2, 1) is BlockState.PRIVATE
    first.commit(tokens, 30)
    assert pool.block_state(2, 1) is BlockState.CACHED  # nobody holds it, though its pages are in use
    second = pool.acquire(tokens)  # seven pages are there, but no snapshot after sixteen tokens
    assert (second.num_cached, list(second.block_table(0))) == (16, [1, 2, 3, 4])
    assert list(second.block_table(1)) == []
    assert second.reserve(30) == [(0, 4, [9, 10, 11, 12]), (1, 0, [3])]
    assert second.copies == [Copy(1, 2, 3, 16)]
    assert pool.block_state(2, 1) is BlockState.SHARED
    second.commit(tokens, 17)  # the first step has run, and the copy before it
    assert pool.block_state(2, 1) is BlockState.CACHED
    first.release()
    second.release()
    assert pool.num_free == pool.num_total
    pool.check_integrity()


def test_snapshots_are_evicted_on_their_own():
    pool = Pool(HYBRID)
    for token in range(4):
        computed(pool, [token] * 9, [8]).release()
    assert pool.stats.evicted == 0
    lease = pool.acquire([9])
    lease.reserve(9)
    assert lease.snapshot(8) is not None
    assert pool.stats.evicted == 1  # the oldest snapshot; its pages stay
    with pool.acquire([0] * 9) as other:
        assert other.num_cached == 0
    with pool.acquire([1] * 9) as other:
        assert other.num_cached == 8
    lease.release()
    pool.check_integrity()


def test_no_room_for_a_snapshot_is_no_error():
    pool = Pool([Group("kv", 4, 30), Group("state", 4, 3, snapshots=True)])
    with pool.acquire([1]) as lease:
        lease.reserve(12)
        assert lease.snapshot(4) is not None
        assert lease.snapshot(8) is None
        other = pool.acquire([2])
        assert other.reserve(1) is None
        other.release()
        lease.commit([1] * 12, 8)
        assert (
            lease.snapshot(8) is not None
        )  # evicts the one before; commit of as many, or more, registers it
        lease.commit([1] * 12, 8)
        with pool.acquire([1] * 12) as other:
            assert other.num_cached == 8


def test_where_there_is_no_room_for_a_copy_the_snapshot_itself_is_taken():
    pool = Pool([Group("kv", 4, 30), Group("state", 4, 2, snapshots=True)], events=True)
    computed_by_hand = pool.acquire([1] * 9)
    computed_by_hand.reserve(9)
    assert computed_by_hand.snapshot(8) is None  # the live state is all there is room for
    computed_by_hand.release()
    pool = Pool([Group("kv", 4, 30), Group("state", 4, 3, snapshots=True)])
    computed(pool, [1] * 9, [8]).release()
    blocker = pool.acquire([2])
    blocker.reserve(1)
    lease = pool.acquire([1] * 9)
    assert lease.num_cached == 8
    assert lease.reserve(9) == [(0, 2, [4]), (1, 0, [2])]
    assert lease.copies == []  # it is in place already
    pool.check_integrity()
    with pool.acquire([1] * 9) as other:
        assert other.num_cached == 0  # and nobody else's any more
    lease.release()
    blocker.release()
    pool.check_integrity()


def test_groups_of_snapshots_are_valid_together():
    pool = Pool([Group("a", 4, 9, snapshots=True), Group("b", 4, 9, snapshots=True)])
    tokens = list(range(10))
    lease = pool.acquire(tokens)
    assert lease.reserve(10) == [(0, 0, [1]), (1, 0, [1])]
    assert lease.snapshot(8) == [Copy(0, 1, 2, 8), Copy(1, 1, 2, 8)]
    lease.commit(tokens, 10)
    with pool.acquire(tokens) as other:
        assert (other.num_cached, pool.hash_block_size) == (8, 4)
        other.reserve(10)
        assert other.copies == [Copy(0, 2, 3, 8), Copy(1, 2, 3, 8)]
    lease.release()


def test_boundaries_that_cannot_be_are_refused():
    pool = Pool(HYBRID)
    lease = pool.acquire(list(range(20)))
    for boundary in (7, 24, -8):
        with pytest.raises(
            InvalidTokens, match=f"snapshot at {boundary} tokens: give a multiple of 8 from 0"
        ):
            lease.snapshot(boundary)
    with pytest.raises(InvalidTokens, match="no live state yet"):
        lease.snapshot(0)
    lease.reserve(20)
    lease.commit(list(range(20)), 12)
    with pytest.raises(InvalidTokens, match=r"from 12 \(committed\) to 20 \(reserved\)"):
        lease.snapshot(8)
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.snapshot(16)
    off = Pool(HYBRID, prefix_cache=False)
    with off.acquire([1]) as lease:
        lease.reserve(20)
        assert lease.snapshot(8) is None


# -- compressed caches: entries that cover 4 or 128 tokens --


def test_compressed_pages_combine_with_pages_of_16_and_a_window():
    groups = [
        Group("by 4", 16 * 4, 200),
        Group("by 128", 16 * 128, 9),
        Group("kv", 16, 600),
        Group("window", 16, 600, window=128),
    ]
    pool = Pool(groups)
    assert (pool.hash_block_size, pool.boundary_size) == (16, 2048)
    tokens = list(range(6000))
    lease = pool.acquire(tokens)
    grown = lease.reserve(6000)
    assert [(group, first, len(blocks)) for group, first, blocks in grown] == [
        (0, 0, 94),
        (1, 0, 3),
        (2, 0, 375),
        (3, 0, 375),
    ]
    assert lease.num_tokens == 6000
    lease.commit(tokens, 6000)
    assert sum(map(bool, lease.block_table(3))) == 8  # 5,872..6,000, and the rest is behind the window
    with pool.acquire([*tokens, 1]) as other:
        assert other.num_cached == 4096  # where all four have a block's end
        assert [len(other.block_table(group)) for group in range(4)] == [64, 2, 256, 256]
        assert list(other.block_table(3)).count(0) == 248
    lease.release()
    pool.check_integrity()
    assert pool.num_free == pool.num_total


def reported(pool):
    """What the engines report of the groups "kv" (all other groups are not counted), and of all groups of pages."""
    [kv] = [index for index, group in enumerate(pool.groups) if group.name == "kv"]
    of_pages = pool.num_used(kv) * pool.groups[kv].block_size
    part = max(
        pool.num_used(n) / (group.num_blocks - 1)
        for n, group in enumerate(pool.groups)
        if not group.snapshots
    )
    return of_pages, round(part * pool.capacity_tokens)


@pytest.mark.parametrize("num_blocks", [2, 4, 8, 50, 1001, 77_773])
def test_used_tokens_of_one_group_are_its_used_blocks(num_blocks):
    pool = Pool([Group("kv", 16, num_blocks)])
    assert pool.used_tokens == 0
    for tokens in {1, num_blocks * 16 // 3, (num_blocks - 1) * 16}:
        with pool.acquire([1]) as lease:
            lease.reserve(tokens)
            assert pool.used_tokens == reported(pool)[0] == -(-tokens // 16) * 16


def test_used_tokens_beside_snapshots_are_those_of_the_pages():
    pool = Pool([Group("kv", 4, 20), Group("state", 8, 3, snapshots=True)])
    with pool.acquire([1]) as lease:
        lease.reserve(9)
        assert pool.num_used(1) / 2 > pool.num_used(0) / 19  # the fuller one, which does not count
        assert pool.used_tokens == reported(pool)[0] == 12


def test_used_tokens_beside_a_window_are_those_of_the_fuller_group():
    pool = Pool([Group("window", 4, 5, window=4), Group("kv", 4, 101)])
    with pool.acquire([1]) as lease:
        lease.reserve(12)
        assert pool.used_tokens == reported(pool)[1] == 300  # three of the four pages for windows
        lease.commit([1] * 12, 9)
        lease.reserve(12, 348)
        assert pool.used_tokens == reported(pool)[1] == 348
    assert pool.used_tokens == 0
    pool = Pool([Group("kv", 4, 5, window=4)])  # any length fits, so the capacity has no end
    with pool.acquire([1]) as lease:
        lease.reserve(16)
        assert pool.used_tokens == pool.capacity_tokens == sys.maxsize


def test_the_source_of_a_copy_stays_until_a_commit_goes_further_than_it():
    pool = Pool([Group("kv", 4, 20), Group("state", 4, 4, snapshots=True)])
    computed(pool, [1] * 9, [8]).release()
    lease = pool.acquire([1] * 12)
    lease.reserve(12)
    [copy] = lease.copies
    assert lease.num_cached == 8
    lease.commit([1] * 12, 8)  # what was cached is confirmed; the copy may be under way
    assert pool.block_state(copy.source, 1) is BlockState.SHARED
    others = [pool.acquire([9]) for _ in range(3)]
    assert [other.reserve(1) is not None for other in others].count(True) == 1  # one block is left, not two
    lease.commit([1] * 12, 9)
    assert pool.block_state(copy.source, 1) is BlockState.CACHED
    for holder in (lease, *others):
        holder.release()
    pool.check_integrity()
