"""Long random histories against a model that keeps whole prefixes instead of hashes, lists instead of indices.

The model predicts every hit, every refusal and every eviction exactly. Beside it a simulated memory shows that nobody
writes to a block that another lease reads. check_integrity() runs after each operation.
"""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openinfer.kvpool import Group, IntegrityError, Pool


class Sequence:
    """What the model knows of a live lease."""

    def __init__(self, lease, salt, tokens):
        self.lease, self.salt, self.tokens = lease, salt, tokens
        self.written = lease.num_cached
        self.committed = [lease.num_cached, lease.num_cached]  # tokens in named blocks, by group

    def name(self, end):
        return self.salt, tuple(self.tokens[:end])


class Model:
    """A pool, its model and its memory. Each method does one operation on all three, and compares."""

    def __init__(self, groups, pool_type=Pool):
        self.groups = groups
        self.pool = pool_type(groups)
        self.hit_size = math.lcm(*(group.block_size for group in groups))
        self.live = []
        self.cached = [[] for _ in groups]  # names, the next to be evicted first
        self.memory = [{} for _ in groups]  # block -> the names written to it

    def held(self, group):
        """Names of blocks that a lease holds and has committed."""
        size = self.groups[group].block_size
        return {seq.name(end) for seq in self.live for end in range(size, seq.committed[group] + 1, size)}

    def in_use(self, group):
        return {block for seq in self.live for block in seq.lease.block_table(group)}

    def num_free(self, group):
        return self.groups[group].num_blocks - 1 - len(self.in_use(group))

    def acquire(self, tokens, salt):
        probe = Sequence(_NoLease, salt, tokens)
        findable = [set(self.cached[group]) | self.held(group) for group in range(len(self.groups))]
        expected = 0
        for end in range(self.hit_size, len(tokens), self.hit_size):
            wanted = [
                (group, probe.name(stop))
                for group, spec in enumerate(self.groups)
                for stop in range(spec.block_size, end + 1, spec.block_size)
            ]
            if all(name in findable[group] for group, name in wanted):
                expected = end
        lease = self.pool.acquire(tokens, salt)
        seq = Sequence(lease, salt, list(tokens))
        self.live.append(seq)
        assert lease.num_cached == expected
        for group in range(len(self.groups)):
            held = self.held(group)
            self.cached[group] = [name for name in self.cached[group] if name not in held]
        self.check_memory(seq)

    def reserve(self, seq, num_tokens):
        wanted = [
            max(0, math.ceil(num_tokens / spec.block_size) - len(seq.lease.block_table(group)))
            for group, spec in enumerate(self.groups)
        ]
        room = [self.num_free(group) for group in range(len(self.groups))]
        before = [self.in_use(group) for group in range(len(self.groups))]
        tables = [list(seq.lease.block_table(group)) for group in range(len(self.groups))]
        grown = seq.lease.reserve(num_tokens)
        if any(count > free for count, free in zip(wanted, room, strict=True)):
            assert grown is None
            assert tables == [list(seq.lease.block_table(group)) for group in range(len(self.groups))]
            return
        assert grown is not None
        assert {group for group, _, _ in grown} == {group for group, count in enumerate(wanted) if count}
        for group, first, blocks in grown:
            assert (first, len(blocks)) == (len(tables[group]), wanted[group])
            assert list(seq.lease.block_table(group)) == tables[group] + blocks
            assert len(set(blocks) | before[group] | {0}) == len(blocks) + len(before[group]) + 1
            for block in blocks:
                self.memory[group][block] = []
            spare = room[group] - len(self.cached[group])
            del self.cached[group][: max(0, len(blocks) - spare)]

    def write(self, seq, num_tokens):
        """Compute the next tokens, extending the sequence when they go past its end."""
        end = min(seq.written + num_tokens, seq.lease.num_tokens)
        while len(seq.tokens) < end:
            seq.tokens.append(len(seq.tokens) % 2)
        for position in range(seq.written, end):
            for group, spec in enumerate(self.groups):
                block = seq.lease.block_table(group)[position // spec.block_size]
                assert len(self.memory[group][block]) == position % spec.block_size, "written by two"
                self.memory[group][block].append(seq.name(position + 1))
        seq.written = max(seq.written, end)

    def commit(self, seq):
        seq.lease.commit(seq.tokens, seq.written)
        for group, spec in enumerate(self.groups):
            seq.committed[group] = max(seq.committed[group], seq.written // spec.block_size * spec.block_size)
            held = self.held(group)
            self.cached[group] = [name for name in self.cached[group] if name not in held]

    def release(self, seq):
        seq.lease.release()
        self.live.remove(seq)
        for group, spec in enumerate(self.groups):
            held = self.held(group)
            ends = range(spec.block_size, seq.committed[group] + 1, spec.block_size)
            self.cached[group] += [name for end in reversed(ends) if (name := seq.name(end)) not in held]

    def reset(self):
        idle = not any(self.in_use(group) for group in range(len(self.groups)))
        assert self.pool.reset_prefix_cache() is idle
        if idle:
            self.cached = [[] for _ in self.groups]

    def check_memory(self, seq):
        for position in range(seq.written):
            for group, spec in enumerate(self.groups):
                block = seq.lease.block_table(group)[position // spec.block_size]
                assert self.memory[group][block][position % spec.block_size] == seq.name(position + 1)

    def check(self):
        self.pool.check_integrity()
        assert self.pool.num_free == sum(self.num_free(group) for group in range(len(self.groups)))
        for seq in self.live:
            self.check_memory(seq)

    def close(self):
        for seq in list(self.live):
            self.release(seq)
            self.check()
        assert self.pool.num_free == self.pool.num_total


class _NoLease:
    num_cached = 0


SHAPES = [
    [Group("kv", 2, 12)],
    [Group("kv", 1, 16)],
    [Group("kv", 3, 40)],
    [Group("fine", 2, 20), Group("coarse", 4, 9)],
    [Group("a", 2, 30), Group("b", 3, 14)],
]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class Histories(RuleBasedStateMachine):
    """The same operations, chosen (and shrunk) by hypothesis."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape):
        self.model = Model(shape)

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"x"]))
    def acquire(self, tokens, salt):
        self.model.acquire(tokens, salt)

    @precondition(lambda self: self.model.live)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 20))
    def reserve(self, pick, count):
        self.model.reserve(self.model.live[pick % len(self.model.live)], count)

    @precondition(lambda self: self.model.live)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 20), commit=st.booleans())
    def write(self, pick, count, commit):
        seq = self.model.live[pick % len(self.model.live)]
        self.model.write(seq, count)
        if commit:
            self.model.commit(seq)

    @precondition(lambda self: self.model.live)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        self.model.release(self.model.live[pick % len(self.model.live)])

    @rule()
    def reset(self):
        self.model.reset()

    @invariant()
    def consistent(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.close()


Histories.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
TestHistories = Histories.TestCase


def run(model, seed, operations):
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 1) for _ in range(16)] for _ in range(3)]
    for _ in range(operations):
        choice = rng.random()
        if choice < 0.25 and len(model.live) < 6:
            tokens = [*rng.choice(prompts)[: rng.randint(0, 16)], rng.randint(0, 1)]
            model.acquire(tokens, rng.choice([b"", b"", b"x"]))
        elif choice < 0.29:
            model.reset()
        elif not model.live:
            continue
        else:
            seq = rng.choice(model.live)
            if choice < 0.55:
                model.reserve(seq, rng.randint(1, 20))
            elif choice < 0.85:
                model.write(seq, rng.randint(1, 8))
                if rng.random() < 0.7:
                    model.commit(seq)
            else:
                model.release(seq)
        model.check()
    model.close()
    return model.pool.stats


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "+".join(f"{g.block_size}x{g.num_blocks}" for g in shape)
)
def test_a_long_history(shape):
    stats = run(Model(shape), seed=1, operations=2000)
    assert min(stats.evicted, stats.hit_tokens, stats.registered) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_very_many_histories(seed):
    run(Model(SHAPES[seed % len(SHAPES)]), seed, 4000)


# Negative controls: each breaks one rule, and the histories must notice.


class HeadFirst(Pool):
    """Queues a table's head before its tail, so that parents are evicted first."""

    def acquire(self, tokens, salt=b"", hashes=None):
        for ledger in self._ledgers:
            ledger.release = lambda blocks, priority, ledger=ledger: type(ledger).release(
                ledger, reversed(list(blocks)), priority
            )
        return super().acquire(tokens, salt, hashes)


class NoSalt(Pool):
    """Shares between salts."""

    def acquire(self, tokens, salt=b"", hashes=None):
        return super().acquire(tokens, b"", hashes)


class TakesTheNewest(Pool):
    """Evicts from the wrong end."""

    def acquire(self, tokens, salt=b"", hashes=None):
        for ledger in self._ledgers:
            for name in reversed(list(ledger._policy)):
                ledger._policy._order.move_to_end(name)
        return super().acquire(tokens, salt, hashes)


class ForgetsHeirs(Pool):
    """Lets a registration lapse though a duplicate is in use."""

    def acquire(self, tokens, salt=b"", hashes=None):
        for ledger in self._ledgers:
            ledger._is_last = lambda name, block, ledger=ledger: ledger._index.pop(name, None) is None
        return super().acquire(tokens, salt, hashes)


@pytest.mark.parametrize("broken", [HeadFirst, NoSalt, TakesTheNewest, ForgetsHeirs])
def test_a_broken_pool_does_not_pass(broken):
    model = Model(SHAPES[2], broken)
    with pytest.raises((AssertionError, IntegrityError)):
        run(model, seed=1, operations=2000)
    for seq in model.live:
        seq.lease._released = True  # the books are beyond repair
