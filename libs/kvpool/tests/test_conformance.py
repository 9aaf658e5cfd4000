"""The suites pass for what is shipped, and fail for what breaks a rule."""

from collections import OrderedDict

import pytest

from openinfer.kvpool import Group, Lease, Lineage, Lru, Pool, Priority, S3Fifo
from openinfer.kvpool.testing import EvictionSuite, PoolSuite


class TestPool(PoolSuite):
    def make_pool(self, groups):
        return Pool(groups)


class TestPoolWithS3Fifo(PoolSuite):
    def make_pool(self, groups):
        return Pool(groups, eviction="s3fifo", events=True)


class TestLru(EvictionSuite):
    def make_policy(self, group):
        return Lru(group)


class TestLineage(EvictionSuite):
    def make_policy(self, group):
        return Lineage(group)


class TestPriority(EvictionSuite):
    def make_policy(self, group):
        return Priority(group)


class TestS3Fifo(EvictionSuite):
    def make_policy(self, group):
        return S3Fifo(group)


class ParentsFirst(Lru):
    """Evicts what was released last, which is the head of a table."""

    def pop(self):
        return self._order.popitem()[0]


class IgnoresUse(Lru):
    """Keeps what is in use."""

    def use(self, name):
        pass


class Forgets(Lru):
    """Loses every fifth name."""

    def add(self, name, parent, priority):
        self.count = getattr(self, "count", 0) + 1
        if self.count % 5:
            super().add(name, parent, priority)

    def use(self, name):
        self._order.pop(name, None)


class HeadOfTheOldest(Lineage):
    """Believes that every name is a leaf."""

    def add(self, name, parent, priority):
        super().add(name, parent, priority)
        self._queue[name] = None
        self._queue.move_to_end(name, last=False)


class PriorityBeforeLineage:
    """Sorts by priority alone, so that a child may outrank its parent."""

    def __init__(self, group):
        self._priority = OrderedDict()

    def add(self, name, parent, priority):
        self._priority[name] = priority

    def use(self, name):
        del self._priority[name]

    def pop(self):
        name = min(self._priority, key=self._priority.get)
        del self._priority[name]
        return name

    def __len__(self):
        return len(self._priority)

    def __iter__(self):
        return iter(self._priority)


def failures(suite):
    """Names of the rules that a suite finds broken."""
    broken = []
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:
                broken.append(name)
    return broken


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "policy", [ParentsFirst, IgnoresUse, Forgets, HeadOfTheOldest, PriorityBeforeLineage]
)
def test_a_broken_policy_does_not_pass(policy):
    suite = EvictionSuite()
    suite.make_policy = policy
    assert failures(suite), policy.__doc__


class Altered(Pool):
    """Gives out leases of another class."""

    lease_type = Lease

    def acquire(self, tokens, salt=b"", hashes=None, *, priority=0):
        lease = super().acquire(tokens, salt, hashes, priority=priority)
        lease.__class__ = type("Altered", (self.lease_type,), {"__del__": lambda self: None})
        return lease


class NoSalt(Pool):
    """Shares between salts."""

    def acquire(self, tokens, salt=b"", hashes=None, *, priority=0):
        return super().acquire(tokens, b"", hashes, priority=priority)


class NothingLeft(Pool):
    """Caches the whole prompt."""

    def __init__(self, groups):
        super().__init__(groups)
        match = self._index.match
        self._index.match = lambda tokens, chain, limit: match(tokens, chain, len(tokens))


class CommitsAhead(Altered):
    """Finds what is not confirmed."""

    class lease_type(Lease):  # noqa: N801
        def commit(self, tokens, num_confirmed):
            super().commit(tokens, min(len(tokens), self.num_tokens))


class Leaks(Altered):
    """Keeps the last block of a lease."""

    class lease_type(Lease):  # noqa: N801
        def release(self):
            for part in self._parts:
                if part.table and not self._released:
                    part.table.pop()
            super().release()


class PartlyGrown(Altered):
    """A refused reserve takes what there is."""

    class lease_type(Lease):  # noqa: N801
        def reserve(self, *wanted):
            grown = super().reserve(*wanted)
            if grown is None and self._parts[0].ledger.num_free:
                self._parts[0].grow(1)
            return grown


class LendsInUse(Pool):
    """Counts shared blocks as free."""

    def acquire(self, tokens, salt=b"", hashes=None, *, priority=0):
        lease = super().acquire(tokens, salt, hashes, priority=priority)
        for group, ledger in enumerate(self._ledgers):
            ledger._free += lease.block_table(group)
        return lease


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("checked", [True, False], ids=["audited", "seen from outside"])
@pytest.mark.parametrize("pool_type", [NoSalt, NothingLeft, CommitsAhead, Leaks, PartlyGrown, LendsInUse])
def test_a_broken_pool_does_not_pass(pool_type, checked):
    suite = PoolSuite()
    # Without check_integrity, the memory and the counts have to show it.
    blind = type("Blind", (pool_type,), {} if checked else {"check_integrity": lambda self: None})
    suite.make_pool = blind
    assert failures(suite), pool_type.__doc__


def test_what_to_override_is_said():
    for make in (lambda: PoolSuite().make_pool([]), lambda: EvictionSuite().make_policy(Group("kv", 1, 2))):
        with pytest.raises(NotImplementedError, match="of your own"):
            make()
