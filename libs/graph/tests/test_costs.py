"""StepCosts: predictions, corrected by what steps took."""

from types import SimpleNamespace

import pytest

from openinfer.graph import Buckets, StepCosts, StepPace

BUCKETS = Buckets.up_to(8, 64, (1, 2, 4), 2)


def made(predicted=True):
    pace = StepPace()
    if predicted:
        pace.predictions = {
            shape: SimpleNamespace(seconds=lambda kv, pairs, n=shape.tokens: n + kv / 100 + pairs / 1000)
            for shape in BUCKETS.segments()
        }
    return StepCosts(BUCKETS, pace)


def test_a_prediction_has_the_present_cached_tokens():
    costs = made()
    costs.pace._kv_tokens = 1000
    assert costs.decode(3, 2) == pytest.approx(12 + 10 + 3)
    assert costs.decode(3, 1) == pytest.approx(8 + 10 + 2)
    assert costs.decode(3, 0) == pytest.approx(4 + 10 + 1)
    costs.pace._kv_tokens = 1010
    assert costs.decode(3, 0) == pytest.approx(15)  # hardly changed
    costs.pace._kv_tokens = 2000
    assert costs.decode(3, 0) == pytest.approx(4 + 20 + 2)


def test_beside_prompts_any_number_of_drafts_costs_as_the_most():
    """A step with prompts is recorded for the most drafts of a row."""
    costs = made(predicted=False)
    for drafts in (0, 1):
        for _ in range(4):
            costs.took(BUCKETS.choose(16, 4, drafts=drafts), 3.0 + drafts)
    assert costs.decode(3, 0, (10, 1)) == 3.0
    assert costs.decode(3, 1, (10, 1)) == costs.decode(3, 2, (7, 1)) == 4.0
    assert costs.decode(3, 1) is None


def test_steps_that_take_longer_correct_their_shape_first():
    costs, shape = made(), BUCKETS.choose(8, 8)
    for _ in range(60):
        costs.took(shape, 2 * 8.0)
    assert costs.decode(8, 0) == pytest.approx(16)
    other = costs.decode(1, 0)
    assert 1.5 < other <= 2  # other shapes are expected to be as late
    costs.took(shape, 1e6)
    assert costs.decode(8, 0) < 17.1  # one step that was held up counts little
    for _ in range(60):
        costs.took(shape, 8.0)
    assert costs.decode(8, 0) < 8.5


def test_the_first_step_of_a_shape_says_nothing():
    costs, shape = made(), BUCKETS.choose(8, 8)
    costs.took(shape, 30.0)
    assert costs.decode(8, 0) == costs.decode(1, 0) * 8 == 8.0
    costs.took(shape, 9.0)
    assert costs.decode(8, 0) == pytest.approx(9.0)


def test_steps_that_are_seen_late_and_early_by_turns_cost_their_mean():
    """A host that sees the end of one step late takes the next for short."""
    costs, shape = made(), BUCKETS.choose(8, 8)
    for _ in range(100):
        costs.took(shape, 6.0)
        costs.took(shape, 14.0)
    assert costs.decode(8, 0) == pytest.approx(10, rel=0.05)


def test_without_predictions_a_shape_costs_what_its_steps_took():
    costs = made(predicted=False)
    for _ in range(4):  # the first may be held up
        assert costs.decode(2, 1) is None
        costs.took(BUCKETS.choose(4, 2, drafts=1, chunks=False), 0.25)
    assert costs.decode(2, 1) == 0.25
    assert costs.decode(2, 0) is None


def test_drafts_beyond_the_largest_step_cost_what_that_costs():
    costs = made()
    costs.buckets = Buckets.up_to(8, 16, (1, 2, 4), 2)
    assert costs.decode(8, 2) == costs.seconds(costs.buckets.choose(16, 8, drafts=2))


def test_uneven_steps_count_until_even_ones_have_run():
    """The time of an uneven step has work for its neighbours in it."""
    costs, drafting = made(predicted=False), BUCKETS.choose(4, 2, drafts=1, chunks=False)
    for _ in range(8):
        costs.took(drafting, 5.0, even=False)
    assert costs.seconds(drafting) == 5.0
    for _ in range(3):
        costs.took(drafting, 2.0)
    assert costs.seconds(drafting) == 5.0
    costs.took(drafting, 2.0)
    assert costs.seconds(drafting) == 2.0
    costs.took(drafting, 5.0, even=False)
    assert costs.seconds(drafting) == 2.0


def test_a_predicted_plain_step_costs_what_even_steps_took():
    costs, plain, drafting = made(), BUCKETS.choose(8, 8), BUCKETS.choose(16, 8, drafts=1, chunks=False)
    for shape in (plain, drafting):
        for _ in range(100):
            costs.took(shape, 40.0, even=False)
    assert costs.decode(8, 0) == 8.0  # else drafts would seem to cost little beside it
    assert costs.decode(8, 1) == pytest.approx(32, rel=0.3)
    for _ in range(4):
        costs.took(plain, 12.0)
    assert costs.decode(8, 0) == pytest.approx(12)


def test_a_plain_step_is_sure_once_it_was_predicted_or_ran():
    assert made().sure(8)
    costs, plain = made(predicted=False), BUCKETS.choose(8, 8)
    for steps in range(4):
        assert not costs.sure(8), steps
        costs.took(plain, 12.0)
    assert costs.sure(8)
    assert not costs.sure(1)
