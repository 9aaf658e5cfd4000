"""Suites of rules as test methods. pytest collects them from a subclass; the suites do not need pytest."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..eviction import Eviction
from ..group import Group
from ..pool import Pool
from .history import History, must_hold
from .loader import FakeLoader

PAGES = (Group("pages", 2, 14),)
MIXED = (Group("fine", 2, 20), Group("coarse", 4, 9))


class _Suite:
    num_operations = 400
    """Operations of each random history."""


class PoolSuite(_Suite):
    """Rules for a pool: override make_pool. A pool that passes can serve openinfer.scheduler.StepLoop."""

    def make_pool(self, groups: Sequence[Group]) -> Any:
        """A fresh pool with a prefix cache, of these groups (pages without windows)."""
        raise NotImplementedError("make a pool of your own here")

    def _computed(self, pool: Any, tokens: list[int], num_confirmed: int, salt: bytes = b"") -> Any:
        lease = pool.acquire(tokens, salt)
        must_hold(lease.reserve(len(tokens)) is not None, f"no room for {len(tokens)} tokens in a new pool")
        lease.commit(tokens, num_confirmed)
        return lease

    def _num_cached(self, pool: Any, tokens: list[int], salt: bytes = b"") -> int:
        lease = pool.acquire(tokens, salt)
        found: int = lease.num_cached
        lease.release()
        return found

    def test_a_prefix_is_found_while_held_and_after(self) -> None:
        pool = self.make_pool(PAGES)
        lease = self._computed(pool, list(range(7)), 7)
        must_hold(self._num_cached(pool, list(range(7))) == 6, "whole blocks have six of seven tokens")
        lease.release()
        must_hold(self._num_cached(pool, [0, 1, 2, 3, 9]) == 4, "four tokens of a released lease are cached")

    def test_one_token_is_left_to_compute(self) -> None:
        pool = self.make_pool(PAGES)
        self._computed(pool, [1] * 4, 4).release()
        must_hold(self._num_cached(pool, [1] * 4) < 4, "an all cached prompt has nothing left to compute")

    def test_only_confirmed_tokens_are_found(self) -> None:
        pool = self.make_pool(PAGES)
        self._computed(pool, [1] * 8, 3).release()
        found = self._num_cached(pool, [1] * 8)
        must_hold(found == 2, f"{found} tokens found; three are confirmed, which fill one block of two")

    def test_salts_do_not_share(self) -> None:
        pool = self.make_pool(PAGES)
        self._computed(pool, [1] * 8, 8, b"a").release()
        must_hold(self._num_cached(pool, [1] * 9, b"b") == 0, "found what belongs to another salt")

    def test_a_dry_pool_says_so_and_recovers(self) -> None:
        pool = self.make_pool(PAGES)
        lease = self._computed(pool, [1] * 20, 20)
        other = pool.acquire([2] * 9)
        must_hold(other.reserve(9) is None, "thirteen blocks hold no twenty tokens and nine more")
        lease.release()
        must_hold(other.reserve(9) is not None, "there is room after a release")
        other.release()
        must_hold(pool.num_free == pool.num_total, "all was released, and not all is free")

    def test_a_hit_needs_every_group(self) -> None:
        pool = self.make_pool(MIXED)
        self._computed(pool, [1] * 8, 7).release()
        found = self._num_cached(pool, [1] * 9)
        must_hold(found == 4, f"{found} tokens found; of seven, whole blocks in both groups hold four")

    def test_a_pool_without_a_loader_loads_nothing(self) -> None:
        pool = self.make_pool(PAGES)
        lease = pool.acquire([1] * 9)
        must_hold(lease.num_loadable == 0, f"{lease.num_loadable} tokens can be loaded without a loader")
        must_hold(not lease.load(), "a load has started, and there is no loader")
        must_hold(list(pool.poll(None)) == [], "poll() must return at once, and nothing, when nothing loads")
        lease.release()

    def test_random_histories(self) -> None:
        for groups in (PAGES, MIXED):
            for seed in range(3):
                history = History(self.make_pool(groups), groups, seed)
                history.run(self.num_operations)
                must_hold(history.num_hits > 0, "no prefix was ever found")


class LoadingSuite(_Suite):
    """Rules for a pool that loads: override make_pool."""

    def make_pool(self, groups: Sequence[Group], loader: FakeLoader) -> Any:
        """A fresh pool with a prefix cache, of these groups, that loads from `loader`."""
        raise NotImplementedError("make a pool of your own here")

    def _loading(self, tokens: list[int], *, stored: int, **faults: Any) -> tuple[Any, FakeLoader, Any]:
        """A pool, its loader, and a lease that loads the first `stored` of the tokens."""
        loader = FakeLoader(PAGES, **faults)
        pool = self.make_pool(PAGES, loader)
        loader.store(tokens[:stored], b"", pool.hash_block_size)
        lease = pool.acquire(tokens)
        must_hold(lease.num_cached == 0, "nothing is cached in a fresh pool")
        must_hold(lease.num_loadable == stored, f"{lease.num_loadable} tokens can be loaded, not {stored}")
        must_hold(lease.load(), "there is room to load in an empty pool")
        return pool, loader, lease

    def test_what_was_loaded_is_found(self) -> None:
        pool, _, lease = self._loading([1] * 9, stored=6, failures=0.0)
        with pool.acquire([1] * 9) as other:
            must_hold(other.num_cached == 0, "found what is still on its way")
        ended = pool.poll(None)
        must_hold([id(one) for one in ended] == [id(lease)], "poll() names the lease whose load has ended")
        must_hold((lease.num_cached, lease.num_loadable) == (6, 0), f"{lease.num_cached} of six are cached")
        with pool.acquire([1] * 9) as other:
            must_hold(other.num_cached == 6, "what was loaded is in the cache")
        must_hold(list(pool.poll(None)) == [], "poll() names a lease twice")
        lease.release()
        must_hold(pool.num_free == pool.num_total, "all was released, and not all is free")

    def test_what_did_not_come_is_left_to_compute(self) -> None:
        pool, _, lease = self._loading([1] * 9, stored=6, failures=1.0)
        must_hold(len(pool.poll(None)) == 1, "a load that failed has ended")
        must_hold(lease.num_cached == 0, f"nothing came, and {lease.num_cached} tokens are cached")
        must_hold(lease.reserve(9) is not None, "the blocks are free again")
        lease.release()
        must_hold(pool.num_free == pool.num_total, "all was released, and not all is free")

    def test_blocks_on_their_way_are_not_given_out(self) -> None:
        pool, _, lease = self._loading([1] * 9, stored=8, failures=0.0)
        lease.release()
        must_hold(pool.num_free == pool.num_total - 4, "four blocks are the loader's until it is done")
        pool.poll(None)
        must_hold(pool.num_free == pool.num_total, "the load has ended, and not all is free")

    def test_no_room_changes_nothing(self) -> None:
        loader = FakeLoader(PAGES)
        pool = self.make_pool(PAGES, loader)
        loader.store([1] * 8, b"", pool.hash_block_size)
        with pool.acquire([2] * 22) as other:
            must_hold(other.reserve(22) is not None, "an empty pool has room for 22 tokens")
            lease = pool.acquire([1] * 9)
            must_hold(not lease.load(), "two blocks are free, four are loaded")
            must_hold(not loader.loads, "the loader was asked for blocks that there is no room for")
            lease.release()
        must_hold(pool.num_free == pool.num_total, "all was released, and not all is free")

    def test_random_histories(self) -> None:
        window = (Group("full", 2, 20), Group("window", 4, 9, window=5))
        states = (Group("full", 2, 20), Group("state", 4, 9, snapshots=True))
        for groups in (PAGES, MIXED, window, states):
            seen = Counter[str]()
            for seed in range(3):
                loader = FakeLoader(groups, seed)
                history = History(self.make_pool(groups, loader), groups, seed, loader=loader)
                history.run(self.num_operations)
                seen.update(loads=history.num_loads, come=loader.num_come, failed=loader.num_failed)
            must_hold(len(seen) == 3 and min(seen.values()) > 0, f"too little was loaded: {seen}")


class EvictionSuite(_Suite):
    """Rules for an eviction policy: override make_policy."""

    def make_policy(self, group: Group) -> Eviction:
        """A fresh policy for a group."""
        raise NotImplementedError("make a policy of your own here")

    def test_what_is_added_is_popped_once(self) -> None:
        policy = self.make_policy(PAGES[0])
        names = [bytes([index]) for index in range(10)]
        for _ in range(2):  # it may remember what it popped, and must take it again
            for name in names:
                policy.add(name, None, 0)
            must_hold(len(policy) == 10 and sorted(policy) == names, "len() and iter() tell what is kept")
            popped = [policy.pop() for _ in names]
            must_hold(sorted(popped) == names and len(policy) == 0, f"added {names}, popped {popped}")

    def test_what_is_used_is_not_popped(self) -> None:
        policy = self.make_policy(PAGES[0])
        for name in (b"a", b"b", b"c"):
            policy.add(name, None, 0)
        policy.use(b"b")
        must_hold(len(policy) == 2, f"keeps {len(policy)} names, not the two that are not in use")
        must_hold({policy.pop(), policy.pop()} == {b"a", b"c"}, "popped a name that is in use")

    def test_children_go_before_their_parents(self) -> None:
        for seed in range(5):
            self._grow_and_shrink(seed)

    def test_a_parent_that_is_let_go_later_and_by_less_still_outlives_its_children(self) -> None:
        for early, late in ((2, 0), (0, 2), (1, 1)):
            policy = self.make_policy(PAGES[0])
            policy.add(b"grandchild", b"child", early)
            policy.add(b"child", b"parent", early)
            policy.add(b"parent", None, late)  # another lease had it until now
            policy.add(b"stranger", None, 1)
            popped = [policy.pop() for _ in range(4)]
            family = [name for name in popped if name != b"stranger"]
            must_hold(
                family == [b"grandchild", b"child", b"parent"],
                f"popped {popped}, let go with priority {early}, the parent with {late}",
            )

    def test_the_same_calls_give_the_same_order(self) -> None:
        must_hold(self._grow_and_shrink(1) == self._grow_and_shrink(1), "equal histories popped differently")

    def test_random_histories_of_a_pool(self) -> None:
        for groups in (PAGES, MIXED):
            history = History(Pool(groups, eviction=self.make_policy), groups, seed=1, holds=True)
            history.run(self.num_operations)
            must_hold(history.pool.stats.evicted > 0, "nothing was evicted")

    def _grow_and_shrink(self, seed: int) -> list[bytes]:
        """Use and release paths in a tree of names, as leases do. Returns the popped names."""
        rng = random.Random(seed)
        policy = self.make_policy(Group("tree", 1, 40))
        kept: set[bytes] = set()
        popped = []
        for _ in range(self.num_operations):
            path = bytes(rng.randint(0, 2) for _ in range(rng.randint(1, 5)))
            prefixes = [path[:end] for end in range(1, len(path) + 1)]
            for name in prefixes:
                if name in kept:
                    policy.use(name)
                    kept.remove(name)
            priority = rng.randint(0, 2)
            for name in reversed(prefixes):
                policy.add(name, name[:-1] or None, priority)
                kept.add(name)
            must_hold(len(policy) == len(kept), f"keeps {len(policy)} names, not {len(kept)}")
            while len(kept) > 30:
                name = policy.pop()
                must_hold(name in kept, f"popped {name!r}, which is not kept")
                kept.remove(name)
                popped.append(name)
                children = [other for other in kept if other[:-1] == name]
                must_hold(not children, f"popped {name!r} before its children {children}")
        return popped
