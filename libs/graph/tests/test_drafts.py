"""Drafts: what the host writes for a verifying step, what it reads, and how many drafts a row gets."""

import itertools
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest

from openinfer.graph import Buckets, Rows
from openinfer.graph.runner import DraftCounts, Drafting, Sampling
from openinfer.graph.runner.drafting import UNSURE, Spent
from openinfer.graph.runner.verifying import (
    Proposals,
    draft_fields,
    read_verified,
    write_drafts,
    write_verified,
)
from openinfer.kernels import CpuPack, apply_writes
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import RowStatus
from openinfer.scheduler import NGram, Row, Seq, Step
from openinfer.scheduler.worth import ADAPTERS
from openinfer.tensor import Arena, Device, Stream, uint8

BUCKETS = Buckets.up_to(8, 64, (1, 2, 4), 3)


@pytest.fixture
def rows():
    device = Device("cpu")
    with Stream(device) as stream:
        rows = Rows(Arena(device, 1 << 20), draft_fields(4, 2, 100, False), stream)
        yield (
            rows,
            lambda: [
                apply_writes(CpuPack(), words=rows.words, writes=rows.writes) for _ in rows.uploads(stream)
            ],
        )
        rows.close()


def test_an_engine_without_drafts_has_no_fields_of_them():
    assert draft_fields(4, 0, 100, False) == []


def test_a_verifying_step_samples_after_each_certain_token_and_each_draft(rows):
    rows, upload = rows
    # Two drafts, none, a chunk of three tokens, one draft.
    q_starts = np.array([0, 3, 4, 7, 9], np.int32)
    write_verified(rows, q_starts, np.array([2, 0, 0, 1], np.int32), 2)
    upload()
    assert rows["sure_starts"].numpy().tolist() == [0, 1, 2, 5, 6]
    ends = rows["sampled_ends"].numpy()[1:].reshape(3, 4)
    assert ends.tolist() == [[1, 4, 7, 8], [2, 0, 0, 9], [3, 0, 0, 0]]


def test_proposals_stand_by_position(rows):
    rows, upload = rows
    width = rows["drafts"].shape[1]
    assert width > 2 * 2 + 1
    for position in (0, width - 2, 5 * width - 1):
        write_drafts(rows, [(3, position, [11, 12, 13, 14, 15])])
        upload()
        found = rows["drafts"].numpy()[3, np.arange(position, position + 5) % width]
        assert found.tolist() == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_no_proposal_overwrites_drafts_that_are_not_decided(most):
    """A step under way has the drafts of the last proposal, at positions that follow from what the step before it
    accepts. The next proposal begins up to most + 1 positions further, and both have 2 * most + 1 tokens."""
    device = Device("cpu")
    stream = Stream(device)
    rows = Rows(Arena(device, 1 << 20), draft_fields(4, most, 100, False), stream)
    count, step = 2 * most + 1, most + 1
    for position in range(3 * rows.width("drafts")):
        write_drafts(rows, [(2, position, range(1, count + 1))])
        write_drafts(rows, [(2, position + step, range(101, 101 + count))])
        found = rows.held("drafts", 2)
        kept = [int(found[(position + at) % len(found)]) for at in range(step)]
        assert kept == list(range(1, step + 1))
    rows.close()
    stream.close()


def seq_of(tokens, **owner):
    seq = Seq(1, list(tokens), 50, owner=Sampling(SamplingParams(), 0, (), **owner))
    seq.slot = 2
    return seq


def test_the_rows_that_were_alive_are_counted():
    seqs = [seq_of([1]) for _ in range(8)]
    for slot, seq in enumerate(seqs, 1):
        seq.slot = slot
    step_rows = [Row(seq, n, True, None) for seq, n in zip(seqs, (3, 3, 1, 2, 3, 3, 3, 3), strict=True)]
    drafts = {seqs[0]: 2, seqs[1]: 2, seqs[3]: 1, seqs[4]: 2, seqs[5]: 2, seqs[6]: 2, seqs[7]: 2}
    step = Step(1, step_rows, True, 8, (), (), (), drafts)
    result = np.zeros((3, 9, 3), np.int32)  # a bucket of nine rows
    result[:2, 0, 1] = RowStatus.RUNNING
    result[0, 2, 1] = result[0, 3, 1] = RowStatus.RUNNING
    result[1, 3, 1] = RowStatus.STOP
    result[0, 4, 1] = RowStatus.DRAFTED_STOP  # its first draft was right, and brought nothing
    result[:2, 5, 1] = RowStatus.RUNNING
    result[2, 5, 1] = result[0, 6, 1] = RowStatus.FAILED  # they have the tokens before
    result[0, 7, 1], result[1, 7, 1] = RowStatus.RUNNING, RowStatus.UNTRIED  # it had one draft, in two places
    found = [(seq.slot, *rest) for seq, *rest in read_verified(step, result)]
    wanted = [
        (1, 2, 2, 2, 1),
        (4, 1, 1, 2, 1),
        (5, 2, 2, 1, 1),
        (6, 2, 2, 2, 2),
        (7, 2, 2, 0, 0),
        (8, 2, 1, 2, 1),
    ]
    assert found == wanted


