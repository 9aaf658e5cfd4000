"""scheduler.StepLoop over kvpool.Pool: two libraries that do not know each other, under generated schedules."""

from collections import Counter

import pytest

from openinfer.kvpool import Group, Lease, Pool
from openinfer.scheduler.testing import DeviceFault, Mismatch, Schedule


class Pools:
    """Makes the pools of many schedules, and checks and sums up what they did."""

    def __init__(self, pool_type=Pool):
        self.pool_type = pool_type
        self.seen = Counter()

    def __call__(self, groups):
        self.pool = self.pool_type(
            [Group(f"group {i}", size, count) for i, (size, count) in enumerate(groups)]
        )
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
                evicted=stats.evicted, hit_tokens=stats.hit_tokens, preemptions=loop.stats.preemptions
            )
        return self.seen


def test_the_loop_over_the_pool_yields_what_each_request_yields_alone():
    seen = Pools().play(range(200))
    assert min(seen.values()) > 50, seen


@pytest.mark.slow
def test_many_more_schedules():
    Pools().play(range(20_000, 26_000))


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
