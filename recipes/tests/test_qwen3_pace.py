"""Prediction meets measurement: what is counted, what is an outlier, and what it costs."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from openinfer.kernels import H200, SPEEDS
from openinfer.recipes.qwen3.bench_host import HostEngine
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.pace import OUTLIERS_KEPT, Pace, name_of
from openinfer.recipes.qwen3.published import config_json
from openinfer.recipes.qwen3.runner import Buckets
from openinfer.recipes.qwen3.segments import step_segments
from openinfer.recipes.qwen3.startup import Options, _pace, decide_sizes, lay_out, make_plan
from openinfer.tensor import Arena, Device, Stream

SHAPE = (8, 8, 1)


@dataclass
class Asked:
    """A prediction that takes 10 ms and remembers what it was asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        self.asked.append((kv_tokens, qk_pairs))
        return 0.01


def make() -> tuple[Pace, Asked]:
    asked = Asked()
    return Pace({SHAPE: asked}), asked  # type: ignore[dict-item]


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
    pace.launch((16, 8, 16), timed=True)
    pace.launch(SHAPE, timed=True)
    assert [pace.result(s) for s in (9.0, 9.0, None)] == [None] * 3
    assert not pace.totals


def test_shapes_have_names_of_their_own() -> None:
    shapes = list(Buckets.up_to(256, 2048).segments())
    assert len({name_of(shape) for shape in shapes}) == len(shapes)


def test_every_step_of_a_published_model_has_a_prediction_near_its_floor() -> None:
    config = Config.parse(config_json("4B"), None)
    sizes = decide_sizes(config, Options(device="cuda"), Device("cuda"))
    buckets = Buckets.up_to(sizes.max_rows, sizes.max_tokens)
    pace = _pace(config, make_plan(config, sizes, buckets, H200), H200)
    assert set(pace.predictions) == set(buckets.segments())
    model = lay_out(config, sizes, Arena(Device("null"), None), Stream(Device("null")), 1)
    for rows, context, prefill in ((1, 1024, 0), (64, 1024, 0), (0, 0, 128), (0, 0, 2048), (63, 512, 512)):
        segments = step_segments(model, buckets, rows, context, prefill)
        workload = segments[0].workload
        shape = buckets.choose(workload.tokens, workload.rows)
        seconds = pace.predictions[shape].seconds(workload.kv_tokens, workload.qk_pairs)
        weights = 8e9 if prefill < 2048 else 0.0
        flops = 2 * 3.6e9 * workload.tokens
        floor = max(weights / 4.59e12, flops / 780e12)
        assert floor < seconds < 4 * floor + 2e-3, (rows, context, prefill)
    assert not _pace(config, make_plan(config, sizes, buckets, H200), None).predictions
    assert H200.gpu in SPEEDS


def test_the_engine_tells_its_times() -> None:
    host = HostEngine(4)
    asked = Asked()
    runner = host.engine.runner
    runner.pace.predictions = dict.fromkeys(runner.buckets.segments(), asked)  # type: ignore[misc]
    host.submit(4)
    host.fill()
    host.steps_us(10)
    host.close()
    stats = host.engine.stats()
    assert sum(t.steps for t in stats.step_times) >= 10
    times = {t.key: t for t in stats.step_times}
    assert times["decode, 4 rows"].predicted_s == pytest.approx(0.01 * times["decode, 4 rows"].steps)
    assert stats.outlier_steps == 0
