"""Planted: a drafter that knows the answers, and is wrong at times."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Planted:
    """A scheduler.Drafter. answers: prompts with their outputs; one of four tokens that it proposes is another one."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._answers = answers

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The next tokens of the answer that begins with these tokens, some of them changed."""
        length = len(tokens)
        known = list(tokens)
        right = next(
            (list(answer[length:]) for answer in self._answers if list(answer[:length]) == known), []
        )
        rng = random.Random(length)
        return [token if rng.random() < 0.75 else token ^ 1 for token in right[:count]]
