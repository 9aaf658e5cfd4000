"""What each policy prefers. The rules that bind them all are in test_conformance.py."""

import pytest

from openinfer.kvpool import EvictionError, Group, InvalidGroup, Lru, Pool


def make(eviction, blocks=9):
    return Pool([Group("kv", 1, blocks)], eviction=eviction)


def use(pool, tokens, **options):
    with pool.acquire([*tokens, 0], **options) as lease:
        assert lease.reserve(len(tokens)) is not None
        lease.commit(tokens, len(tokens))


def left(pool, *prompts):
    """How much of each is cached, without a trace."""
    found = []
    for tokens in prompts:
        end, _, _ = pool._index.match([*tokens, 0], pool._index.chain([*tokens, 0], b"", None), len(tokens))
        found.append(end)
    return found


def squeeze(pool, count):
    """Evict `count` blocks."""
    with pool.acquire([9]) as lease:
        lease.reserve(count)


A, B = [1, 2, 3, 4], [5, 6, 7, 8]


def test_lru_takes_a_whole_chain_before_the_next():
    pool = make("lru")
    use(pool, A)
    use(pool, B)
    squeeze(pool, 3)
    assert left(pool, A, B) == [1, 4]


def test_lineage_shortens_all_chains_in_turn():
    pool = make("lineage")
    use(pool, A)
    use(pool, B)
    squeeze(pool, 4)
    assert left(pool, A, B) == [2, 2]


def test_priority_keeps_the_highest_that_used_a_block():
    pool = make("priority")
    use(pool, A, priority=2)
    use(pool, B, priority=1)
    use(pool, A)  # of no priority, but the blocks keep theirs
    squeeze(pool, 5)
    assert left(pool, A, B) == [3, 0]


def test_a_child_outranks_its_parent_only_until_it_is_evicted():
    pool = make("priority", blocks=5)
    use(pool, A[:2])
    use(pool, A, priority=5)
    squeeze(pool, 1)
    assert left(pool, A) == [3]


def test_s3fifo_keeps_what_was_used_again_through_a_scan():
    pools = {name: make(name, blocks=21) for name in ("s3fifo", "lru")}
    for pool in pools.values():
        use(pool, A)
        use(pool, A)
        for start in range(100, 1100, 10):
            use(pool, list(range(start, start + 5)))
    assert left(pools["s3fifo"], A) == [4]
    assert left(pools["lru"], A) == [0]


def test_s3fifo_readmits_what_comes_back_soon():
    pool = make("s3fifo", blocks=9)
    use(pool, A)
    use(pool, B)
    squeeze(pool, 4)
    assert left(pool, A, B) != [4, 4]
    use(pool, A)
    for start in range(100, 200, 10):
        use(pool, list(range(start, start + 2)))
    assert left(pool, A)[0] > 0


def test_policies_are_picked_by_name_or_by_what_makes_one():
    made = []
    pool = Pool(
        [Group("a", 1, 4), Group("b", 2, 4)], eviction=lambda group: made.append(group.name) or Lru(group)
    )
    assert made == ["a", "b"]
    assert pool.num_free == 6
    with pytest.raises(
        InvalidGroup, match=r"eviction is 'fifo'; give one of \['lineage', 'lru', 'priority', 's3fifo'\]"
    ):
        make("fifo")


@pytest.mark.parametrize(("name", "complaint"), [(b"x", "not registered"), (None, "in use")])
def test_a_policy_that_pops_what_is_not_cached_is_named(name, complaint):
    class Wrong(Lru):
        def pop(self):
            super().pop()
            return name or used

    pool = Pool([Group("kv", 1, 4)], eviction=Wrong)
    with pool.acquire([1]) as first:
        first.reserve(1)
        first.commit([1], 1)
        used = first.hashes[0]
        use(pool, [5, 6])
        with (
            pool.acquire([3]) as lease,
            pytest.raises(EvictionError, match=rf"Wrong.pop\(\) .* which is {complaint}"),
        ):
            lease.reserve(2)
