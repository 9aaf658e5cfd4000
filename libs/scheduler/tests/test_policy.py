"""FirstCome's answers, alone."""

import pytest

from openinfer.scheduler import Decision, FirstCome, InvalidSetup, Seq, SeqState, View


def view(*, max_rows=8, free_slots=8, num_decode=0, prefilling=(), running=()):
    return View(
        1,
        0.0,
        max_rows,
        free_slots,
        100,
        num_decode,
        dict.fromkeys(range(num_decode)),
        dict.fromkeys(prefilling),
        dict.fromkeys(running),
        0,
        len,
    )


def waiting(policy, *lengths):
    seqs = [Seq(number, [1] * length, 4) for number, length in enumerate(lengths)]
    for seq in seqs:
        policy.on_submit(seq)
    return seqs


def prefilling(length, done):
    seq = Seq(99, [1] * length, 4)
    seq.state, seq.target, seq.scheduled = SeqState.PREFILL, length, done
    return seq


def test_admits_in_order_of_arrival_as_many_as_there_are_slots():
    policy = FirstCome(64)
    seqs = waiting(policy, 5, 5, 5)
    decision = policy.plan(view(free_slots=2))
    assert list(decision.admit) == seqs[:2]
    assert decision.admit_tokens == 64


def test_decode_rows_come_first_then_chunks_then_newcomers():
    policy = FirstCome(20, max_chunk_tokens=12)
    [newcomer] = waiting(policy, 5)
    old = prefilling(30, 10)
    decision = policy.plan(view(num_decode=3, prefilling=[old]))
    assert decision.chunks == {old: 12, newcomer: 12}
    assert decision.admit_tokens == 20 - 3 - 12


def test_a_chunk_is_never_more_than_what_remains():
    old = prefilling(30, 27)
    assert FirstCome(20).plan(view(prefilling=[old])).chunks == {old: 3}


def test_nobody_is_admitted_when_the_budget_is_spent():
    policy = FirstCome(8)
    waiting(policy, 5)
    old = prefilling(30, 0)
    assert policy.plan(view(num_decode=2, prefilling=[old])) == Decision({old: 6})


def test_a_preempted_sequence_goes_to_the_head_and_an_aborted_one_disappears():
    policy = FirstCome(64)
    first, second, third = waiting(policy, 5, 5, 5)
    policy.on_admit(first)
    first.num_preemptions = 1
    policy.on_preempt(first)
    policy.on_finish(second)
    assert list(policy.plan(view()).admit) == [first, third]


def test_the_victim_is_the_latest_admitted():
    seqs = [Seq(number, [1], 1) for number in range(3)]
    assert FirstCome(64).victim(view(running=seqs)) is seqs[2]


def test_a_budget_that_could_starve_prefill_is_refused():
    with pytest.raises(InvalidSetup, match=r"max_batched_tokens is 4, it must be at least max_rows \(8\)"):
        FirstCome(4).plan(view(max_rows=8))
    with pytest.raises(InvalidSetup, match="at least 1"):
        FirstCome(0)
    with pytest.raises(InvalidSetup, match="at least 1"):
        FirstCome(4, max_chunk_tokens=0)