def test_counts_are_by_position():
    counts = DraftCounts()
    for drafts, accepted in ((2, 0), (3, 2), (1, 1)):
        counts.add(drafts, accepted)
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (3, 6, 3)
    assert counts.by_position == [2, 1, 0]


def seen(drafting):
    """After a step whose drafts were right: more than one is not tried before."""
    drafting.saw({(drafting.max_drafts,) * 3: 1})
    return drafting


def costs_of(decode):
    return SimpleNamespace(
        decode=decode, sure=lambda rows: True, seconds=lambda shape: 1.0, took=lambda *args: None
    )


def view_of(*seqs, step=1):
    return SimpleNamespace(decoding=dict.fromkeys(seqs), step=step)


def test_a_row_has_drafts_where_its_drafter_has_a_guess():
    drafting = seen(Drafting(BUCKETS, lambda: NGram(2, 3)))
    known, unknown = seq_of([5, 6, 7, 5, 6]), seq_of([1, 2, 3, 4])
    forced = seq_of([1, 2, 3, 4], constraint=SimpleNamespace(forced=lambda: [8, 9]))
    free = seq_of([5, 6, 7, 5, 6], constraint=SimpleNamespace(forced=list))
    off = seq_of([5, 6, 7, 5, 6], draftless=True)
    found = drafting.num_drafts(view_of(known, unknown, forced, free, off))
    assert found == {known: 3, forced: 2, free: 3}
    assert list(forced.owner.proposal.tokens) == [8, 9]
    assert (known.owner.proposal.position, list(known.owner.proposal.tokens)) == (5, [7, 5, 6, 7, 5, 6, 7])


def test_the_tokens_of_a_step_under_way_come_before_drafts():
    """A row has no more drafts than tokens of its proposal that are left behind them."""
    drafting = seen(Drafting(BUCKETS, lambda: NGram(2, 3)))
    seq = seq_of([1, 2, 3, 4], constraint=SimpleNamespace(forced=lambda: [8, 9, 10, 11]))
    for under_way, drafts in ((0, 3), (1, 3), (2, 2), (3, 1), (4, 0), (5, 0)):
        seq.prefilled, seq.scheduled = 3, 3 + under_way
        assert (seq.confirmed, seq.bound) == (3, 3 + under_way)
        assert drafting.num_drafts(view_of(seq)).get(seq, 0) == drafts


def test_a_drafter_is_asked_once_for_equal_tokens():
    asked = []

    class Noting:
        def propose(self, tokens, count):
            asked.append((len(tokens), count))
            return [1] * count

    drafting, seq = Drafting(Buckets.up_to(8, 64, (1,), 2), Noting), seq_of([1, 2])
    for tokens in ([], [3], [], [4, 5]):
        seq.tokens += tokens
        drafting.num_drafts(view_of(seq))
    assert asked == [(2, 5), (3, 5), (5, 5)]


def test_drafts_leave_room_for_a_prompt():
    drafting = seen(Drafting(Buckets.up_to(8, 12, (1,), 3), lambda: NGram(1, 3)))
    seqs = [seq_of([1, 1, 1, 1]) for _ in range(4)]
    found = drafting.num_drafts(view_of(*seqs))
    assert list(found.values()) == [3, 3, 1]
    assert sum(found.values()) + len(seqs) == 11


def launch(drafting, step):
    """As a runner does, without prompts; the step is to be read."""
    drafting.write(SimpleNamespace(width=lambda name: 16, scatter=lambda *args: None), step)
    return drafting.launched(step, BUCKETS.choose(1, 1))


def read(drafting, step, accepted):
    """As a runner does, with this number of accepted drafts of each row."""
    if step.drafts:
        drafting.saw(Counter((drafts, accepted, accepted) for drafts in step.drafts.values()))
    decode = 1.0 + 0.4 * max(step.drafts.values(), default=0)
    drafting.book(step, BUCKETS.choose(1, 1), Spent(decode, 1.0, 0.0, 1))


