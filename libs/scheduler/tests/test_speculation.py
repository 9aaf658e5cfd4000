"""Rows with drafts, case by case. What generated schedules find is in test_schedules.py."""

from collections import deque

import pytest

from openinfer.scheduler import (
    ContractError,
    Finished,
    FinishReason,
    FirstCome,
    Seq,
    SeqState,
    StepLoop,
    StepResult,
    Tokens,
)
from openinfer.scheduler.testing import SimplePool


class ScriptedRunner:
    """Records steps; a test says how far each row advanced."""

    def __init__(self):
        self.steps, self.results = [], deque()

    def launch(self, step):
        self.steps.append(step)

    def collect(self, wait_s):
        return self.results.popleft() if self.results else None

    def done(self, index, *finished, **advanced):
        slots = {int(name[4:]): count for name, count in advanced.items()}
        self.results.append(StepResult(index, finished, None, slots or None))


class Wish:
    """As many drafts for every row as the test wants now."""

    rest_until = 0

    def __init__(self, count):
        self.count = count

    def num_drafts(self, view):
        return dict.fromkeys(view.decoding, self.count)


def make(wish, *, blocks=40, block_size=4, max_rows=2, max_model_len=64, budget=32, groups=None):
    runner = ScriptedRunner()
    pool = SimplePool(groups or [(block_size, blocks)])
    loop = StepLoop(
        runner, pool, FirstCome(budget), max_rows=max_rows, max_model_len=max_model_len, speculation=wish
    )
    return loop, runner, pool


def turn(loop):
    events = loop.step(0.0)
    for event in events:
        if isinstance(event, Tokens):
            for position, seq in event.emitting():
                seq.tokens.extend([7] * event.num_tokens(position))
    loop.check()
    return events


def shapes(runner):
    return [[row.num_tokens for row in step.rows] for step in runner.steps]


def test_the_bound_counts_every_draft_and_falls_with_what_a_step_reports():
    loop, runner, _ = make(Wish(3))
    seq = Seq(1, [1] * 6, 40)
    loop.submit(seq)
    turn(loop)  # the prompt
    turn(loop)  # the first token, three drafts
    assert shapes(runner) == [[6], [4]]
    assert (runner.steps[1].drafts, seq.confirmed, seq.bound) == ({seq: 3}, 0, 10)
    runner.done(1)
    turn(loop)
    turn(loop)
    assert (shapes(runner), seq.confirmed, seq.bound) == ([[6], [4], [4]], 6, 14)
    assert runner.steps[2].rows is runner.steps[1].rows
    runner.done(2, slot1=2)  # one draft kept
    [tokens] = turn(loop)
    assert (list(tokens.emitting()), tokens.num_tokens(0)) == ([(0, seq)], 2)
    assert (seq.confirmed, seq.bound, len(seq.tokens)) == (8, 12, 9)
    runner.done(3)  # all kept
    [tokens] = turn(loop)
    assert tokens.num_tokens(0) == 4
    assert (seq.confirmed, seq.bound, len(seq.tokens)) == (12, 16, 13)


def test_another_number_of_drafts_makes_new_rows_and_none_ends_the_look_at_each_row():
    wish = Wish(2)
    loop, runner, _ = make(wish)
    loop.submit(Seq(1, [1] * 6, 40))
    for index, count in enumerate([2, 2, 2, 1, 0, 0], 1):
        wish.count = count
        turn(loop)
        runner.done(index, **({"slot1": 1} if index > 1 and count else {}))
    turn(loop)
    assert shapes(runner) == [[6], [3], [3], [2], [1], [1], [1]]
    assert [step.changed for step in runner.steps] == [True, True, False, True, True, False, False]
    assert runner.steps[4].drafts == {}


def test_a_row_that_fails_behind_right_drafts_keeps_the_tokens_before():
    loop, runner, pool = make(Wish(3))
    seqs = [Seq(number, [number] * 6, 40) for number in (1, 2)]
    for seq in seqs:
        loop.submit(seq)
    turn(loop)  # the prompts
    turn(loop)
    runner.done(1)
    turn(loop)
    slots = [seq.slot for seq in seqs]
    # The first fails at its third position, the second at its first: that one drew nothing.
    ends = [(slot, FinishReason.ERROR) for slot in slots]
    runner.done(2, *ends, **{f"slot{slots[0]}": 2, f"slot{slots[1]}": 0})
    tokens, *finished = turn(loop)
    assert [(seq, tokens.num_tokens(at)) for at, seq in tokens.emitting()] == [(seqs[0], 2)]
    assert finished == [Finished(seq, FinishReason.ERROR) for seq in seqs]
    assert [len(seq.tokens) for seq in seqs] == [9, 7]
    assert pool.acquire([1] * 9).num_cached == 4  # only of the prompt


