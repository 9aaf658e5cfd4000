"""scheduler.StepLoop over kvpool.Pool: two libraries that do not know each other, under generated schedules."""

import math
from collections import Counter

import pytest

from openinfer.kvpool import Group, Lease, Pool, hash_blocks
from openinfer.scheduler import (
    Finished,
    FinishReason,
    FirstCome,
    Rejected,
    Scheduled,
    Seq,
    StepLoop,
    StepResult,
    Tokens,
)
from openinfer.scheduler.testing import DeviceFault, Mismatch, Schedule, TierPiece


class TierLoader:
    """A Loader of the pool over the FakeTier of the scheduler: it knows by name what the tier knows by its tokens."""

    def __init__(self, tier, groups):
        self.tier, self.loads = tier, {}
        unit = math.gcd(*(group.block_size for group in groups))
        self.tokens = {
            name: tokens[: (index + 1) * unit]
            for tokens in tier.sequences
            for index, name in enumerate(hash_blocks(tokens, unit))
        }

    def holds(self, group, names):
        return [name in self.tokens for name in names]

    def expect(self, group, names):
        """The tier keeps everything."""

    def begin(self, load):
        pieces = [TierPiece(group, block, self.tokens[name]) for group, name, block in load.pieces]
        self.loads[self.tier.begin(pieces)] = load

    def poll(self, wait_s):
        ended = []
        for told in self.tier.poll(wait_s):
            load = self.loads.pop(told)
            load.failed |= {
                ours for ours, theirs in zip(load.pieces, told.pieces, strict=True) if theirs in told.failed
            }
            ended.append(load)
        return ended


class Pools:
    """Makes the pools of many schedules, and checks and sums up what they did."""

    def __init__(self, pool_type=Pool):
        self.pool_type = pool_type
        self.seen = Counter()

    def __call__(self, groups, tier):
        groups = [
            Group(f"group {i}", size, count, window=window) for i, (size, count, window) in enumerate(groups)
        ]
        self.pool = self.pool_type(groups, loader=TierLoader(tier, groups))
        return self.pool

    def check(self, loop):
        loop.check()
        self.pool.check_integrity()

    def play(self, seeds):
        for seed in seeds:
            schedule = Schedule.generate(seed)
            try:
                loop = schedule.play(self, after_step=self.check)
            except Exception as error:
                error.add_note(f"in {schedule}")
                raise
            stats = self.pool.stats
            self.seen.update(
                evicted=stats.evicted, hit_tokens=stats.hit_tokens, preemptions=loop.stats.preemptions,
                loaded=stats.loaded, failed=stats.failed,
            )  # fmt: skip
        return self.seen


def test_the_loop_over_the_pool_yields_what_each_request_yields_alone():
    seen = Pools().play(range(120))
    assert min(seen.values()) > 50, seen


@pytest.mark.slow
def test_many_more_schedules():
    Pools().play(range(20_000, 26_000))


MILLION = 1_000_000
PAGE, WINDOW, CHUNK = 128, 127, 2048


