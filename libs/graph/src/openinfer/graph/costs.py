"""StepCosts: how long a step of a shape takes, as predicted and as it took."""

from collections import defaultdict
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
class _Seen:
    steps: int = 0
    average: float | None = None
    """A ratio to the prediction, or seconds where nothing is predicted."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of steps of an engine by their shapes.

    A prediction is scaled by measured over predicted time of the shape's steps. So the host's work counts where a
    step waits for it. Where nothing is predicted, the shape costs what its steps took.

    A step is even if the steps before and after it are like it: the host prepares the next step while this one runs. So
    rows that join count as time of the step before theirs, and so does the work for drafts. Uneven steps have an
    average of their own, which counts until TRIED even ones have run.
    """

    buckets: Buckets
    pace: StepPace
    _seen: defaultdict[Shape, tuple[_Seen, _Seen]] = field(  # uneven steps, even ones
        default_factory=lambda: defaultdict(lambda: (_Seen(), _Seen()))
    )
    _shapes: dict[tuple[int, int, tuple[int, int]], Shape] = field(default_factory=dict)  # see decode
    _ratio: float = 1.0  # of all shapes
    _predicted: dict[Shape, tuple[int, float]] = field(default_factory=dict)  # cached tokens, and seconds

    def decode(self, rows: int, drafts: int, chunks: tuple[int, int] = (0, 0)) -> float | None:
        """Seconds of a step in which each of `rows` decode rows has `drafts` drafts; None: not known yet. chunks:
        tokens and rows of the prompts beside them."""
        return self.seconds(self._shape(rows, drafts, chunks))

    def sure(self, rows: int) -> bool:
        """Whether even plain steps of this many decode rows have shown what they cost."""
        shape = self._shape(rows, 0, (0, 0))
        return self._prediction(shape) is not None or self._seen[shape][True].steps >= TRIED

    def seconds(self, shape: Shape) -> float | None:
        """Seconds of a step of a shape with the present cached tokens; None: not known yet."""
        uneven, even = self._seen[shape]
        seen = even if even.steps >= TRIED or uneven.steps < TRIED else uneven
        predicted = self._prediction(shape)
        if predicted is None:
            return seen.average if seen.steps >= TRIED else None
        return predicted * (self._ratio if seen.average is None else seen.average)

    def took(self, shape: Shape, seconds: float, even: bool = True, steps: int = 1) -> None:
        """A step of a shape took so long by the host's clock, after the step before. steps: this is their mean."""
        prediction, seen = self._prediction(shape), self._seen[shape][even]
        if prediction is not None and shape.longest == 1 and not even:
            return  # a plain step that seems long makes drafts seem to pay, and the prediction is nearer
        value = seconds / (1.0 if prediction is None else prediction)
        if seen.steps:  # the first is often held up, because the device has not run the shape yet
            average = seen.average
            if average is None:
                average = value if prediction is None else self._ratio
            recent = 1 - (1 - RECENT) ** steps
            if prediction is not None and even:
                self._ratio = _moved(self._ratio, value, recent)
            seen.average = _moved(average, value, max(recent, steps / (seen.steps + steps - 1)))
        seen.steps += steps

    def _shape(self, rows: int, drafts: int, chunks: tuple[int, int]) -> Shape:
        asked = rows, drafts, chunks
        found = self._shapes.get(asked)
        if found is None:
            tokens = min(rows * (1 + drafts) + chunks[0], self.buckets.max_tokens)
            rows = min(rows + chunks[1], self.buckets.max_rows)
            found = self.buckets.choose(tokens, rows, drafts=drafts, chunks=chunks[1] > 0)
            if not chunks[1]:  # prompts have too many lengths to keep
                self._shapes[asked] = found
        return found

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
