"""StepLoop case by case. What generated schedules find is in test_schedules.py."""

import sys
from collections import deque

import pytest

from openinfer.scheduler import (
    ContractError,
    Decision,
    Finished,
    FinishReason,
    FirstCome,
    InvalidSetup,
    Rejected,
    RejectReason,
    Scheduled,
    Seq,
    SeqState,
    StepLoop,
    StepResult,
    Tokens,
)
from openinfer.scheduler.testing import FakeRunner, SimplePool, generate


class ScriptedRunner:
    """Records steps; a test says when one is done and what ended in it."""

    def __init__(self):
        self.steps = []
        self.results = deque()

    def launch(self, step):
        self.steps.append(step)

    def collect(self, wait_s):
        return self.results.popleft() if self.results else None

    def done(self, index, *finished, advanced=None):
        self.results.append(StepResult(index, finished, f"payload {index}", advanced))


def make(runner, *, blocks=40, block_size=4, policy=None, max_rows=4, max_model_len=64, **options):
    pool = SimplePool([(block_size, blocks)])
    loop = StepLoop(
        runner, pool, policy or FirstCome(32), max_rows=max_rows, max_model_len=max_model_len, **options
    )
    return loop, pool


def turn(loop):
    """One turn, the owner's part included: every token is 7."""
    events = loop.step(0.0)
    for event in events:
        if isinstance(event, Tokens):
            for _, seq in event.emitting():
                seq.tokens.append(7)
    loop.check()
    return events


def names(events):
    return [type(event).__name__ for event in events]


def test_the_second_step_is_launched_before_the_first_is_read():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    seq = Seq(1, [1] * 6, 10)
    loop.submit(seq)
    assert turn(loop) == [Scheduled(seq, 0)]
    assert turn(loop) == []
    assert turn(loop) == []
    first, second = runner.steps
    assert [tuple(row) for row in first.rows] == [(seq, 6, True, 0)]
    assert [tuple(row) for row in second.rows] == [(seq, 1, True, None)]
    assert (first.joined, first.blocks[0].blocks, first.changed, first.num_decode) == ([seq], [1, 2], True, 0)
    assert (second.joined, second.blocks, second.left, second.changed, second.num_decode) == (
        [],
        [],
        [],
        True,
        1,
    )
    assert (seq.confirmed, seq.bound, seq.state) == (0, 7, SeqState.DECODE)
    runner.done(1)
    [tokens] = turn(loop)
    assert (tokens.step, tokens.payload, list(tokens.emitting())) == (1, "payload 1", [(0, seq)])
    turn(loop)
    third = runner.steps[2]
    assert third.rows is second.rows
    assert not third.changed
    assert (seq.confirmed, seq.num_output) == (6, 1)


def test_a_row_gets_its_block_in_the_step_that_needs_it():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    loop.submit(Seq(1, [1] * 6, 10))
    for index in range(1, 8):
        turn(loop)
        runner.done(index)
    turn(loop)
    # Step 1 brings 6 tokens, step 3 the 8th: step 4 needs block 3, step 8 block 4.
    assert [[tuple(write)[1:] for write in step.blocks] for step in runner.steps] == [
        [(0, 0, [1, 2])], [], [], [(0, 2, [3])], [], [], [], [(0, 3, [4])]
    ]  # fmt: skip


def test_while_the_pool_is_roomy_a_row_gets_blocks_ahead_but_never_past_its_length():
    runner = ScriptedRunner()
    loop, _ = make(runner, blocks=200)
    loop.submit(Seq(1, [1] * 6, 10))
    loop.submit(Seq(2, [2] * 6, 100))
    for index in range(1, 5):
        turn(loop)
        runner.done(index)
    assert [(write.seq.id, write.first, len(write.blocks)) for write in runner.steps[3].blocks] == [
        (2, 2, 13),  # 9 tokens and 48
        (1, 2, 2),
    ]


