"""Events, case by case; test_group_histories.py replays long histories of them."""

import time

from openinfer.kvpool import AllBlocksCleared, BlockRemoved, BlockStored, Group, Pool, hash_blocks


def computed(pool, tokens, num_confirmed=None):
    lease = pool.acquire(tokens)
    assert lease.reserve(len(tokens)) is not None
    lease.commit(tokens, len(tokens) if num_confirmed is None else num_confirmed)
    return lease


def events(pool):
    batch = pool.take_events()
    return batch.events if batch else []


def test_a_life_of_blocks():
    pool = Pool([Group("kv", 4, 5)], events=True)
    tokens = list(range(13))
    names = hash_blocks(tokens, 4)
    lease = computed(pool, tokens, 8)
    assert events(pool) == [BlockStored(names[:2], None, tokens[:8], 4)]
    lease.commit(tokens, 12)
    assert events(pool) == [BlockStored(names[2:], names[1], tokens[8:12], 4)]
    lease.release()
    assert events(pool) == []
    with pool.acquire([99]) as other:
        other.reserve(8)
        other.reserve(16)
    assert events(pool) == [BlockRemoved([names[2], names[1], names[0]])]  # two evictions, one event
    computed(pool, tokens).release()
    events(pool)
    assert pool.reset_prefix_cache()
    assert events(pool) == [AllBlocksCleared()]


def test_equal_blocks_are_stored_once():
    pool = Pool([Group("kv", 4, 12)], events=True)
    first, second = pool.acquire([1] * 8), pool.acquire([1] * 8)
    for lease in (first, second):
        lease.reserve(8)
    first.commit([1] * 8, 4)
    second.commit([1] * 8, 8)  # its first block is a duplicate, its second is new
    names = hash_blocks([1] * 8, 4)
    assert events(pool) == [
        BlockStored(names[:1], None, [1] * 4, 4),
        BlockStored(names[1:], names[0], [1] * 4, 4),
    ]
    first.release()
    second.release()
    assert events(pool) == []


def test_groups_are_told_apart_and_snapshots_carry_no_tokens():
    pool = Pool([Group("kv", 4, 9), Group("state", 8, 5, snapshots=True)], events=True)
    tokens = list(range(9))
    with pool.acquire(tokens) as lease:
        lease.reserve(9)
        lease.snapshot(8)
        lease.commit(tokens, 9)
    names = hash_blocks(tokens, 4)
    assert events(pool) == [
        BlockStored(names, None, tokens[:8], 4, group_idx=0),
        BlockStored(names[1:], None, [], 8, group_idx=1),
    ]


def test_batches():
    pool = Pool([Group("kv", 4, 9)], events=True)
    assert pool.take_events() is None
    computed(pool, [1] * 4).release()
    batch = pool.take_events(data_parallel_rank=3)
    assert (batch.data_parallel_rank, len(batch.events)) == (3, 1)
    assert abs(batch.ts - time.time()) < 60
    assert pool.take_events() is None


def test_off_unless_asked():
    pool = Pool([Group("kv", 4, 9)])
    computed(pool, [1] * 4).release()
    assert pool.take_events() is None