def test_drafts_that_do_not_pay_are_left_out():
    """Layers draft for the step after the next, so a change of mind comes a step late."""
    costs = costs_of(lambda rows, drafts, chunks: 1.0 + 0.4 * drafts)
    drafting, seq = Drafting(BUCKETS, None, costs), seq_of([1, 2, 3])
    assert drafting.launched(Step(0, [], True, 0, (), (), (), {}), BUCKETS.choose(1, 1)) == 1
    flight, chosen = deque[Step](), []
    for index in range(1, 1200):
        drafts = {}
        if index >= drafting.rest_until:
            for _ in range(2):  # asked again, because the step could not be launched
                drafts = drafting.num_drafts(view_of(seq, step=index))
        step = Step(index, [Row(seq, 1, True, None)], False, 1, (), (), (), drafts)
        chosen.append((drafts.get(seq, 0), launch(drafting, step)))
        flight.append(step)
        if len(flight) == 2:
            read(drafting, flight.popleft(), 0)
    counts = [count for count, _ in chosen]
    assert counts[:4] == [1, 0, 0, 1]  # the result of the first drafts comes first
    assert 0 < sum(counts[20:]) <= 8  # tried now and then, a step after the layers have drafted
    assert counts[1:] == [places for _, places in chosen[:-1]]
    assert not any(count and following for count, following in itertools.pairwise(counts))


def test_no_drafter_is_asked_where_drafts_do_not_pay():
    costs = costs_of(lambda rows, drafts, chunks: 1.0 + 0.4 * drafts)
    asked = Drafting(BUCKETS, lambda: pytest.fail("a drafter is asked"), costs)
    for _ in range(100):
        asked.saw({(3, 0, 0): 1})
    assert asked.num_drafts(view_of(seq_of([1, 2, 3]))) == {}


def test_prompts_beside_do_not_make_drafts_cheap():
    """A token that a draft brings saves its row's half of a decode step, and no part of a prompt."""
    costs = costs_of(lambda rows, drafts, chunks: 1.0 + 0.35 * drafts + 9.0 * chunks[1])
    drafting, seq = (
        Drafting(Buckets.up_to(8, 64, (1,), 1), lambda: NGram(2, 3), costs),
        seq_of([5, 6, 7, 5, 6]),
    )
    rows = [Row(seq, 1, True, None), Row(seq_of([1]), 16, True, 0)]
    drafting.level(Step(1, rows, True, 1, (), (), (), {}), may_lag=False)
    for right, found in ((8, {seq: 1}), (6, {})):
        for _ in range(200):
            drafting.saw({(1, 1, 1): right, (1, 0, 0): 10 - right})
        assert drafting.num_drafts(view_of(seq)) == found


def test_drafts_wait_until_plain_steps_have_shown_their_cost():
    """A load may have no plain steps that show it, so they do not wait for ever."""
    costs, seq = costs_of(lambda rows, drafts, chunks: 1.0 + 0.1 * drafts), seq_of([5, 6, 7, 5, 6])
    for after in (3, 1000):
        drafting, asked = seen(Drafting(BUCKETS, lambda: NGram(2, 3), costs)), []
        costs.sure = lambda rows, after=after, asked=asked: asked.append(rows) or len(asked) > after
        while not drafting.num_drafts(view_of(seq)):
            pass
        assert len(asked) == min(after, UNSURE) + 1


def test_a_drafter_of_the_host_is_tried_again():
    costs = costs_of(lambda rows, drafts, chunks: 1.0 + 0.5 * drafts)
    drafting, seq = Drafting(BUCKETS, lambda: NGram(2, 3), costs), seq_of([5, 6, 7, 5, 6])
    for _ in range(100):
        drafting.saw({(3, 0, 0): 1})
    assert drafting.num_drafts(view_of(seq)) == {}
    for _ in range(300):
        drafting.worth.spent(1, 0, 1.0, 1.0)
    assert drafting.num_drafts(view_of(seq)) == {seq: 1}


def test_a_step_is_expected_to_have_the_prompts_of_the_last():
    asked = []
    costs = costs_of(lambda rows, drafts, chunks: asked.append(chunks) or 1.0)
    drafting, seqs = Drafting(BUCKETS, None, costs), [seq_of([1]) for _ in range(3)]
    rows = [Row(seqs[0], 1, True, None), Row(seqs[1], 7, True, 0), Row(seqs[2], 5, False, 0)]
    for step in (Step(1, rows, True, 1, (), (), (), {}), Step(2, rows[:1], True, 1, (), (), (), {})):
        drafting.level(step, may_lag=False)
        drafting.num_drafts(view_of(*seqs))
    assert asked[1] == (12, 2)
    assert asked[-1] == (0, 0)


