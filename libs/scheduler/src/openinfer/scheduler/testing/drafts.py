"""RandomDrafts: a Speculation that changes its mind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ..policy import View
from ..sequence import Seq


class RandomDrafts:
    """Up to `most` drafts a row: for some steps the same of all rows, for some a number for each, for some none.

    All tokens of decode rows stay within max_tokens. One token of these is left to prompts.
    """

    def __init__(self, seed: int, most: int, max_tokens: int) -> None:
        self._random = random.Random(f"speculation {seed}")
        self._most, self._max_tokens = most, max_tokens
        self._mood = 0

    def num_drafts(self, view: View) -> Mapping[Seq[Any], int]:
        """As Speculation asks."""
        rng, most = self._random, self._most
        if rng.random() < 0.2:
            self._mood = rng.choice([-1, 0, most, most])
        room = self._max_tokens - 1 - len(view.decoding)
        drafts = {}
        for seq in view.decoding:
            count = min(rng.randint(0, most) if self._mood < 0 else self._mood, room)
            if count > 0:
                drafts[seq] = count
                room -= count
        return drafts
