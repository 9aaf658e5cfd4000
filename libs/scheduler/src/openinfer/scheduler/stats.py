"""Stats: gauges and counters of a loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .errors import RejectReason


@dataclass(slots=True)
class Stats:
    """Gauges and counters of a loop; reading them is O(1)."""

    waiting: int = 0
    """Sequences without a row."""
    loading: int = 0
    """Waiting sequences whose prefix is being loaded."""
    running: int = 0
    in_flight: int = 0
    """Steps launched and not read yet."""
    steps: int = 0
    """Steps launched."""
    submitted: int = 0
    finished: int = 0
    preemptions: int = 0
    loads: int = 0
    """Loads started."""
    dry: int = 0
    """Turns without a launch, because the pool had too few free blocks."""
    prefill_tokens: int = 0
    """Prompt tokens launched in chunks, recomputed tokens included."""
    rejected: Counter[RejectReason] = field(default_factory=Counter)