def test_a_step_after_one_with_drafts_has_their_shape_where_states_lag_behind():
    drafting, seqs = Drafting(BUCKETS, lambda: NGram(2, 3)), [seq_of([1]) for _ in range(2)]
    for slot, seq in enumerate(seqs, 1):
        seq.slot = slot

    def level(rows, drafts, left=(), may_lag=True):
        rows = [Row(seq, 1 + drafts.get(seq, 0), True, None) for seq in rows]
        return drafting.level(Step(1, rows, True, len(rows), left, (), (), drafts), may_lag)

    assert level(seqs, {}) == 0
    assert level(seqs, {seqs[0]: 2}) == 2
    assert level(seqs, {seqs[1]: 1}) == 1
    assert not drafting.unsettled  # a step with the same rows and drafts has the same shape
    assert level(seqs[:1], {}) == 0  # its last step had none
    assert level(seqs, {}) == 1  # the other's had one
    assert drafting.unsettled  # the next step has a shape without drafts
    assert level(seqs, {}) == 0
    assert not drafting.unsettled
    assert level(seqs, {seqs[0]: 3}) == 3
    assert level(seqs[1:], {}, left=[1]) == 0
    assert not drafting.lagging
    assert level(seqs, {seqs[0]: 3}, may_lag=False) == 3
    assert level(seqs, {}, may_lag=False) == 0


def test_a_choice_that_finds_nothing_rests():
    """One step stands for those of a rest, and the loop does not ask before their end."""
    costs = costs_of(lambda rows, drafts, chunks: 1.0 + drafts)
    drafting, seq, spent = Drafting(BUCKETS, None, costs), seq_of([1, 2, 3]), []
    for _ in range(100):
        drafting.saw({(1, 0, 0): 1})
    drafting.worth.spent = lambda rows, brought, seconds, plain, steps: spent.append(steps)
    drafting.worth.idle = lambda cost: {1: 5, 6: 1, 7: 1000, 71: 0}[asked[-1]]
    drafting.places, shape, asked = 0, BUCKETS.choose(1, 1), []
    for index in range(1, 72):
        if index >= drafting.rest_until:
            asked.append(index)
            drafting.num_drafts(view_of(seq, step=index))
        step = Step(index, [Row(seq, 1, True, None)], True, 1, (), (), ())
        drafting.launched(step, shape)
        drafting.book(step, shape, drafting.spent(step, shape, shape))
    assert asked == [1, 6, 7, 71]
    assert spent == [5, 1, 64, 1]
    drafting.worth.choose = lambda available, rows, cost: 1
    drafting.num_drafts(view_of(seq, step=72))
    assert (drafting.rest_until, drafting.places) == (72, 1)


def test_a_rest_ends_with_the_first_step_of_another_adapter():
    """And the books forget the steps of it that did not run. A prompt that goes on has no row to decode."""
    costs, noted = costs_of(lambda rows, drafts, chunks: 1.0 + drafts), []
    drafting = Drafting(BUCKETS, None, costs)
    drafting.worth.choose, drafting.worth.idle = lambda *args: 0, lambda cost: 40
    drafting.worth.spent = lambda rows, brought, seconds, plain, steps: noted.append(steps)
    base, other = seq_of([1]), seq_of([1, 2], adapter=SimpleNamespace(digest=b"a"))
    drafting.num_drafts(view_of(base, step=1))
    shape, decode = BUCKETS.choose(1, 1), Row(base, 1, True, None)
    for index, rows, until in (
        (1, [decode], 41),
        (5, [decode], 41),
        (6, [decode, Row(other, 1, False, 0)], 41),
        (7, [Row(other, 1, False, 0)], 41),
        (9, [decode, Row(other, 1, True, 1)], 10),
        (10, [decode, Row(other, 1, True, None)], 10),
    ):
        step = Step(index, rows, True, sum(row.start is None for row in rows), (), (), (), {})
        drafting.level(step, may_lag=False)
        assert drafting.rest_until == until
        drafting.book(step, shape, drafting.spent(step, shape, shape))
    assert noted[:2] == [40, -31]


def test_many_adapters_leave_little_behind():
    drafting = Drafting(BUCKETS, None)
    mine = drafting.trials
    for number in range(1000):
        drafting.num_drafts(view_of(seq_of([1], adapter=SimpleNamespace(digest=number))))
        if not number % 100:
            drafting.num_drafts(view_of(seq_of([1])))
            assert drafting.trials is mine
    assert len(drafting._others) <= ADAPTERS


def test_padding_tokens_have_ids_of_the_vocabulary(monkeypatch):
    """No step writes these ids, and all are embedded: memory that was not cleared once ended a step."""
    plain = Arena.alloc

    def dirty(arena, *args):
        made = plain(arena, *args)
        made.view_as(uint8).numpy()[:] = 255
        return made

    monkeypatch.setattr(Arena, "alloc", dirty)
    cpu = Device("cpu")
    made = Proposals.allocate(Arena(cpu, 1 << 20), Stream(cpu), 4, 64, width=16, dtype=np.dtype(np.float32))
    assert not made.next_ids.numpy().any()
