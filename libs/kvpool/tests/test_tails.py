"""Prefixes that end inside a block: copy-on-write."""

import pytest

from openinfer.kvpool import BlockState, Copy, Group, InvalidGroup, Pool


def make(blocks=12, **options):
    return Pool([Group("kv", 8, blocks)], share_tails=3, **options)


def computed(pool, tokens, salt=b""):
    lease = pool.acquire(tokens, salt)
    assert lease.reserve(len(tokens)) is not None
    lease.commit(tokens, len(tokens))
    return lease


def test_a_prefix_may_end_inside_a_whole_block():
    pool = make()
    first = computed(pool, list(range(16)))
    tokens = [*range(13), 90, 91]
    lease = pool.acquire(tokens)
    assert (lease.num_cached, lease.num_tokens, list(lease.block_table())) == (13, 8, [1])
    assert lease.reserve(15) == [(0, 1, [3])]
    assert lease.copies == [Copy(0, 2, 3, 5)]
    first.release()
    assert pool.block_state(2) is BlockState.SHARED  # until the copy was made
    lease.commit(tokens, 15)
    assert pool.block_state(2) is BlockState.CACHED
    assert (pool.stats.query_tokens, pool.stats.hit_tokens) == (31, 13)
    lease.release()
    pool.check_integrity()


def test_a_prompt_that_is_all_cached_leaves_one_token():
    pool = make()
    computed(pool, list(range(16))).release()
    with pool.acquire(list(range(16))) as lease:
        assert lease.num_cached == 15


def test_the_unfinished_block_of_a_released_lease_is_found():
    pool = make()
    computed(pool, list(range(12))).release()
    assert (pool.block_state(2), pool.num_free) == (BlockState.CACHED, 11)
    with pool.acquire(list(range(14))) as lease:
        assert lease.num_cached == 12
        assert lease.reserve(14) == [(0, 1, [3])]
        assert lease.copies == [Copy(0, 2, 3, 4)]
    computed(pool, list(range(100, 110))).release()  # two tokens are less than share_tails
    with pool.acquire(list(range(100, 112))) as lease:
        assert lease.num_cached == 8
    pool.check_integrity()


def test_fewer_tokens_than_asked_for_and_other_salts_share_nothing():
    pool = make()
    computed(pool, list(range(8)), b"a").release()
    for tokens, salt, hit in [
        ([0, 1, 9], b"a", 0),
        ([0, 1, 2, 9], b"a", 3),
        ([0, 1, 2, 9], b"b", 0),
        ([0], b"a", 0),
    ]:
        with pool.acquire(tokens, salt) as lease:
            assert lease.num_cached == hit


def test_the_best_of_several_blocks_is_taken():
    pool = make()
    for token in (20, 21, 22):
        computed(pool, [*range(5), token, token, token]).release()
    with pool.acquire([*range(5), 21, 21, 9]) as lease:
        assert lease.num_cached == 7


def test_where_there_is_no_room_for_a_copy_the_block_itself_is_taken():
    pool = make(blocks=3)
    computed(pool, list(range(12))).release()
    with pool.acquire(list(range(16))) as lease:
        assert lease.num_cached == 12
        assert lease.reserve(16) == [(0, 1, [2])]
        assert lease.copies == []
        lease.commit(list(range(16)), 16)
        pool.check_integrity()
    assert pool.num_free == 2


def test_a_block_that_others_hold_is_not_taken():
    pool = make(blocks=4)
    first = computed(pool, list(range(16)))
    lease = pool.acquire([*range(12), 50])
    assert lease.num_cached == 12
    other = pool.acquire([7])
    other.reserve(1)
    assert lease.reserve(13) is None
    first.release()
    assert lease.reserve(13) == [(0, 1, [2])]
    pool.check_integrity()
    lease.release()
    other.release()
    pool.check_integrity()


def test_events_tell_of_whole_blocks_only():
    pool = make(events=True)
    computed(pool, list(range(12))).release()
    assert [len(event.block_hashes) for event in pool.take_events().events] == [1]
    with pool.acquire([9]) as lease:
        lease.reserve(88)
        assert [len(event.block_hashes) for event in pool.take_events().events] == [1]


@pytest.mark.parametrize(
    ("groups", "share_tails", "message"),
    [
        ([Group("a", 4, 9), Group("b", 8, 9)], 2, "pages of one size"),
        ([Group("a", 4, 9, snapshots=True)], 2, "pages of one size"),
        ([Group("a", 4, 9)], 4, r"share_tails is 4; give 1\.\.3 tokens"),
        ([Group("a", 4, 9)], 0, "share_tails is 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(groups, share_tails, message):
    with pytest.raises(InvalidGroup, match=message):
        Pool(groups, share_tails=share_tails)


def test_a_block_that_is_taken_leaves_its_registration_to_an_equal_one():
    pool = make(blocks=6)
    first, second = pool.acquire(list(range(8))), pool.acquire(list(range(8)))
    for lease in (first, second):
        lease.reserve(8)
        lease.commit(list(range(8)), 8)
    taker = pool.acquire([*range(5), 50])  # starts from the first one's block
    assert taker.num_cached == 5
    first.release()
    other = pool.acquire([7])
    other.reserve(24)
    assert taker.reserve(6) == [(0, 0, [1])]
    assert taker.copies == []
    pool.check_integrity()
    with pool.acquire(list(range(9))) as again:
        assert (again.num_cached, list(again.block_table())) == (8, [2])
    for lease in (taker, second, other):
        lease.release()
    pool.check_integrity()
