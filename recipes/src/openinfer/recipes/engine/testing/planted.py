"""Planted: a drafter that knows the answers, and is wrong at times."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Planted:
    """A scheduler.Drafter. answers: prompts with their outputs. right: the chance that a token which it proposes is the
    answer's; else it is another one."""

    def __init__(self, answers: Sequence[Sequence[int]], right: float = 0.75) -> None:
        self._answers, self._right = answers, right

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The next tokens of the answer that begins with these tokens, some of them changed."""
        length = len(tokens)
        known = list(tokens)
        right = next(
            (list(answer[length:]) for answer in self._answers if list(answer[:length]) == known), []
        )
        rng = random.Random(length)
        return [token if rng.random() < self._right else token ^ 1 for token in right[:count]]
