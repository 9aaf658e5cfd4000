"""Drafters: guesses of a sequence's next tokens, made on the host while the device runs the step before."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from .errors import InvalidSetup

LOOKED_AT = 32
"""Earlier places of an n-gram that are compared, the latest first."""


class Drafter(Protocol):
    """Guesses the next tokens of one sequence. Each sequence has a drafter of its own.

    testing.DrafterConformance has the rules as tests. An exception ends the engine, unless GuardedDrafters made it.
    """

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The tokens that may follow `tokens`, at most `count` of them; none where the drafter has no guess.

        tokens: prompt and output, not to be changed; they only grow. count: 0 or more, and more than a row has in a
        step: the step under way takes the first ones. A wrong guess costs time and changes no token of the output.
        """


class Occurrences:
    """The places where the last `size` tokens of a sequence have occurred before. A new token costs one entry."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._start = 0  # of the tokens that are looked up
        self._latest: dict[tuple[int, ...], int] = {}  # the latest place after `size` tokens
        self._earlier: list[int] = []  # by place - start - size: the place before with the same tokens, or 0

    def find(self, tokens: Sequence[int], most: int, start: int = 0) -> Iterator[int]:
        """Up to `most` places from `start` on, the latest first. The tokens only grow."""
        if start != self._start:
            self._start, self._latest, self._earlier = start, {}, []
        first = start + self._size
        for place in range(first + len(self._earlier), len(tokens)):
            key = tuple(tokens[place - self._size : place])
            self._earlier.append(self._latest.get(key, 0))
            self._latest[key] = place
        place = self._latest.get(tuple(tokens[-self._size :]), 0)
        while place and most:
            yield place
            place, most = self._earlier[place - first], most - 1


class NGram:
    """A Drafter that looks the end of the sequence up in the sequence itself (prompt lookup).

    It takes the last n tokens, with the largest n of shortest..longest for which they have occurred before, and
    proposes the tokens that followed there. Among equally long matches the latest counts. A proposal that reaches the
    end goes on with its own beginning. Raises InvalidSetup unless 1 <= shortest <= longest.
    """

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidSetup(f"n-grams of {shortest} to {longest} tokens; give 1 <= shortest <= longest")
        self._shortest, self._longest = shortest, longest
        self._places = Occurrences(shortest)

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        best = best_length = 0
        for place in self._places.find(tokens, LOOKED_AT):
            length = self._shortest
            while length < min(self._longest, place) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if length == self._longest:
                break
        if not best_length:
            return ()
        found = list(tokens[best : best + count])
        for n in range(count - len(found)):
            found.append(found[n])
        return found