def test_drafts_end_with_the_sequence():
    loop, runner, _ = make(Wish(4), max_model_len=10)
    seq = Seq(1, [1] * 5, 99)  # five tokens of output at most: four after the first
    loop.submit(seq)
    turn(loop)
    runner.done(1)
    turn(loop)
    turn(loop)
    assert shapes(runner) == [[5], [4], [1]]  # step 2 may bring four tokens, and step 3 the last
    assert seq.bound == 9
    runner.done(2, slot1=2)
    turn(loop)
    turn(loop)
    assert shapes(runner)[3:] == [[1]]  # step 2 brought two tokens, step 3 brings one: one is left
    runner.done(3)
    turn(loop)
    runner.done(4, (1, FinishReason.LENGTH))
    turn(loop)
    assert not loop.has_work
    assert len(seq.tokens) == 10


def test_no_step_is_launched_when_kept_drafts_have_brought_the_only_row_to_its_end():
    loop, runner, _ = make(Wish(3), max_model_len=12)
    loop.submit(Seq(1, [1] * 5, 99))
    turn(loop)
    runner.done(1)
    turn(loop)
    turn(loop)
    runner.done(2)  # all four: nine are computed
    turn(loop)
    runner.done(3, slot1=1)
    turn(loop)
    turn(loop)
    launched = len(runner.steps)
    assert shapes(runner)[-1] == [1]  # the last token
    turn(loop)
    turn(loop)
    assert len(runner.steps) == launched


def test_where_blocks_are_short_drafts_are_given_up_and_no_row_is_preempted():
    loop, runner, pool = make(Wish(3), blocks=1 + 4, max_rows=2, max_model_len=12)
    seqs = [Seq(number, [number] * 7, 2) for number in (1, 2)]
    for seq in seqs:
        loop.submit(seq)
    turn(loop)
    runner.done(1)
    for _ in range(2):
        turn(loop)
    assert loop.stats.preemptions == loop.stats.dry == 0
    assert shapes(runner)[:2] == [[7, 7], [1, 1]]
    assert pool.num_free == 0


def test_drafts_of_a_row_whose_blocks_are_short_come_back_when_there_are_blocks():
    loop, runner, _ = make(Wish(3), blocks=1 + 5, max_rows=2, max_model_len=24)
    old, young = Seq(1, [1] * 7, 9), Seq(2, [2] * 7, 9)
    loop.submit(old)
    loop.submit(young)
    turn(loop)
    runner.done(1)
    turn(loop)
    assert shapes(runner)[1] == [4, 1]  # the first took the last block
    loop.abort(2)
    runner.done(2, slot1=1)
    turn(loop)
    turn(loop)
    assert shapes(runner)[-1] == [4]
    assert old.state is SeqState.DECODE


def test_prompts_get_what_decode_rows_and_their_drafts_leave():
    loop, runner, _ = make(Wish(3), budget=8)
    loop.submit(Seq(1, [1] * 4, 40))
    turn(loop)
    loop.submit(Seq(2, [2] * 9, 4))
    runner.done(1)
    turn(loop)
    runner.done(2, slot1=1)
    turn(loop)
    assert shapes(runner) == [[4], [4, 4], [4, 4]]


def test_a_row_that_ends_among_its_drafts_reports_the_tokens_up_to_its_end():
    loop, runner, pool = make(Wish(3))
    seq = Seq(1, [1] * 6, 40)
    loop.submit(seq)
    turn(loop)
    runner.done(1)
    turn(loop)
    turn(loop)
    runner.done(2, (1, FinishReason.STOP), slot1=3)
    tokens, finished = turn(loop)
    assert (tokens.num_tokens(0), finished.reason, seq.num_output) == (3, FinishReason.STOP, 1 + 3)
    runner.done(3, slot1=0)  # dead
    turn(loop)
    assert not loop.has_work
    assert pool.num_free == pool.num_total


@pytest.mark.parametrize("count", [-1, 5])
def test_a_row_cannot_advance_by_more_than_it_has(count):
    loop, runner, _ = make(Wish(3))
    loop.submit(Seq(1, [1] * 6, 40))
    turn(loop)
    turn(loop)
    runner.done(1)
    runner.done(2, slot1=count)
    assert loop.step(0.0)  # what step 1 brought; the loop is lost then, and says so
    with pytest.raises(ContractError, match=f"advanced by {count} tokens; its row has 4"):
        loop.step(0.0)


@pytest.mark.parametrize("count", [-1, 1])
def test_drafts_are_for_decode_rows(count):
    class Wrong:
        rest_until = 0

        def num_drafts(self, view):
            return {seq if count < 0 else stranger: count for seq in view.decoding}

    stranger = Seq(9, [1], 1)
    loop, _, _ = make(Wrong())
    loop.submit(Seq(1, [1] * 6, 40))
    turn(loop)
    with pytest.raises(ContractError, match="give decode rows 0 or more"):
        loop.step(0.0)
