"""The counters of a sequence follow from the loop's two step counters."""

from openinfer.scheduler import Seq, SeqState
from openinfer.scheduler.sequence import Clock


def decoding(base: int, entered: int, clock: Clock) -> Seq:
    seq = Seq(1, [5] * base, 10)
    seq.max_len = base + 10
    seq.state = SeqState.DECODE
    seq.clock, seq.base, seq.entered, seq.prefilled = clock, base, entered, base - 2
    return seq


def test_a_decode_row_advances_with_the_step_counters():
    clock = Clock(launched=9, collected=7)
    seq = decoding(20, 7, clock)
    assert (seq.confirmed, seq.bound) == (20, 22)
    clock.launched, clock.collected = 12, 11
    assert (seq.confirmed, seq.bound) == (24, 25)


def test_until_the_prompts_last_chunk_is_read_confirmed_is_what_the_chunks_before_brought():
    seq = decoding(20, 7, Clock(launched=8, collected=6))
    assert (seq.confirmed, seq.bound) == (18, 21)


def test_the_bound_stops_before_the_last_token_which_is_never_fed():
    assert decoding(20, 7, Clock(launched=100, collected=8)).bound == 29


def test_outputs_are_what_the_owner_appended_and_identity_is_the_object():
    tokens = [1, 2, 3]
    seq, twin = Seq(1, tokens, 4), Seq(1, tokens, 4)
    tokens.append(9)
    assert (seq.prompt_len, seq.num_output) == (3, 1)
    assert seq != twin
    assert len({seq, twin}) == 2
