"""What a loop counts."""

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
    """Of these, sequences whose prefix is being loaded."""
    running: int = 0
    in_flight: int = 0
    """Steps launched and not collected."""
    steps: int = 0
    """Steps launched."""
    submitted: int = 0
    finished: int = 0
    preemptions: int = 0
    loads: int = 0
    """Loads begun."""
    dry: int = 0
    """Turns without a launch because the pool was dry."""
    prefill_tokens: int = 0
    """Tokens launched in chunks, recomputed ones included."""
    rejected: Counter[RejectReason] = field(default_factory=Counter)
