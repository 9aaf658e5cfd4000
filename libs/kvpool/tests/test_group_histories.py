"""Long random histories of pools with windows, snapshots, compressed pages, holds and events.

The memory of testing.History shows whether what is called cached is there. Here it is also checked that everything
that could be found is found, and that events, replayed, give exactly what can be found.
"""

import math
from collections import Counter

import pytest

from openinfer.kvpool import AllBlocksCleared, BlockStored, Group, Lease, Pool, hash_blocks
from openinfer.kvpool.parts import Pages, Snapshots
from openinfer.kvpool.testing import Broken, History

POOLS = {
    "pages": ([Group("kv", 2, 14)], {}),
    "window": ([Group("full", 2, 30), Group("window", 2, 16, window=5)], {}),
    "windows of two sizes": ([Group("a", 4, 14, window=4), Group("b", 2, 24, window=9)], {}),
    "hybrid": ([Group("kv", 2, 24), Group("state", 4, 9, snapshots=True)], {}),
    "states only": ([Group("state", 3, 9, snapshots=True)], {}),
    "compressed, window and states": (
        [
            Group("by 4", 8, 12),
            Group("window", 2, 30, window=6),
            Group("kv", 4, 20),
            Group("state", 4, 10, snapshots=True),
            Group("conv", 2, 12, snapshots=True),
        ],
        {},
    ),
    "a window of few blocks": ([Group("full", 2, 40), Group("window", 2, 10, window=5)], {}),
    "only a window": ([Group("window", 3, 12, window=7)], {}),
    "few states": ([Group("kv", 2, 24), Group("state", 4, 4, snapshots=True)], {}),
}
POLICIES = ["lru", "s3fifo", "lineage", "priority"]