class Tables:
    """A runner that computes nothing. It checks that a step's tokens have pages to be written to, and those that their
    windows reach, each once; and ends rows by their length."""

    def __init__(self, pool):
        self.pool, self.tables, self.most, self.launched = pool, {}, 0, []

    def launch(self, step):
        for write in step.blocks:
            table = self.tables.setdefault((write.seq, write.group), [])
            assert write.first == len(table)
            table.extend(write.blocks)
        for row in step.rows:
            start = row.seq.bound - row.num_tokens if row.start is None else row.start
            for group, first in ((0, max(0, start - WINDOW) // PAGE), (1, 0)):
                pages = self.tables[row.seq, group][first : -(-(start + row.num_tokens) // PAGE)]
                assert len(set(pages)) == -(-(start + row.num_tokens) // PAGE) - first
                assert 0 not in pages
        self.most = max(self.most, self.pool.num_used(0))
        self.launched.append(step)

    def collect(self, wait_s):
        step = self.launched.pop(0)
        ended = [
            (row.seq.slot, FinishReason.LENGTH)
            for row in step.rows
            if row.emits and row.seq.num_output + 1 == row.seq.max_tokens
        ]
        return StepResult(step.index, ended)


def serve(num_tokens, window_pages, others=0, **options):
    """A long prompt, and short ones beside it, through a pool shaped as DeepSeek-V4's. Returns the most
    pages that the window group had in use, and the loop."""
    pool = Pool(
        [Group("window", PAGE, 1 + window_pages, window=WINDOW), Group("entries", PAGE, 8200)], **options
    )
    runner = Tables(pool)
    loop = StepLoop(runner, pool, FirstCome(CHUNK), max_rows=8, max_model_len=1 << 20)
    seqs = [Seq(0, list(range(num_tokens)), 4)]
    seqs += [Seq(number, [number] * 300, 200) for number in range(1, 1 + others)]
    for seq in seqs:
        loop.submit(seq)
    admitted, finished, turns = [], [], 0
    while loop.has_work and turns < 3000:
        turns += 1
        for event in loop.step(None):
            match event:
                case Tokens():
                    for _, seq in event.emitting():
                        seq.tokens.append(7)
                case Scheduled(seq):
                    admitted.append(seq)
                case Finished(seq):
                    finished.append(seq)
        if turns % 50 == 0:
            loop.check()
            pool.check_integrity()
    assert len(admitted) == len(finished) == len(seqs), (
        f"{len(admitted)} were admitted, {len(finished)} ended"
    )
    assert len({*finished}) == len(seqs)
    assert pool.num_free == pool.num_total
    return runner.most, loop


@pytest.mark.parametrize(
    ("num_tokens", "window_pages", "most"),
    [(MILLION, 60, 2 * CHUNK // PAGE + 2), (MILLION, 6, 6), (MILLION // 10, 2, 2)],
)
def test_a_million_tokens_pass_through_a_window_of_a_few_pages(num_tokens, window_pages, most):
    found, loop = serve(num_tokens, window_pages, prefix_cache=False)
    assert found <= most
    assert loop.stats.preemptions == 0
    assert loop.stats.prefill_tokens == num_tokens


def test_a_million_tokens_beside_others_that_share_the_window_group():
    found, loop = serve(MILLION, 24, others=20)
    assert 2 * 8 < found <= 24
    assert loop.stats.prefill_tokens < 1.1 * MILLION  # nothing to speak of was computed twice


def test_asked_for_all_its_pages_the_window_group_would_never_hold_a_million_tokens(monkeypatch):
    """Negative control: reservations as they were, the same in every group."""
    reserve = Lease.reserve

    def everywhere(self, num_tokens, kept_tokens=0, leave=0.0):
        return reserve(self, max(num_tokens, kept_tokens), 0, leave)

    monkeypatch.setattr(Lease, "reserve", everywhere)
    with pytest.raises(AssertionError, match="0 were admitted"):
        serve(MILLION, 60, prefix_cache=False)


def test_what_does_not_fit_the_entries_is_refused_with_what_would_help():
    pool = Pool([Group("window", PAGE, 7, window=WINDOW), Group("entries", PAGE, 1001)])
    loop = StepLoop(Tables(pool), pool, FirstCome(CHUNK), max_rows=8, max_model_len=1 << 20)
    with pytest.raises(Rejected, match="the pool holds 128000 of one sequence; shorten the prompt or"):
        loop.submit(Seq(0, [1] * 128_001, 10))
    loop.submit(Seq(1, [1] * 127_000, 10))


class Careless(Lease):
    """Says nothing when it is dropped: a schedule that fails leaves its leases behind."""

    def __del__(self):
        pass


class CommitsAhead(Careless):
    """Registers one token more than is confirmed."""

    def commit(self, tokens, num_confirmed):
        super().commit(tokens, min(num_confirmed + 1, len(tokens), self.num_tokens))


class Ahead(Pool):
    """Gives out leases that commit ahead."""

    def acquire(self, tokens, salt=b"", hashes=None):
        lease = super().acquire(tokens, salt, hashes)
        lease.__class__ = CommitsAhead
        return lease


class EvictsInUse(Pool):
    """Counts shared blocks as free."""

    def acquire(self, tokens, salt=b"", hashes=None):
        lease = super().acquire(tokens, salt, hashes)
        lease.__class__ = Careless
        for group, ledger in enumerate(self._ledgers):
            ledger._free += lease.block_table(group)
        return lease


@pytest.mark.parametrize("broken", [EvictsInUse, Ahead])
def test_a_broken_pool_does_not_pass(broken):
    pools = Pools(broken)
    caught = Counter()
    for seed in range(60):
        try:
            # Without the checks, so that it is the device or the oracle that notices.
            Schedule.generate(seed).play(pools, after_step=lambda loop: None)
        except (DeviceFault, Mismatch) as error:
            caught[type(error)] += 1
        except Exception:  # the pool itself stumbles
            pass
    assert caught.total() >= 3, caught
