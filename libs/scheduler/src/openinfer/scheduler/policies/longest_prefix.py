"""LongestPrefix: who has most of its prompt cached goes first."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..policy import View
from ..sequence import Seq
from .batching import Batching

WINDOW = 32
"""Of the waiting, so many are compared: those at the head of the queue."""
LOOK_UPS = 4
"""Look-ups a plan."""
PATIENCE = 64
"""Admissions that may go ahead of the head of the queue."""


class LongestPrefix(Batching):
    """Longest cached prefix first, among the first 32 in order of arrival; the cache is then used before it is evicted.

    What is cached is asked of the pool, four sequences a plan, in turn, and remembered until their next turn. After 64
    admissions ahead of it the head of the queue goes first. Seq.hashes makes a look-up cheaper.
    """

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
    ) -> None:
        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s)
        self._cached: dict[Seq[Any], int] = {}  # the longest since asked about first
        self._overtaken = 0

    def on_admit(self, seq: Seq[Any]) -> None:
        """Count who overtakes the head of the queue."""
        self._overtaken = 0 if next(iter(self.waiting)) is seq else self._overtaken + 1
        super().on_admit(seq)
        self._cached.pop(seq, None)

    def on_finish(self, seq: Seq[Any]) -> None:
        """Forget it."""
        super().on_finish(seq)
        self._cached.pop(seq, None)

    def candidates(self, view: View) -> list[Seq[Any]]:
        """The window by cached prefix, then the rest."""
        window = list(islice(self.waiting, max(WINDOW, view.free_slots)))
        compared = window[:WINDOW]
        self._refresh(view, compared)
        if self._overtaken >= PATIENCE:
            return window
        by_prefix = sorted(compared, key=lambda seq: -self._cached.get(seq, 0))
        return by_prefix + window[WINDOW:]

    def _refresh(self, view: View, window: list[Seq[Any]]) -> None:
        """Ask about the next four: those never asked about, then those asked about longest ago."""
        inside = dict.fromkeys(window)
        turns = [seq for seq in window if seq not in self._cached] + [s for s in self._cached if s in inside]
        for seq in turns[:LOOK_UPS]:
            self._cached.pop(seq, None)
            self._cached[seq] = view.look_up(seq)
