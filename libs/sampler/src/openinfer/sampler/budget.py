"""A thought that ends when its budget is spent: from then on only the token that closes it may come."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openinfer.sampler.errors import InvalidGrammar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_LATE = 3
"""Tokens that may end a character."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most tokens of a thought at the start of an output.

    Attributes:
        tokens: at least 0, of the thought with its markers. A thought may exceed this number by the 3 tokens needed
            to end a character. Where the number is 0, the thought exceeds it by the marker that ends it.
        closing: the id of the token that ends a thought.
        opening: the id of the token that begins one, perhaps after whitespace; None where the prompt has begun it.

    Raises:
        InvalidGrammar: a number below 0.
    """

    tokens: int
    closing: int
    opening: int | None = None

    def __post_init__(self) -> None:
        if min(self.tokens, self.closing, self.opening or 0) < 0:
            raise InvalidGrammar(f"a budget has a number of tokens and ids, none of them below 0: {self}")


class Spending:
    """The part of its Budget that one sequence has spent. `vocabulary`: the bytes of token 0, 1, ..."""

    def __init__(self, budget: Budget, vocabulary: Sequence[bytes]) -> None:
        self._budget, self._vocabulary = budget, vocabulary
        self._spent = 0
        self._open = budget.opening is None
        self._over = False
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> "Spending":
        other = Spending(self._budget, self._vocabulary)
        other._spent, other._open, other._over = self._spent, self._open, self._over
        other._text.setstate(self._text.getstate())
        return other

    def accept(self, token: int) -> None:
        if self._over:
            return
        self._spent += 1
        self._text.decode(self._vocabulary[token])
        if token == self._budget.closing:
            self._over = True
        elif not self._open:
            self._open = token == self._budget.opening
            self._over = not self._open and not self._vocabulary[token].isspace()

    def restrict(self, mask: "NDArray[np.int32]") -> bool:
        """If the closing token is due and fits, clear all other bits of a mask. Returns whether it did.

        Token t is bit t % 32 of word t // 32."""
        token = self._budget.closing
        words, word, bit = mask.view("uint32"), token // 32, 1 << token % 32
        if not self._due or not words[word] & bit:
            return False
        words[:] = 0
        words[word] = bit
        return True

    @property
    def _due(self) -> bool:
        left = self._budget.tokens - self._spent - 1
        if self._over or not self._open or left > 0:
            return False
        # In the middle of a character nothing can be closed, but bytes that are no text may go on for ever.
        return not self._text.getstate()[0] or left <= -MAX_LATE
