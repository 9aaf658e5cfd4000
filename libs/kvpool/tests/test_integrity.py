"""check_integrity() notices books that were tampered with."""

import pytest

from openinfer.kvpool import BlockState, Group, IntegrityError, Pool


@pytest.fixture
def setting():
    """A pool with blocks in every state: 1, 2 cached (2 a child of 1), 3 shared, 4 a duplicate of it, 5 private."""
    pool = Pool([Group("kv", 2, 9)])
    cached, first, second = (pool.acquire(tokens) for tokens in ([1] * 4, [2] * 2, [2] * 2))
    cached.reserve(4)
    cached.commit([1] * 4, 4)
    cached.release()
    for lease in (first, second):
        lease.reserve(2)
    first.commit([2] * 2, 2)
    second.commit([2] * 2, 2)
    second.reserve(4)
    pool.check_integrity()
    states = [state.name for state in pool._ledgers[0]._state]
    assert states == ["PADDING", "CACHED", "CACHED", "SHARED", "DUPLICATE", "PRIVATE", "FREE", "FREE", "FREE"]
    yield pool, pool._ledgers[0]
    first._released = second._released = True  # the books are beyond repair


TAMPERINGS = {
    "block 3 .SHARED.: counts 2 users, 1 leases": lambda ledger: ledger._users.__setitem__(3, 2),
    "block 5 .CACHED.: has 1 users": lambda ledger: ledger._state.__setitem__(5, BlockState.CACHED),
    "only block 0 is padding": lambda ledger: ledger._state.__setitem__(0, BlockState.FREE),
    "has the name": lambda ledger: ledger._name.__setitem__(6, b"x"),
    "and the index disagree": lambda ledger: ledger._index.clear(),
    "list of duplicates disagree": lambda ledger: ledger._duplicates.clear(),
    "same content is not in use": lambda ledger: ledger._users.__setitem__(3, 0),
    "listed as FREE": lambda ledger: ledger._free.append(6),
    "listed as CACHED": lambda ledger: ledger._cached.popitem(),
    r"cached block 2 would outlive its parent \(block 1\)": lambda ledger: ledger._cached.move_to_end(2),
}


@pytest.mark.parametrize("complaint", TAMPERINGS)
def test_each_contradiction_is_named(setting, complaint):
    pool, ledger = setting
    TAMPERINGS[complaint](ledger)
    with pytest.raises(IntegrityError, match=complaint) as caught:
        pool.check_integrity()
    assert caught.value.problems