def test_a_long_answer_is_committed_256_tokens_at_a_time():
    runner = ScriptedRunner()
    loop, pool = make(runner, blocks=200, max_model_len=600)
    seq = Seq(1, [1] * 6, 500)
    loop.submit(seq)
    found = []
    for index in range(1, 400):
        turn(loop)
        runner.done(index)
        lease = pool.acquire(seq.tokens)
        found.append(lease.num_cached)
        lease.release()
    assert sorted(set(found)) == [0, 4, 264]


def test_a_row_that_ends_on_the_device_is_dead_in_the_step_already_launched():
    runner = ScriptedRunner()
    loop, _pool = make(runner)
    seq, other = Seq(1, [1] * 3, 9), Seq(2, [2] * 3, 9)
    loop.submit(seq)
    loop.submit(other)
    turn(loop)
    turn(loop)
    runner.done(1, (seq.slot, FinishReason.STOP))
    events = turn(loop)
    assert names(events) == ["Tokens", "Finished"]
    assert list(events[0].emitting()) == [(0, seq), (1, other)]
    assert events[1] == Finished(seq, FinishReason.STOP)
    assert seq.lease is not None  # step 2 still includes the row
    runner.done(2)
    [tokens] = turn(loop)
    assert tokens.dead == {seq}
    assert list(tokens.emitting()) == [(1, other)]
    assert seq.lease is None
    assert [row.seq for row in runner.steps[2].rows] == [other]
    assert runner.steps[2].left == []  # the device ended the row itself


def test_abort_ends_at_once_and_lets_go_at_the_fence():
    runner = ScriptedRunner()
    loop, _pool = make(runner, max_rows=1)
    seq, heir = Seq(1, [1] * 3, 9), Seq(2, [2] * 3, 9)
    loop.submit(seq)
    loop.submit(heir)
    turn(loop)
    turn(loop)
    assert loop.abort(1, FinishReason.STOP)
    assert not loop.abort(1)
    assert not loop.abort(77)
    runner.done(1)
    events = turn(loop)
    assert events[0] == Finished(seq, FinishReason.STOP)
    assert list(events[1].emitting()) == []
    assert heir.state is SeqState.WAITING
    runner.done(2, (1, FinishReason.LENGTH))  # the device ended the row as well: there is one terminal
    assert [list(event.emitting()) for event in turn(loop)] == [[]]
    assert turn(loop) == [Scheduled(heir, 0)]
    assert (runner.steps[2].left, runner.steps[2].joined) == ([1], [heir])


def test_abort_of_a_waiting_sequence_leaves_no_trace():
    runner = ScriptedRunner()
    loop, pool = make(runner)
    seq = Seq(1, [1] * 3, 9)
    loop.submit(seq)
    loop.abort(1)
    assert loop.has_work
    assert turn(loop) == [Finished(seq, FinishReason.ABORT)]
    assert not loop.has_work
    assert not runner.steps
    assert pool.num_free == pool.num_total


def test_a_prompt_longer_than_the_budget_comes_in_chunks_and_only_the_last_emits():
    runner = ScriptedRunner()
    loop, _ = make(runner, policy=FirstCome(8, max_chunk_tokens=5))
    seq = Seq(1, [1] * 12, 2)
    loop.submit(seq)
    for index in range(1, 4):
        turn(loop)
        runner.done(index)
    assert [(row.num_tokens, row.emits, row.start) for step in runner.steps for row in step.rows] == [
        (5, False, 0),
        (5, False, 5),
        (2, True, 10),
    ]
    assert names(turn(loop)) == ["Tokens"]  # of step 3; steps 1 and 2 had none to tell of


