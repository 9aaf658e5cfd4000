"""Speeds are found again from times that they gave."""

import dataclasses
import random

import pytest

from openinfer.kernels import GPUS, H200, Cost, Speed, Workload
from openinfer.kernels.measure.speed_fit import MeasuredCalls, MeasuredStep, errors, fit_lines, fit_speed

TRUE = Speed(3.1e12, 410e12, 6e-6)
FIRST = Speed(4e12, 600e12, 4e-6)
FIGURES = GPUS[H200.gpu]._replace(fitted=FIRST, ops={})


@dataclasses.dataclass
class Fake:
    """A call with a cost of its own."""

    bytes: int
    flops: int
    commands: tuple[None, ...]
    times: int = 1
    tokens: int = 8
    kind: str = "plain"

    def cost(self, workload: Workload) -> Cost:
        return Cost(self.bytes, self.flops)


def step(*calls: Fake, noise: float = 0.0) -> MeasuredStep:
    seconds = 0.0
    for one in calls:
        floor = max(one.bytes / TRUE.bytes_per_s, one.flops / TRUE.flops_per_s)
        seconds += one.times * (floor + len(one.commands) * TRUE.kernel_s)
    return MeasuredStep([(calls, Workload(1, 1, 1, 1))], seconds * (1 + noise))  # type: ignore[arg-type]


def some(rng: random.Random, count: int, noise: float = 0.0) -> list[MeasuredStep]:
    return [
        step(
            Fake(rng.randrange(10**9, 10**10), 10**9, (None,) * rng.randrange(50, 300)),
            Fake(10**7, rng.randrange(10**11, 10**13), (None,), 3),
            noise=rng.uniform(-noise, noise),
        )
        for _ in range(count)
    ]


def test_they_are_found_again() -> None:
    steps = some(random.Random(0), 12)
    found = fit_speed(steps, FIGURES)
    assert found == pytest.approx(TRUE, rel=1e-6)
    assert max(map(abs, errors(steps, FIGURES.at(found)))) < 1e-6
    assert max(map(abs, errors(steps, FIGURES))) > 0.05


def test_noise_moves_them_little() -> None:
    assert fit_speed(some(random.Random(1), 60, noise=0.02), FIGURES) == pytest.approx(TRUE, rel=0.1)


def test_a_speed_that_no_step_depends_on_stays() -> None:
    decode = [step(Fake(size * 10**9, 10**6, (None,) * 100)) for size in (2, 3, 5, 9)]
    found = fit_speed(decode, FIGURES)
    assert found.flops_per_s == pytest.approx(FIRST.flops_per_s)
    assert found.bytes_per_s == pytest.approx(TRUE.bytes_per_s)
    assert found.kernel_s == pytest.approx(TRUE.kernel_s)


def test_steps_without_time_are_refused() -> None:
    with pytest.raises(ValueError, match="0 steps were given"):
        fit_speed([], FIGURES)
    with pytest.raises(ValueError, match="positive seconds"):
        fit_speed([MeasuredStep([], 0.0)], FIGURES)


def test_an_op_with_a_line_moves_with_the_speed_of_all() -> None:
    """Half as fast as other ops: its bytes count twice."""
    half = FIGURES._replace(ops={"slow": ((1, Speed(2e12, 300e12, 8e-6)),)})
    steps = []
    for size in (2, 3, 5, 9):
        plain, slow = Fake(size * 10**9, 0, (None,) * 50), Fake(10**9, 0, (None,), kind="slow")
        seconds = plain.bytes / 3e12 + 50 * 6e-6 + slow.bytes / 1.5e12 + 12e-6
        steps.append(MeasuredStep([((plain, slow), Workload(1, 1, 1, 1))], seconds))  # type: ignore[arg-type]
    found = fit_speed(steps, half)
    assert (found.bytes_per_s, found.kernel_s) == pytest.approx((3e12, 6e-6), rel=1e-6)
    assert half.at(found).ops["slow"][0][1][0] == pytest.approx(1.5e12, rel=1e-6)


def test_lines_are_found_again() -> None:
    calls = []
    for tokens, part in ((1, 0.3), (64, 0.8), (2048, 1.2)):
        for size, flops in ((10**6, 10**6), (10**8, 10**9), (10**7, 10**12)):
            seconds = 5 * 7e-6 + Cost(size, flops).floor_s(part * 4e12, part * 600e12)
            calls.append(MeasuredCalls(tokens, 5, Cost(size, flops), seconds))
    lines = fit_lines(calls, FIRST)
    assert [tokens for tokens, _ in lines] == [1, 64, 2048]
    assert [speed.kernel_s for _, speed in lines] == pytest.approx([7e-6] * 3, rel=0.05)
    assert [speed.bytes_per_s / 4e12 for _, speed in lines] == pytest.approx([0.3, 0.8, 1.2], rel=0.05)
    with pytest.raises(ValueError, match="positive seconds"):
        fit_lines([MeasuredCalls(1, 1, Cost(1, 1), 0.0)], FIRST)
