"""check_integrity() notices books that were tampered with."""

import pytest

from openinfer.kvpool import Group, IntegrityError, Pool


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
    states = [pool.block_state(block).name for block in range(9)]
    assert states == ["PADDING", "CACHED", "CACHED", "SHARED", "DUPLICATE", "PRIVATE", "FREE", "FREE", "FREE"]
    yield pool, pool._ledgers[0]
    first._released = second._released = True  # the books are beyond repair


TAMPERINGS = {
    "block 3 .SHARED.: counts 2 users, 1 are known": lambda ledger: ledger._users.__setitem__(3, 2),
    "block 5 .FREE.: counts 0 users, 1 are known": lambda ledger: ledger._users.__setitem__(5, 0),
    "padding is in use": lambda ledger: ledger._users.__setitem__(0, 1),
    "is named, but not in the index": lambda ledger: ledger._name.__setitem__(6, b"x"),
    "the index has names that no block has": lambda ledger: ledger._index.__setitem__(b"x", 6),
    "equals block 3, but is not listed as its duplicate": lambda ledger: ledger._duplicates.clear(),
    "it or block 3, which it equals, is not in use": lambda ledger: ledger._users.__setitem__(3, 0),
    "listed as a duplicate of itself": lambda ledger: ledger._duplicates[ledger._name[3]].update({3: None}),
    r"listed as FREE \[6, 6, 7, 8\]": lambda ledger: ledger._free.append(6),
    "policy keeps 1 names, not the 2 that are CACHED": lambda ledger: ledger._policy.pop(),
    r"block 2 .CACHED.: outlived its parent": lambda ledger: ledger._index.pop(ledger._name[1]),
    r"in use, its parent .block 1. is not": lambda ledger: ledger._parent.__setitem__(3, ledger._name[1]),
}


@pytest.mark.parametrize("complaint", TAMPERINGS)
def test_each_contradiction_is_named(setting, complaint):
    pool, ledger = setting
    TAMPERINGS[complaint](ledger)
    with pytest.raises(IntegrityError, match=complaint) as caught:
        pool.check_integrity()
    assert caught.value.problems
