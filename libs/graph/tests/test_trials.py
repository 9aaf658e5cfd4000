"""When drafts are let go on, by what spans of steps with and without them took."""

import pytest

from openinfer.graph.runner.trials import HELD_UP, LEAST, MOST, SPAN, Trials


def run(trials, spans, on, off=1.0, wanted=True):
    """Which of the spans may have drafts, where a step takes `on` of its worth with drafts and `off` without."""
    found = []
    for _ in range(spans):
        found.append(trials.drafts)
        for _ in range(SPAN):
            drafts = trials.drafts and wanted
            trials.took(on if drafts else off, 1.0, drafts)
    return found


def test_both_ways_are_tried_and_the_better_one_goes_on():
    assert run(Trials(), 10, 0.97) == [True, False, *[True] * 8]
    assert run(Trials(), 20, 1.1) == [True, *[False] * 19]


def test_drafts_that_clearly_pay_put_off_the_other_way():
    """For as long as a span of it costs PART of the time."""
    assert run(Trials(), 200, 0.5).count(False) == 0
    for on, first in ((0.9, 29), (0.8, 63), (0.5, 251)):
        found = run(Trials(), first + 2, on)
        assert found.index(False) == first
        assert found.count(False) == 1
    trials = Trials()
    assert not all(run(trials, 300, 0.5, off=0.4))  # and finds out that it was better
    assert not trials.drafts


@pytest.mark.parametrize(("on", "better"), [(0.5, True), (0.95, True), (1.05, False), (2.0, False)])
def test_the_worse_way_has_a_small_part_of_the_time(on, better):
    trials = Trials()
    run(trials, 2, on)
    worse = run(trials, 1000, on).count(not better)
    assert worse >= 2
    assert worse * abs(on - 1) / min(on, 1) <= 0.006 * 1000
    assert worse >= 1000 // (MOST + 1)
    assert worse <= 1000 // (LEAST + 1)


def test_drafts_that_begin_to_pay_are_let_go_on():
    trials = Trials()
    assert not any(run(trials, 10, 1.1)[1:])
    run(trials, 60, 0.8)
    assert run(trials, 10, 0.8).count(True) >= 9


def test_without_spans_of_drafts_nothing_is_forbidden():
    trials = Trials()
    assert all(run(trials, 200, 1.0, wanted=False))
    for n in range(50 * SPAN):  # few steps have drafts
        trials.took(1.0, 1.0, n % 8 == 0)
        assert trials.drafts


def test_a_rest_ends_with_the_spans_without_drafts():
    trials = Trials()
    run(trials, 2, 1.1)
    assert not trials.drafts
    for left in range(trials.rest, 0, -1):
        assert trials.rest == left
        trials.took(1.0, 1.0, False)
    assert trials.drafts
    assert trials.rest == 0


def test_a_step_that_something_held_up_counts_for_a_while():
    trials = Trials()
    run(trials, 1, 0.9)
    for n in range(SPAN):
        trials.took(1e3 if n == 20 else 1.0, 1.0, False)
    assert trials.drafts
    run(trials, 2 * MOST, 1.1)
    assert run(trials, 100, 1.1).count(True) <= 10
    assert HELD_UP < SPAN
