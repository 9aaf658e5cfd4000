"""LongestPrefix: the sequence with the longest cached prefix goes first."""

from itertools import islice
from typing import Any

from ..policy import View
from ..sequence import Seq
from .batching import Batching

WINDOW = 32
"""Number of waiting sequences, from the head of the queue, that are compared."""
LOOK_UPS = 4
"""Look-ups in the pool per plan."""
PATIENCE = 64
"""Number of admissions that may overtake the head of the queue."""


class LongestPrefix(Batching):
    """Longest cached prefix first, among the first 32 in order of arrival. So cached blocks are used before eviction.

    Each plan looks four sequences up in the pool, in turn, and remembers the lengths until their next turn. After 64
    admissions that overtook it, the head of the queue goes first. Seq.hashes makes a look-up cheaper.
    """

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
    ) -> None:
        super().__init__(max_batched_tokens, max_chunk_tokens, tpot_s=tpot_s)
        self._cached: dict[Seq[Any], int] = {}  # the least recently refreshed first
        self._overtaken = 0

    def on_admit(self, seq: Seq[Any]) -> None:
        """Count admissions that overtake the head of the queue."""
        self._overtaken = 0 if next(iter(self.waiting)) is seq else self._overtaken + 1
        super().on_admit(seq)
        self._cached.pop(seq, None)

    def on_finish(self, seq: Seq[Any]) -> None:
        super().on_finish(seq)
        self._cached.pop(seq, None)

    def candidates(self, view: View) -> list[Seq[Any]]:
        """The first 32 by cached prefix, then the others."""
        window = list(islice(self.waiting, max(WINDOW, view.free_slots)))
        compared = window[:WINDOW]
        # Unknown ones first, then the least recently refreshed.
        inside = dict.fromkeys(compared)
        turns = [seq for seq in compared if seq not in self._cached]
        turns += [seq for seq in self._cached if seq in inside]
        for seq in turns[:LOOK_UPS]:
            self._cached.pop(seq, None)
            self._cached[seq] = view.look_up(seq)
        if self._overtaken >= PATIENCE:
            return window
        return sorted(compared, key=lambda seq: -self._cached.get(seq, 0)) + window[WINDOW:]
