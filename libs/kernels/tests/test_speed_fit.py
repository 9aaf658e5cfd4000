"""Speeds are found again from times that they gave."""

import dataclasses
import random

import pytest

from openinfer.kernels import Cost, Speed, Workload
from openinfer.kernels.speed_fit import MeasuredStep, errors, fit_speed

TRUE = Speed(3.1e12, 410e12, 6e-6)
FIRST = Speed(4e12, 600e12, 4e-6)


@dataclasses.dataclass
class Fake:
    """A call with a cost of its own."""

    bytes: int
    flops: int
    commands: tuple[None, ...]
    times: int = 1

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
    found = fit_speed(steps, FIRST)
    assert found == pytest.approx(TRUE, rel=1e-6)
    assert max(map(abs, errors(steps, found))) < 1e-6
    assert max(map(abs, errors(steps, FIRST))) > 0.05


def test_noise_moves_them_little() -> None:
    assert fit_speed(some(random.Random(1), 60, noise=0.02), FIRST) == pytest.approx(TRUE, rel=0.1)


def test_a_speed_that_no_step_depends_on_stays() -> None:
    decode = [step(Fake(size * 10**9, 10**6, (None,) * 100)) for size in (2, 3, 5, 9)]
    found = fit_speed(decode, FIRST)
    assert found.flops_per_s == pytest.approx(FIRST.flops_per_s)
    assert found.bytes_per_s == pytest.approx(TRUE.bytes_per_s)
    assert found.kernel_s == pytest.approx(TRUE.kernel_s)


def test_steps_without_time_are_refused() -> None:
    with pytest.raises(ValueError, match="0 steps were given"):
        fit_speed([], FIRST)
    with pytest.raises(ValueError, match="positive seconds"):
        fit_speed([MeasuredStep([], 0.0)], FIRST)