class Audited(History):
    """A history in which the events are replayed, and each hit is compared with the definition of one."""

    def __init__(self, groups, seed, **options):
        super().__init__(Pool(groups, events=True, **options), groups, seed, holds=True)
        self.index = [{} for _ in groups]  # name -> parent, by what the events told
        self.num_chunks = 0  # reserved, while the rest of the sequence has no room in a window yet

    def acquire(self, tokens=None):
        count = len(self.live)
        super().acquire(tokens)
        if len(self.live) > count:
            seq = self.live[-1]
            assert seq.lease.num_cached == self.longest_hit(seq.tokens, seq.salt)

    def reserve_for(self, seq, num_tokens, kept_tokens, leave):
        """Refused exactly if a group has too few blocks for what it is asked for, and grown by just that."""
        lease = seq.lease
        wanted, lacking = [], False
        for index, group in enumerate(self.groups):
            held, room = len(lease.block_table(index)), group.num_blocks - 1 - self.pool.num_used(index)
            if group.snapshots:
                count = int(not held)
            else:
                end = max(num_tokens, kept_tokens if group.window is None else 0)
                count = max(0, math.ceil(end / group.block_size) - held)
                room -= math.ceil(leave * (group.num_blocks - 1))
            source = lease._parts[index].source if group.snapshots and not held else 0
            if source and self.pool._ledgers[index]._users[source] == 1:
                room += 1  # it is taken over where there is no room for a copy
            wanted.append(held + count)
            lacking |= count > max(0, room)
        if num_tokens <= lease.num_tokens and kept_tokens <= lease.num_tokens:
            wanted, lacking = [len(lease.block_table(index)) for index in range(len(self.groups))], False
        assert super().reserve_for(seq, num_tokens, kept_tokens, leave) is not lacking
        if not lacking:
            assert [len(lease.block_table(index)) for index in range(len(self.groups))] == wanted
        self.num_chunks += not lacking and kept_tokens > lease.num_tokens

    def longest_hit(self, tokens, salt):
        pool = self.pool
        names = hash_blocks(tokens, pool.hash_block_size, salt)
        for end in range((len(tokens) - 1) // pool.boundary_size, 0, -1):
            end *= pool.boundary_size
            if all(
                names[stop // pool.hash_block_size - 1] in self.index[index]
                for index, group in enumerate(self.groups)
                for stop in (
                    [end]
                    if group.snapshots
                    else range(group.block_size, end + 1, group.block_size)
                    if group.window is None
                    else range(
                        max(0, end - group.window) // group.block_size * group.block_size + group.block_size,
                        end + 1,
                        group.block_size,
                    )
                )
            ):
                return end
        return 0

    def check(self):
        super().check()
        batch = self.pool.take_events()
        for event in batch.events if batch else ():
            if isinstance(event, AllBlocksCleared):
                self.index = [{} for _ in self.groups]
                continue
            index = self.index[event.group_idx]
            if not isinstance(event, BlockStored):
                for name in event.block_hashes:
                    del index[name]
                continue
            group = self.groups[event.group_idx]
            assert len(event.token_ids) == (
                0 if group.snapshots else event.block_size * len(event.block_hashes)
            )
            parent = event.parent_block_hash
            for name in event.block_hashes:
                assert name not in index
                if group.window is None and parent is not None:
                    assert parent in index, "a child was stored before its parent"
                index[name] = parent
                parent = name
        for index, ledger in zip(self.index, self.pool._ledgers, strict=True):
            assert index.keys() == ledger._index.keys()


def play(kind, seed, operations, policy):
    groups, options = POOLS[kind]
    history = Audited(groups, seed, eviction=policy, **options)
    history.run(operations)
    return history


@pytest.mark.parametrize("operations", [500, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", POOLS)
def test_a_history(kind, operations):
    seen = Counter()
    for seed, policy in enumerate(POLICIES):
        history = play(kind, seed, operations, policy)
        stats = history.pool.stats
        seen.update(
            hits=history.num_hits, dry=history.num_dry, holds=history.num_holds, evicted=stats.evicted
        )
        seen.update(copies=history.num_copies, chunks=history.num_chunks)
    groups, options = POOLS[kind]
    if all(group.window is None for group in groups):
        assert seen.pop("chunks") == 0
    if not options and not any(group.snapshots for group in groups):
        assert seen.pop("copies") == 0
    assert min(seen.values()) > 1, seen


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", POOLS)
def test_many_histories(kind, policy):
    for seed in range(100, 130):  # 9 kinds * 4 policies * 30 * 500: half a million operations
        play(kind, seed, 500, policy)


# Negative controls


def test_a_window_that_is_cut_too_short_is_noticed(monkeypatch):
    commit = Lease.commit

    def cut(self, tokens, num_confirmed):
        for part in self._parts:
            part._window = part._window and part._window - 2
        commit(self, tokens, num_confirmed)

    monkeypatch.setattr(Lease, "commit", cut)
    with pytest.raises((Broken, AssertionError)):
        play("window", 0, 300, "lru")


def test_room_that_is_promised_and_not_given_is_noticed(monkeypatch):
    monkeypatch.setattr(Pages, "missing", lambda self, num_tokens, kept_tokens, missing=Pages.missing: missing(
        self, num_tokens, 0
    ))  # fmt: skip
    with pytest.raises((Broken, AssertionError)):
        play("window", 0, 300, "lru")


def test_a_source_that_is_not_kept_is_noticed(monkeypatch):
    reserve = Lease.reserve

    def drop(self, *args):
        grown = reserve(self, *args)
        for part in self._parts:
            if isinstance(part, Snapshots) and part.table:
                part.drop_source()
        return grown

    monkeypatch.setattr(Lease, "reserve", drop)
    with pytest.raises(Broken):
        play("few states", 3, 20_000, "lru")  # it takes a snapshot that is evicted just then


def test_a_hold_that_does_not_hold_is_noticed():
    history = Audited(*POOLS["pages"][:1], seed=3)
    history.pool.hold = lambda blocks, group: type("Nothing", (), {"release": lambda self: None})()
    with pytest.raises(Broken, match="changed while it was held"):
        history.run(2000)