def test_a_dry_pool_drains_then_preempts_the_latest_and_recomputes_it():
    runner = ScriptedRunner()
    loop, _pool = make(runner, blocks=1 + 5, max_model_len=16)
    old, young = Seq(1, [1] * 7, 9), Seq(2, [2] * 7, 9)
    loop.submit(old)
    loop.submit(young)
    turn(loop)  # 7 tokens each in blocks of 4
    turn(loop)  # 8
    runner.done(1)
    turn(loop)
    turn(loop)  # the 9th needs a third block each; there is one
    assert (len(runner.steps), loop.stats.dry) == (2, 1)
    runner.done(2)
    turn(loop)
    turn(loop)
    assert (young.state, young.lease, young.num_preemptions) == (SeqState.WAITING, None, 1)
    assert (runner.steps[2].left, [row.seq for row in runner.steps[2].rows]) == (
        [2],
        [old],
    )
    assert (young.tokens, old.confirmed, loop.stats.preemptions) == ([2] * 7 + [7, 7], 8, 1)
    assert (young.confirmed, young.bound) == (0, 0)  # nothing of it is computed, as far as anyone may rely on
    runner.done(3, (old.slot, FinishReason.STOP))
    turn(loop)
    turn(loop)
    runner.done(4)
    turn(loop)
    turn(loop)
    again = runner.steps[-1]
    assert again.joined == [young]
    assert [(row.start, row.num_tokens, row.emits) for row in again.rows] == [
        (8, 1, True)
    ]  # the rest was cached


def windowed(runner, *, window_blocks, budget, **options):
    """A loop over a group that keeps all and one with a window of 4 tokens, blocks of 4."""
    pool = SimplePool([(4, 200), (4, 1 + window_blocks, 4)])
    return StepLoop(runner, pool, FirstCome(budget), max_rows=4, max_model_len=700, **options), pool


def test_a_prompt_longer_than_the_window_group_is_admitted_and_gives_back_as_it_goes():
    runner = ScriptedRunner()
    loop, pool = windowed(runner, window_blocks=7, budget=12)
    seq = Seq(1, [1] * 100, 2)
    loop.submit(seq)
    assert turn(loop) == [Scheduled(seq, 0)]
    turn(loop)
    first, second = runner.steps
    assert [(write.group, write.first, len(write.blocks)) for write in first.blocks] == [
        (0, 0, 25),
        (1, 0, 3),
    ]
    assert [(write.group, write.first, len(write.blocks)) for write in second.blocks] == [(1, 3, 3)]
    used, launch = [], runner.launch
    runner.launch = lambda step: (used.append(pool.num_total - pool.num_free - 25), launch(step))
    for index in range(1, 10):
        runner.done(index)
        turn(loop)
    assert [row.num_tokens for step in runner.steps for row in step.rows] == [12] * 8 + [4, 1]
    assert max(used) == 7  # two chunks, and the block before them


def test_a_chunk_is_cut_to_what_the_windows_have_room_for_and_nobody_is_admitted_then():
    runner = ScriptedRunner()
    loop, _ = windowed(runner, window_blocks=5, budget=16)
    long, short = Seq(1, [1] * 60, 2), Seq(2, [2] * 4, 2)
    loop.submit(long)
    turn(loop)
    loop.submit(short)
    turn(loop)  # 16 of 20 tokens of room are taken, and 4 are left
    turn(loop)
    assert [[(row.seq, row.num_tokens) for row in step.rows] for step in runner.steps] == [
        [(long, 16)],
        [(long, 4)],
    ]
    assert short.state is SeqState.WAITING
    runner.done(1)
    turn(loop)  # too late for this turn's plan
    turn(loop)  # tokens 12 to 15 and 16 to 19 are kept, so there are three blocks
    assert [(row.seq, row.num_tokens) for row in runner.steps[2].rows] == [(long, 12)]


