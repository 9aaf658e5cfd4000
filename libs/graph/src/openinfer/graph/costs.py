"""StepCosts: how long a step of a shape takes, as predicted and as it took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.pace import StepPace

SLOWER, FASTER = 1 / 16, 1 / 2
"""The weight of a step in its shape's average. A slow one counts less, because it was perhaps held up: a shape that
looks slow by chance would not be taken again."""
MOST = 3.0
"""A step counts as at most this many times the average."""
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
    _averages: dict[Shape, float] = field(
        default_factory=dict
    )  # ratios, or seconds where nothing is predicted
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

    def took(self, shape: Shape, seconds: float, device_s: float = 0.0) -> None:
        """A step of a shape took so long, by the host's clock and with the step before done when it began. device_s: by
        the device's clock. A step is never shorter. Where the host was late to see the end of the step before, its own
        clock says too little."""
        prediction = self._prediction(shape)
        value = max(seconds, device_s) / (1.0 if prediction is None else prediction)
        if self._steps[shape]:  # the first is often held up, because the device has not run the shape yet
            if prediction is not None:
                self._ratio = _moved(self._ratio, value)
            self._averages[shape] = _moved(self._averages.get(shape, value), value)
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


def _moved(average: float, value: float) -> float:
    weight = FASTER if value < average else SLOWER
    return average + (min(value, MOST * average) - average) * weight
