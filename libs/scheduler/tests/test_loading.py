"""Sequences whose blocks come from elsewhere, case by case. What generated schedules find is in test_schedules.py."""

from collections import deque

import pytest

from openinfer.scheduler import (
    ContractError,
    Finished,
    FinishReason,
    FirstCome,
    Scheduled,
    Seq,
    SeqState,
    StepLoop,
    StepResult,
    Tokens,
)
from openinfer.scheduler.testing import FakeRunner, FakeTier, SimplePool

LONG = [1] * 12


class ScriptedRunner:
    def __init__(self):
        self.steps, self.results = [], deque()

    def launch(self, step):
        self.steps.append(step)

    def collect(self, wait_s):
        return self.results.popleft() if self.results else None

    def done(self, index, *finished):
        self.results.append(StepResult(index, finished))


def make(stored, *, delay=3, blocks=40, max_rows=2, fails=False, max_model_len=64):
    """A loop over a pool of blocks of 4 tokens, and a tier that has the blocks of `stored`."""
    tier = FakeTier(FakeRunner([4]), stored, delay=lambda: delay, fails=lambda: fails)
    runner, pool = ScriptedRunner(), SimplePool([(4, blocks)], tier)
    loop = StepLoop(runner, pool, FirstCome(32), max_rows=max_rows, max_model_len=max_model_len)
    return loop, runner, pool, tier


def turn(loop, wait_s=0.0):
    events = loop.step(wait_s)
    for event in events:
        if isinstance(event, Tokens):
            for _, seq in event.emitting():
                seq.tokens.append(7)
    loop.check()
    return events


def shapes(runner):
    return [[(row.seq.id, row.num_tokens) for row in step.rows] for step in runner.steps]


def test_a_sequence_that_loads_has_no_row_and_others_run_meanwhile():
    loop, runner, _, _ = make([LONG], delay=2)  # polled in each turn: the third brings it
    loading, other = Seq(1, [*LONG, 5], 4), Seq(2, [2] * 6, 4)
    loop.submit(loading)
    loop.submit(other)
    assert turn(loop) == [Scheduled(other, 0)]
    assert (loading.state, loading.slot, loop.stats.waiting, loop.stats.loading) == (
        SeqState.LOADING,
        0,
        1,
        1,
    )
    for index in (1, 2):
        turn(loop)
        runner.done(index)
        assert loading.state is SeqState.LOADING
    assert Scheduled(loading, 12) in turn(loop)
    assert shapes(runner) == [[(2, 6)], [(2, 1)], [(2, 1), (1, 1)]]
    assert (loop.stats.waiting, loop.stats.loading, loop.stats.loads) == (0, 0, 1)


def test_a_loaded_sequence_reports_what_has_come_as_cached():
    loop, runner, _, _ = make([LONG], delay=0)
    seq = Seq(1, [*LONG, 5, 6], 4)
    loop.submit(seq)
    assert turn(loop) == []
    assert turn(loop) == [Scheduled(seq, 12)]
    assert shapes(runner) == [[(1, 2)]]


def test_what_did_not_come_is_computed():
    loop, runner, _, tier = make([LONG], delay=0, fails=True)
    seq = Seq(1, [*LONG, 5, 6], 4)
    loop.submit(seq)
    turn(loop)
    assert turn(loop) == [Scheduled(seq, 0)]
    assert (shapes(runner), tier.num_failed) == ([[(1, 14)]], 3)


def test_an_idle_loop_waits_for_the_load():
    loop, _, _, tier = make([LONG], delay=1000)
    loop.submit(Seq(1, [*LONG, 5], 4))
    turn(loop)
    assert tier.loads
    assert turn(loop, None) == []  # as long as it takes: no limit
    assert not tier.loads
    assert len(turn(loop)) == 1


def test_an_abort_ends_a_sequence_at_once_and_its_blocks_come_back_when_the_load_ends():
    loop, _, pool, tier = make([LONG], delay=100)
    seq = Seq(1, [*LONG, 5], 4)
    loop.submit(seq)
    turn(loop)
    assert loop.abort(1)
    assert turn(loop) == [Finished(seq, FinishReason.ABORT)]
    assert (loop.live, loop.stats.loading, loop.stats.waiting) == ([], 0, 0)
    assert pool.num_free == pool.num_total - 3
    assert loop.has_work  # the loop gets the blocks back before it is idle
    assert turn(loop, None) == []
    assert (loop.has_work, tier.loads, pool.num_free) == (False, [], pool.num_total)


def test_an_abort_of_a_sequence_whose_load_has_ended_gives_its_blocks_back():
    loop, runner, pool, _ = make([LONG], delay=2, max_rows=1)
    loop.submit(Seq(1, [*LONG, 5], 40))
    loop.submit(Seq(2, [2] * 4, 40))
    turn(loop)
    turn(loop)  # the first loads, the second takes the only row
    for index in range(1, 4):
        runner.done(index)
        turn(loop)
    assert loop.live[0].state is SeqState.WAITING
    assert loop.live[0].lease.num_cached == 12
    used = pool.num_total - pool.num_free
    loop.abort(1)
    turn(loop)
    assert pool.num_total - pool.num_free == used - 3


def test_no_more_sequences_load_than_rows_are_free():
    loop, _, _, tier = make([LONG, [2] * 12, [3] * 12], delay=9, max_rows=2)
    for number in (1, 2, 3):
        loop.submit(Seq(number, [number] * 13, 4))
    for _ in range(3):
        turn(loop)
    assert (len(tier.loads), loop.stats.loading, loop.stats.waiting) == (2, 2, 3)


def test_a_row_that_needs_blocks_gets_those_that_were_loaded_for_a_waiting_sequence():
    loop, runner, pool, _ = make([LONG], delay=2, blocks=1 + 5, max_rows=1, max_model_len=20)
    waiting, other = Seq(1, [*LONG, 5], 4), Seq(2, [2] * 7, 12)
    loop.submit(waiting)
    loop.submit(other)
    for index in range(1, 8):
        turn(loop)
        turn(loop)
        runner.done(index)
    assert (waiting.lease, waiting.state) == (None, SeqState.WAITING)
    assert (other.state, loop.stats.preemptions, loop.stats.loads) == (SeqState.DECODE, 0, 1)
    with_what_is_left = pool.acquire([*LONG, 5])
    assert with_what_is_left.num_cached + with_what_is_left.num_loadable == 12


def test_a_pool_that_names_another_lease_breaks_the_contract():
    loop, _, pool, _ = make([LONG])
    loop.submit(Seq(1, [*LONG, 5], 4))
    turn(loop)
    pool.poll = lambda wait_s: [pool.acquire([9])]
    with pytest.raises(ContractError, match="loads nothing"):
        loop.step()


def test_a_policy_may_name_a_sequence_that_loads_and_nothing_happens():
    class Stubborn(FirstCome):
        def plan(self, view):
            view.num_loading = 0
            return super().plan(view)

    loop, runner, _, tier = make([LONG], delay=9)
    loop._policy = Stubborn(32)
    loop.submit(Seq(1, [*LONG, 5], 4))
    for _ in range(3):
        turn(loop)
    assert (len(tier.loads), loop.stats.loads, runner.steps) == (1, 1, [])