def test_prompts_in_each_others_way_end_by_preemption_of_the_latest():
    runner = ScriptedRunner()
    loop, pool = windowed(runner, window_blocks=2, budget=8)
    loop._policy.max_chunk_tokens = 4
    old, young = Seq(1, [1] * 24, 2), Seq(2, [2] * 24, 2)
    loop.submit(old)
    loop.submit(young)
    turn(loop)
    turn(loop)  # each has a block, and the next chunk needs another
    assert [[row.num_tokens for row in step.rows] for step in runner.steps] == [[4, 4]]
    runner.done(1)
    turn(loop)
    turn(loop)  # all is known now, and both keep their block: the window reaches it
    assert (young.state, young.num_preemptions, loop.stats.dry) == (SeqState.WAITING, 1, 1)
    assert pool.num_total - pool.num_free == 6 + 1
    turn(loop)
    assert [(row.seq, row.start, row.num_tokens) for row in runner.steps[1].rows] == [(old, 4, 4)]
    index = 1
    while loop.has_work and index < 60:
        index += 1
        ended = [
            (row.seq.slot, FinishReason.LENGTH)
            for row in runner.steps[index - 1].rows
            if row.emits and row.seq.state is SeqState.DECODE and row.seq.num_output + 1 == row.seq.max_tokens
        ]
        runner.done(index, *ended)
        while index == len(runner.steps) and loop.has_work:
            turn(loop)
    assert (len(old.tokens), len(young.tokens), old.num_preemptions) == (26, 26, 0)
    assert pool.num_free == pool.num_total


def test_who_prefills_waits_for_blocks_while_others_decode_and_is_not_preempted():
    runner = ScriptedRunner()
    loop, pool = windowed(runner, window_blocks=6, budget=9)
    row, seq = Seq(1, [1] * 4, 3), Seq(2, [2] * 24, 2)
    loop.submit(row)
    turn(loop)
    loop.submit(seq)
    turn(loop)  # two blocks of the window for the row, two for the other's first eight tokens
    other = pool.acquire([9] * 8)
    other.reserve(8)  # somebody takes the last two
    for index in (1, 2):
        runner.done(index)
        turn(loop)
    assert [[r.num_tokens for r in step.rows] for step in runner.steps] == [[4], [1, 8], [1]]
    assert (seq.state, seq.bound) == (SeqState.PREFILL, 8)
    other.release()
    turn(loop)
    assert [(r.seq, r.num_tokens) for r in runner.steps[3].rows] == [(row, 1), (seq, 8)]
    assert (seq.num_preemptions, loop.stats.dry) == (0, 0)


def test_after_preemptions_admissions_leave_a_part_of_each_group_free():
    runner = ScriptedRunner()
    loop, _ = windowed(runner, window_blocks=8, budget=12, max_headroom=0.5)
    loop.submit(Seq(1, [1] * 4, 3))
    turn(loop)
    loop._headroom.level = 0.5
    seq = Seq(2, [2] * 60, 2)
    loop.submit(seq)
    turn(loop)  # two of the window's eight blocks are taken, and four are to stay free
    assert [(row.seq, row.num_tokens) for row in runner.steps[1].rows[1:]] == [(seq, 8)]
    loop._headroom.level = 0.9
    third = Seq(3, [3] * 4, 2)
    loop.submit(third)
    turn(loop)
    assert third.state is SeqState.WAITING


def test_tokens_that_the_owner_did_not_append_are_noticed_before_they_are_recomputed_wrong():
    runner = ScriptedRunner()
    loop, _ = make(runner, blocks=1 + 3, max_model_len=12)
    loop.submit(Seq(1, [1] * 4, 8))
    loop.submit(Seq(2, [2] * 4, 8))
    for index in (1, 2):
        loop.step(0.0)
        runner.done(index)
    with pytest.raises(ContractError, match=r"request 2 has 4 tokens where 5 were reported.*append"):
        loop.step(0.0)


