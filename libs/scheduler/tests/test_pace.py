"""Pace: the share of prompts follows the objective; and that the loop feeds it."""

import pytest

from openinfer.scheduler import FirstCome, InvalidSetup, Pace, Row, Step
from openinfer.scheduler.sim import LinearCost, SimPool, poisson, simulate


def step(num_decode, prompt_tokens):
    rows = [Row(None, 1, True, None)] * num_decode
    rows += [Row(None, prompt_tokens, False, 0)] * bool(prompt_tokens)
    return Step(1, rows, True, num_decode, [], [], [])


def settle(pace, seconds, turns=60):
    for _ in range(turns):
        pace.observe(step(8, pace.prompt_tokens), seconds(pace.prompt_tokens))
    return pace.prompt_tokens


def test_it_settles_where_a_step_takes_what_it_may():
    pace = Pace(0.010, 4096)
    tokens = settle(pace, lambda tokens: 0.004 + 1e-5 * tokens)
    assert tokens == pytest.approx(600, rel=0.05)
    assert settle(pace, lambda tokens: 0.002 + 2e-5 * tokens) == pytest.approx(
        400, rel=0.05
    )  # the model changed


def test_prompts_always_get_a_little_and_never_more_than_the_budget():
    assert settle(Pace(0.001, 4096), lambda tokens: 0.004) == 64
    assert settle(Pace(0.001, 16), lambda tokens: 0.004) == 16
    assert settle(Pace(0.1, 4096), lambda tokens: 0.004) == 4096


def test_steps_that_say_nothing_change_nothing():
    pace = Pace(0.010, 4096)
    for silent in (step(8, 0), step(0, 4000), step(8, 3)):
        pace.observe(silent, 0.009)
        assert pace.prompt_tokens == 512
    pace.observe(step(8, 3), 0.02)  # a hiccup: at most halved
    assert pace.prompt_tokens == 64
    with pytest.raises(InvalidSetup, match="must be positive"):
        Pace(0.0, 10)


def test_decode_latency_keeps_the_objective_under_long_prompts():
    workload = poisson(60, 4, (64, 64), (400, 400), seed=1)
    workload += poisson(40, 4, (8192, 8192), (8, 8), seed=2)
    reports = {
        tpot_s: simulate(workload, FirstCome(2048, tpot_s=tpot_s), SimPool(20000), LinearCost())
        for tpot_s in (None, 0.010)
    }
    assert reports[None].itl.p99 > 0.020
    assert reports[0.010].itl.p99 < 0.012
    assert reports[0.010].requests_per_s > 0.9 * reports[None].requests_per_s
