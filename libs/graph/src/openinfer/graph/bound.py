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

    @property
    def limit(self) -> float:
        """The largest value in line; infinite before WARM values."""
        if self.count < WARM:
            return math.inf
        return max(self.factor * self.mean, self.mean + self.deviations * self.deviation)

    def take(self, value: float) -> bool:
        """Learn from a value. Returns whether it is out of line."""
        limit = self.limit
        learned = min(value, limit)
        self.count += 1
        weight = max(1 / self.count, 1 / MEMORY)
        self.deviation += weight * (abs(learned - self.mean) - self.deviation) if self.count > 1 else 0.0
        self.mean += weight * (learned - self.mean)
        return value > limit