def test_rejections_name_what_was_given_and_allowed_and_are_counted():
    loop, _pool = make(ScriptedRunner(), blocks=1 + 4, max_model_len=32, max_queued=1)
    cases = [
        (Seq(1, [1] * 32, 1), RejectReason.TOO_LONG, "32 prompt tokens; the model's length of 32 allows 31"),
        (Seq(1, [], 1), RejectReason.INVALID, "0 prompt tokens"),
        (Seq(1, [1], 0), RejectReason.INVALID, "max_tokens 0"),
        (
            Seq(1, [1] * 10, 8),
            RejectReason.POOL_TOO_SMALL,
            "17 tokens of cache, 10 of them for its prompt; the pool holds 16 of one sequence; lower max_tokens",
        ),
    ]
    for seq, reason, message in cases:
        with pytest.raises(Rejected, match=message) as caught:
            loop.submit(seq)
        assert caught.value.reason is reason
    accepted = Seq(1, [1] * 10, 7)
    loop.submit(accepted)
    for seq, reason in [(accepted, RejectReason.INVALID), (Seq(2, [1], 1), RejectReason.QUEUE_FULL)]:
        with pytest.raises(Rejected) as caught:
            loop.submit(seq)
        assert caught.value.reason is reason
    assert loop.stats.rejected == {
        RejectReason.TOO_LONG: 1,
        RejectReason.INVALID: 3,
        RejectReason.POOL_TOO_SMALL: 1,
        RejectReason.QUEUE_FULL: 1,
    }
    assert (loop.stats.submitted, loop.stats.waiting) == (1, 1)


def test_a_prompt_that_cannot_fit_is_told_what_to_change():
    loop, _pool = make(ScriptedRunner(), blocks=1 + 4)
    message = "24 tokens of cache, 17 of them for its prompt; the pool holds 16 of one sequence; shorten the prompt or"
    with pytest.raises(Rejected, match=message):
        loop.submit(Seq(1, [1] * 17, 8))


def test_a_row_that_stood_still_falls_behind_by_a_step():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    seq = Seq(1, [1] * 6, 10)
    loop.submit(seq)
    turn(loop)
    turn(loop)
    runner.done(1)
    runner.done(2, advanced={seq.slot: 0})
    first, second = turn(loop)
    assert list(first.emitting()) == [(0, seq)]
    assert list(second.emitting()) == []
    assert (seq.confirmed, seq.bound) == (6, 6)


def test_a_failed_row_ends_alone_yields_nothing_and_is_not_cached():
    runner = ScriptedRunner()
    loop, pool = make(runner)
    bad, good = Seq(1, [1] * 5, 9), Seq(2, [2] * 5, 9)
    loop.submit(bad)
    loop.submit(good)
    turn(loop)
    runner.done(1, (bad.slot, FinishReason.ERROR))
    tokens, finished = turn(loop)
    assert list(tokens.emitting()) == [(1, good)]
    assert finished == Finished(bad, FinishReason.ERROR)
    assert good.state is SeqState.DECODE
    assert [pool.acquire([token] * 5).num_cached for token in (1, 2)] == [0, 4]


class Lost(ScriptedRunner):
    """A device that goes away."""

    def collect(self, wait_s):
        raise OSError("device lost")


def test_a_runners_failure_passes_through_and_stays():
    loop, _ = make(Lost())
    seq = Seq(1, [1], 5)
    loop.submit(seq)
    assert loop.step(0.0) == [Scheduled(seq, 0)]  # what happened before is told first
    for _ in range(2):
        with pytest.raises(OSError, match="device lost"):
            loop.step(0.0)
    assert loop.live == [seq]


def test_an_abort_is_told_though_the_device_is_lost_in_the_same_turn():
    loop, _ = make(Lost())
    seqs = [Seq(number, [1], 5) for number in range(2)]
    for seq in seqs:
        loop.submit(seq)
    loop.abort(0)
    assert Finished(seqs[0], FinishReason.ABORT) in loop.step(0.0)
    with pytest.raises(OSError, match="device lost"):
        loop.step(0.0)
    assert loop.live == [seqs[1]]


