"""Bound: where measured values usually lie, and which one is out of line."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARM = 16
"""Values before a bound says that one is out of line."""
MEMORY = 256
"""About as many values as a bound remembers."""


@dataclass(slots=True)
class Bound:
    """A running mean and mean deviation. A value is out of line above both `factor` means and mean + `deviations`
    deviations.

    It learns from at most the limit, so one value out of line moves it little, and a lasting change is learned.
    """

    factor: float = 2.0
    deviations: float = 10.0
    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    limit: float = math.inf
    """The largest value in line; infinite before WARM values."""

    def take(self, value: float) -> bool:
        """Learn from a value. Returns whether it is out of line."""
        limit = self.limit
        learned = value if value < limit else limit
        self.count = count = self.count + 1
        weight = 1 / count if count < MEMORY else 1 / MEMORY
        away = learned - self.mean
        if count > 1:
            self.deviation += weight * ((away if away > 0 else -away) - self.deviation)
        self.mean = mean = self.mean + weight * away
        if count >= WARM:
            by_factor, by_deviation = self.factor * mean, mean + self.deviations * self.deviation
            self.limit = by_factor if by_factor > by_deviation else by_deviation
        return value > limit
