"""StepPace: each step's time beside the predicted one, in sum by the shape that it was recorded in."""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from openinfer.graph.buckets import Shape

log = logging.getLogger("openinfer.graph")

OUTLIER = 2.0
"""A step that took longer than this many times its prediction is kept."""
OUTLIERS_KEPT = 8
TOLD_EVERY_S = 0.5
"""Seconds between two log messages about all shapes, while there is work."""


class Predicted(Protocol):
    """How long a step of one shape should take; openinfer.kernels.Prediction is one."""

    def seconds(self, kv_tokens: int, qk_pairs: int) -> float:
        """Predicted seconds. kv_tokens: cached tokens to read by all rows; qk_pairs: (query, key) pairs to score."""


class Timed(NamedTuple):
    """A step that was read back: its shape, tokens it read from the cache, seconds."""

    shape: Shape
    kv_tokens: int
    predicted_s: float
    measured_s: float

    def __str__(self) -> str:
        return (
            f"{self.measured_s * 1e3:.2f} ms where {self.predicted_s * 1e3:.2f} were predicted "
            f"({self.shape}, {self.kv_tokens} cached tokens)"
        )


@dataclass(slots=True)
class Total:
    """The totals of all timed steps of a shape."""

    steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0


@dataclass(slots=True)
class StepPace:
    """Keeps the times of steps beside their predictions; O(1) a step while the batch is the same.

    predictions: by shape, of all of a step. Without any, on a device that was not measured, nothing is counted.

    A runner reports each sequence that joins, each change of the batch, each launch and each result, with its time.
    Results must come in the order of the launches.
    """

    predictions: Mapping[Shape, Predicted] = field(default_factory=dict)
    totals: dict[Shape, Total] = field(default_factory=dict)
    outliers: deque[Timed] = field(default_factory=lambda: deque(maxlen=OUTLIERS_KEPT))
    num_outliers: int = 0
    last: Timed | None = None
    """The step that was read last, if it was timed and predicted."""
    _told: float = 0.0
    # By slot, at the last change.
    _lengths: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    _slots: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    _counts: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    _steady: int = 0  # steps since the batch changed
    _growth: tuple[int, int] = (0, 0)  # tokens, and pairs, that each further step of the batch adds
    _kv_tokens: int = 0
    _pairs: int = 0
    _under_way: deque[tuple[Shape, int, float] | None] = field(default_factory=deque)

    def join(self, slot: int, length: int) -> None:
        """A sequence with `length` computed tokens takes a slot."""
        if slot >= len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(slot + 1, np.int64)])
        self._settle()
        self._lengths[slot] = length

    def change(self, slots: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
        """From the next step on, slot slots[n] gets counts[n] tokens a step."""
        self._settle()
        self._slots, self._counts = slots.astype(np.int64), counts.astype(np.int64)
        before = self._lengths[self._slots]
        self._kv_tokens = int((before + self._counts).sum())
        self._pairs = int((self._counts * before + self._counts * (self._counts + 1) // 2).sum())
        self._growth = int(self._counts.sum()), int((self._counts * self._counts).sum())

    def fall_short(self, slot: int, num_tokens: int) -> None:
        """A launched step has brought a slot `num_tokens` tokens less than `change` said: rejected drafts."""
        if self.predictions:
            self._lengths[slot] -= num_tokens
            self._kv_tokens -= num_tokens

    def launch(self, shape: Shape, *, timed: bool) -> None:
        """A step of the batch is launched. timed: whether its measured time will be the device's working time."""
        prediction = self.predictions.get(shape)
        if prediction is None or not timed:
            self._under_way.append(None)
        else:
            self._under_way.append((shape, self._kv_tokens, prediction.seconds(self._kv_tokens, self._pairs)))
        self._steady += 1
        self._kv_tokens += self._growth[0]
        self._pairs += self._growth[1]

    @property
    def workload(self) -> tuple[int, int]:
        """Cached tokens to read and pairs to score of the next launch."""
        return self._kv_tokens, self._pairs

    def result(self, seconds: float | None) -> Timed | None:
        """The oldest step in flight is done and took `seconds`. Returns the step, if it is an outlier."""
        launched, self.last = self._under_way.popleft(), None
        if launched is None or seconds is None:
            return None
        shape, kv_tokens, predicted = launched
        self.last = Timed(shape, kv_tokens, predicted, seconds)
        total = self.totals.setdefault(shape, Total())
        total.steps += 1
        total.predicted_s += predicted
        total.measured_s += seconds
        if seconds <= OUTLIER * predicted:
            return None
        outlier = self.last
        self.num_outliers += 1
        self.outliers.append(outlier)
        if self.num_outliers <= OUTLIERS_KEPT or self.num_outliers & (self.num_outliers - 1) == 0:
            log.warning("outlier %d: %s", self.num_outliers, outlier)
        return outlier

    def account(self, *, whole: bool) -> list[tuple[str, Total]]:
        """The sums by the shapes' names; nothing if they were given within TOLD_EVERY_S, unless `whole`."""
        now = time.monotonic()
        if not self.totals or (not whole and now - self._told < TOLD_EVERY_S):
            return []
        self._told = now
        return [(str(shape), total) for shape, total in self.totals.items()]

    def _settle(self) -> None:
        """Bring the lengths up to the steps that were launched."""
        if self._steady and len(self._slots):
            self._lengths[self._slots] += self._counts * self._steady
        self._steady = 0