def test_blocks_that_someone_else_gives_back_are_noticed_when_nothing_runs():
    loop, pool = make(ScriptedRunner(), blocks=1 + 4)
    other = pool.acquire([9] * 12)
    other.reserve(12)
    seq = Seq(1, [1] * 8, 5)
    loop.submit(seq)
    assert turn(loop) == []
    other.release()
    assert turn(loop) == [Scheduled(seq, 0)]


def test_results_out_of_order_or_for_empty_slots_are_refused():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    loop.submit(Seq(1, [1], 5))
    loop.step(0.0)
    runner.done(2)
    with pytest.raises(ContractError, match="returned step 2, the oldest launched is 1"):
        loop.step(0.0)
    loop, _ = make(runner)
    loop.submit(Seq(1, [1], 5))
    loop.step(0.0)
    runner.done(1, (3, FinishReason.STOP))
    with pytest.raises(ContractError, match="names slot 3"):
        loop.step(0.0)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (lambda seq: Decision(admit=[Seq(5, [1], 1)], admit_tokens=8), "admits request 5"),
        (lambda seq: Decision(preempt=[seq]), "preempts request 1"),
    ],
)
def test_a_policy_that_names_the_wrong_sequence_is_refused(decision, message):
    class Wrong(FirstCome):
        def plan(self, view):
            return decision(seq)

    seq = Seq(1, [1], 5)
    loop, _ = make(ScriptedRunner(), policy=Wrong(32))
    loop.submit(seq)
    with pytest.raises(ContractError, match=message):
        loop.step(0.0)


def test_drain_reads_everything_and_launches_nothing():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    seq = Seq(1, [1] * 3, 9)
    loop.submit(seq)
    turn(loop)
    turn(loop)
    runner.done(1)
    runner.done(2)
    assert names(loop.drain()) == ["Tokens", "Tokens"]
    assert (len(runner.steps), loop.stats.in_flight) == (2, 0)


def test_idle_costs_nothing_and_waits_for_nothing():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    assert loop.step(None) == []
    assert not loop.has_work


def test_waiting_happens_only_when_nothing_can_be_launched_or_told():
    waits = []

    class Timed(ScriptedRunner):
        def collect(self, wait_s):
            waits.append(wait_s)
            return super().collect(wait_s)

    runner = Timed()
    loop, _ = make(runner)
    loop.submit(Seq(1, [1] * 3, 9))
    loop.step(0.5)  # has Scheduled to tell
    loop.step(0.5)  # fills the pipeline
    loop.step(0.5)
    assert waits == [0.0, 0.5, 0.5]


def test_a_steady_step_runs_the_same_code_whatever_the_batch():
    def calls_of_a_step(rows):
        runner = ScriptedRunner()
        loop, _ = make(runner, policy=FirstCome(1024), max_rows=rows, block_size=64, blocks=rows + 1)
        for number in range(rows):
            loop.submit(Seq(number, [1] * 8, 40))
        for index in range(1, 5):
            turn(loop)
            runner.done(index)
        lines = []
        sys.setprofile(lambda frame, event, argument: lines.append(event))
        try:
            events = loop.step(0.0)
        finally:
            sys.setprofile(None)
        assert names(events) == ["Tokens"]
        return len(lines)

    assert calls_of_a_step(4) == calls_of_a_step(64) < 100


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(InvalidSetup, match="given 0, 1024, 2, 64 and"):
        make(ScriptedRunner(), max_rows=0)
    with pytest.raises(InvalidSetup, match="max_model_len at least 2"):
        make(ScriptedRunner(), max_model_len=1)


