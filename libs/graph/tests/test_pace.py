"""Prediction meets measurement: what is counted, and what is an outlier."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from openinfer.graph import StepPace
from openinfer.graph.buckets import Shape
from openinfer.graph.pace import OUTLIERS_KEPT

SHAPE = Shape(8, 8, 1)


@dataclass
class Asked:
    """A prediction that takes 10 ms and remembers what it was asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        self.asked.append((kv_tokens, qk_pairs))
        return 0.01


def make() -> tuple[StepPace, Asked]:
    asked = Asked()
    return StepPace({SHAPE: asked}), asked


@pytest.mark.parametrize("seed", range(20))
def test_the_workload_is_what_counting_every_row_gives(seed: int) -> None:
    rng = random.Random(seed)
    pace, asked = make()
    lengths: dict[int, int] = {}
    expected = []
    for _ in range(40):
        for slot in rng.sample(range(1, 9), rng.randrange(3)):
            lengths[slot] = rng.randrange(50)  # who was there has left
            pace.join(slot, lengths[slot])
        if not lengths:
            continue
        slots = rng.sample(sorted(lengths), rng.randint(1, len(lengths)))
        counts = [rng.choice([1, 1, 1, 17]) for _ in slots]
        pace.change(np.array(slots, np.int32), np.array(counts, np.int32))
        # A step with a chunk changes the batch after it; decode rows go on.
        for _ in range(1 if max(counts) > 1 else rng.randint(1, 5)):
            expected.append(
                (
                    sum(lengths[s] + c for s, c in zip(slots, counts, strict=True)),
                    sum(c * lengths[s] + c * (c + 1) // 2 for s, c in zip(slots, counts, strict=True)),
                )
            )
            pace.launch(SHAPE, timed=True)
            for slot, count in zip(slots, counts, strict=True):
                lengths[slot] += count
    assert asked.asked == expected
    assert len(expected) > 40


def test_times_add_up_by_shape_and_outliers_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    pace, _ = make()
    pace.join(1, 100)
    pace.change(np.array([1], np.int32), np.array([1], np.int32))
    with caplog.at_level(logging.WARNING):
        for seconds in (0.012, 0.019, 0.05):
            pace.launch(SHAPE, timed=True)
            outlier = pace.result(seconds)
            assert (outlier is not None) == (seconds > 0.02)
    total = pace.totals[SHAPE]
    assert (total.steps, total.predicted_s, total.measured_s) == (
        3,
        pytest.approx(0.03),
        pytest.approx(0.081),
    )
    assert "50.00 ms where 10.00 were predicted (decode, 8 rows, 103 cached tokens)" in caplog.text
    for n in range(100):
        pace.launch(SHAPE, timed=True)
        pace.result(1.0 + n)
    assert len(pace.outliers) == OUTLIERS_KEPT
    assert pace.outliers[-1].measured_s == 100.0
    assert pace.num_outliers == 101
    assert caplog.text.count("outlier") <= OUTLIERS_KEPT + 4  # not a line a step


def test_steps_that_wait_for_the_host_or_have_no_prediction_are_not_counted() -> None:
    pace, _ = make()
    pace.join(1, 10)
    pace.change(np.array([1], np.int32), np.array([1], np.int32))
    pace.launch(SHAPE, timed=False)
    pace.launch(Shape(16, 8, 16), timed=True)
    pace.launch(SHAPE, timed=True)
    assert [pace.result(s) for s in (9.0, 9.0, None)] == [None] * 3
    assert not pace.totals


def test_shapes_have_names_of_their_own() -> None:
    shapes = [(8, 8, 1), (16, 16, 1), (16, 8, 16), (16, 1, 16), (32, 8, 32)]
    assert len({str(Shape(*shape)) for shape in shapes}) == len(shapes)


def test_the_account_is_given_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("openinfer.graph.pace.time.monotonic", lambda: now)
    pace, _ = make()
    assert pace.account(whole=True) == []
    pace.launch(SHAPE, timed=True)
    pace.result(0.012)
    ((name, total),) = pace.account(whole=False)
    assert (name, total.steps, total.measured_s) == ("decode, 8 rows", 1, 0.012)
    assert pace.account(whole=False) == []
    assert len(pace.account(whole=True)) == 1
    now += 1.0
    assert len(pace.account(whole=False)) == 1


def test_without_predictions_nothing_is_counted() -> None:
    pace = StepPace()
    pace.join(1, 10)
    pace.change(np.array([1], np.int32), np.array([1], np.int32))
    pace.launch(SHAPE, timed=True)
    assert pace.result(9.0) is None
    assert pace.account(whole=True) == []


def test_steps_with_drafts_count_all_their_tokens_and_take_back_the_rejected() -> None:
    pace, asked = make()
    pace.join(1, 10)
    pace.join(2, 20)
    pace.change(np.array([1, 2], np.int32), np.array([3, 1], np.int32))
    pace.launch(SHAPE, timed=True)
    pace.fall_short(1, 2)  # the first step kept one token of three
    pace.launch(SHAPE, timed=True)
    pace.change(np.array([1], np.int32), np.array([1], np.int32))
    pace.launch(SHAPE, timed=True)
    assert [kv for kv, _ in asked.asked] == [13 + 21, 14 + 22, 15]
