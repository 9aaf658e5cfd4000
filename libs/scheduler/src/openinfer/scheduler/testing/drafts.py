"""RandomDrafts: a Speculation that chooses at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ..policy import View
from ..sequence import Seq


class RandomDrafts:
    """Up to `most` drafts a row. It changes between no drafts, the same number for all rows, and a number for each row.
    Without drafts it rests at times.

    The tokens of all decode rows stay below max_tokens, so that prompts get one token at least.
    """

    def __init__(self, seed: int, most: int, max_tokens: int) -> None:
        self._random = random.Random(f"speculation {seed}")
        self._most, self._max_tokens = most, max_tokens
        self._mood = self.rest_until = 0

    def num_drafts(self, view: View) -> Mapping[Seq[Any], int]:
        """The random numbers of this step."""
        rng, most = self._random, self._most
        if rng.random() < 0.2:
            self._mood = rng.choice([-1, 0, most, most])
        if not self._mood and rng.random() < 0.1:
            self.rest_until = view.step + rng.randint(1, 4)
        room = self._max_tokens - 1 - len(view.decoding)
        drafts = {}
        for seq in view.decoding:
            count = min(rng.randint(0, most) if self._mood < 0 else self._mood, room)
            if count > 0:
                drafts[seq] = count
                room -= count
        return drafts