def test_no_step_is_launched_whose_rows_all_end_before_it():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    for request_id, max_tokens in ((1, 1), (2, 3)):
        loop.submit(Seq(request_id, [1, 2], max_tokens))
    one, two = loop.live
    turn(loop)
    turn(loop)
    assert len(runner.steps) == 2  # request 1 is dead in the second, where request 2 gets a token
    runner.done(1, (one.slot, FinishReason.LENGTH))
    turn(loop)
    runner.done(2)
    turn(loop)
    turn(loop)
    assert len(runner.steps) == 3  # the third token is the last, so a fourth step would be nobody's
    runner.done(3, (two.slot, FinishReason.LENGTH))
    assert Finished(two, FinishReason.LENGTH) in turn(loop)
    assert not loop.has_work


def test_a_row_that_stood_still_gets_its_step_all_the_same():
    runner = ScriptedRunner()
    loop, _ = make(runner)
    loop.submit(Seq(1, [1, 2], 3))
    (seq,) = loop.live
    turn(loop)
    runner.done(1)
    turn(loop)
    runner.done(2, advanced={seq.slot: 0})
    turn(loop)
    turn(loop)
    assert len(runner.steps) == 4
    runner.done(3)
    runner.done(4, (seq.slot, FinishReason.LENGTH))
    assert Finished(seq, FinishReason.LENGTH) in turn(loop)
    assert not loop.has_work


class WatchedPool(SimplePool):
    """Notes which part of itself admissions are to leave free."""

    def __init__(self, *args):
        super().__init__(*args)
        self.left = []

    def acquire(self, tokens, salt=b"", hashes=None):
        lease = super().acquire(tokens, salt, hashes)
        reach = lease.reach
        lease.reach = lambda leave=0.0: (self.left.append(leave), reach(leave))[1]
        return lease


class PreemptsFourTimes(FirstCome):
    """Sends the latest of two that run back to the queue, four times."""

    times = 4

    def plan(self, view):
        decision = super().plan(view)
        if self.times and len(view.running) > 1:
            decision.preempt = [list(view.running)[-1]]
        return decision

    def on_preempt(self, seq):
        super().on_preempt(seq)
        self.times -= 1


def test_headroom_rises_with_each_preemption_and_falls_with_each_ending():
    pool = WatchedPool([(4, 400)])
    loop = StepLoop(
        FakeRunner([4]), pool, PreemptsFourTimes(32), max_rows=2, max_model_len=900, max_headroom=0.5
    )
    long = max(
        ([a, b] for a in range(1, 31) for b in range(1, 31)), key=lambda prompt: len(generate(prompt, 300)[0])
    )
    loop.submit(Seq(0, long, 290))  # runs all the while: the first of an idle loop may take everything
    loop.step()
    for number in range(1, 35):
        loop.submit(Seq(number, [number % 30 + 1] * 5, 3))
        while len(loop.live) > 1:
            for event in loop.step(None):
                if isinstance(event, Tokens):
                    for position, seq in event.emitting():
                        seq.tokens.extend(event.payload[position])
        assert loop.live, "the long one has ended"
    assert 3 / 32 < max(pool.left) <= 4 / 32
    after = pool.left[pool.left.index(max(pool.left)) :]
    assert after == sorted(after, reverse=True)
    assert 0 < after[-1] < after[0] / 2


def test_blocks_of_a_row_that_stops_before_the_launch_are_not_written():
    runner = ScriptedRunner()
    loop, _pool = make(runner, blocks=1 + 5, max_model_len=16)
    seqs = [Seq(number, [number] * 7, 9) for number in (1, 2)]
    for seq in seqs:
        loop.submit(seq)
    turn(loop)
    turn(loop)
    runner.done(1)
    turn(loop)
    turn(loop)  # both need a third block: the last one goes to one row, the other finds the pool dry
    assert (len(runner.steps), loop.stats.dry) == (2, 1)
    [lucky] = [seq for seq in seqs if seq.lease.num_tokens == 12]
    loop.abort(lucky.id)
    heir = Seq(3, [3] * 3, 9)
    loop.submit(heir)
    runner.done(2)
    for _ in range(3):
        turn(loop)
    written = [write.seq for step in runner.steps[2:] for write in step.blocks]
    assert written
    assert lucky not in written
