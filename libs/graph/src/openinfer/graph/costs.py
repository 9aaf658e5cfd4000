"""StepCosts: how long a step of a shape takes, as predicted and as it took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.pace import StepPace

RECENT = 1 / 16
"""The least weight of a step in its shape's average. Long and short steps have the same weight: a host that sees the
end of one step late takes the next for short, and only their mean is right."""
MOST = 2.0
"""A step counts as at most this many times the average, or as this part of it: it was perhaps held up."""
TRIED = 4
"""Steps of a shape before its cost is known, where nothing is predicted."""
FRESH = 1 / 32
"""A prediction is used again while the number of cached tokens has changed by no more than this part."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of steps of an engine by their shapes.

    A prediction is multiplied by what steps of the shape took in terms of theirs. So the host's work counts where a
    step waits for it. Where nothing is predicted, the shape costs what its steps took.
    """

    buckets: Buckets
    pace: StepPace
    # Ratios, or seconds where nothing is predicted.
    _averages: dict[Shape, float] = field(default_factory=dict)
    _steps: Counter[Shape] = field(default_factory=Counter)
    _ratio: float = 1.0  # of all shapes
    _predicted: dict[Shape, tuple[int, float]] = field(default_factory=dict)  # cached tokens, and seconds

    def decode(self, rows: int, drafts: int, chunks: tuple[int, int] = (0, 0)) -> float | None:
        """Seconds of a step in which each of `rows` decode rows has `drafts` drafts; None: not known yet. chunks:
        tokens and rows of the prompts beside them."""
        tokens = min(rows * (1 + drafts) + chunks[0], self.buckets.max_tokens)
        rows = min(rows + chunks[1], self.buckets.max_rows)
        return self.seconds(self.buckets.choose(tokens, rows, drafts=drafts, chunks=chunks[1] > 0))

    def seconds(self, shape: Shape) -> float | None:
        """Seconds of a step of a shape with the present cached tokens; None: not known yet."""
        predicted, average = self._prediction(shape), self._averages.get(shape)
        if predicted is None:
            return average if self._steps[shape] >= TRIED else None
        return predicted * (self._ratio if average is None else average)

    def took(self, shape: Shape, seconds: float) -> None:
        """A step of a shape took so long, by the host's clock and with the step before done when it began."""
        prediction, steps = self._prediction(shape), self._steps[shape]
        value = seconds / (1.0 if prediction is None else prediction)
        if steps:  # the first is often held up, because the device has not run the shape yet
            average = self._averages.get(shape, value if prediction is None else self._ratio)
            if prediction is not None:
                self._ratio = _moved(self._ratio, value, RECENT)
            self._averages[shape] = _moved(average, value, max(RECENT, 1 / steps))
        self._steps[shape] += 1

    def _prediction(self, shape: Shape) -> float | None:
        prediction = self.pace.predictions.get(shape)
        if prediction is None:
            return None
        kv_tokens, _ = self.pace.workload
        known = self._predicted.get(shape)
        if known is None or abs(kv_tokens - known[0]) > FRESH * known[0]:
            queries = (1 + shape.drafts) if shape.longest == 1 + shape.drafts else 1
            known = self._predicted[shape] = kv_tokens, prediction.seconds(kv_tokens, kv_tokens * queries)
        return known[1]


def _moved(average: float, value: float, weight: float) -> float:
    return average + (min(max(value, average / MOST), MOST * average) - average) * weight
