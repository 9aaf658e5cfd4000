"""Drafters: guesses of a sequence's next tokens, made on the host while the device runs the step before."""

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Protocol

from .errors import InvalidSetup
from .policies import imported

log = logging.getLogger("openinfer.scheduler")

LOOKED_AT = 32
"""Earlier places of an n-gram that are compared, the latest first."""


class Drafter(Protocol):
    """Guesses the next tokens of one sequence. Each sequence has a drafter of its own.

    testing.DrafterConformance has the rules as tests. An exception ends the engine, unless GuardedDrafters made it.
    """

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The tokens that may follow `tokens`, at most `count` of them; none where the drafter has no guess.

        tokens: prompt and output, not to be changed. A later call has the same tokens and perhaps more of them. count:
        0 or more, and more than a row has in a step: the step under way takes the first ones. A wrong guess costs time
        and changes no token of the output.
        """


class NGram:
    """A Drafter that looks the end of the sequence up in the sequence itself (prompt lookup).

    It takes the last n tokens, with the largest n of shortest..longest for which they have occurred before, and
    proposes the tokens that followed there. Among equally long matches the latest counts. A proposal that reaches the
    end of the sequence goes on with its own beginning, as a text that repeats itself does. Raises InvalidSetup unless
    1 <= shortest <= longest.
    """

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidSetup(f"n-grams of {shortest} to {longest} tokens; give 1 <= shortest <= longest")
        self._shortest, self._longest = shortest, longest
        self._latest: dict[tuple[int, ...], int] = {}  # the latest place after `shortest` tokens
        self._earlier: list[int] = []  # by place - shortest: the place before with the same tokens, or 0

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """See Drafter."""
        short = self._shortest
        for place in range(short + len(self._earlier), len(tokens)):
            key = tuple(tokens[place - short : place])
            self._earlier.append(self._latest.get(key, 0))
            self._latest[key] = place
        place = self._latest.get(tuple(tokens[-short:]), 0)
        best = best_length = 0
        for _ in range(LOOKED_AT):
            if not place:
                break
            length = short
            while length < min(self._longest, place) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if length == self._longest:
                break
            place = self._earlier[place - short]
        if not best_length:
            return ()
        found = list(tokens[best : best + count])
        for n in range(count - len(found)):
            found.append(found[n])
        return found


class GuardedDrafters:
    """Makes drafters, and looks at each proposal.

    A proposal must be of at most as many tokens as are asked for, all of them integers in 0..num_tokens - 1. The first
    that is not, and the first exception, is logged; from then on all drafters that this object has made propose
    nothing. So requests go on without drafts.
    """

    def __init__(self, make: Callable[[], Drafter], num_tokens: int) -> None:
        self._make, self._num_tokens, self._off = make, num_tokens, False

    @classmethod
    def named(cls, name: str, num_tokens: int) -> "GuardedDrafters":
        """Drafters of the class MODULE:NAME, which is called without arguments. Raises InvalidSetup where it is not
        there, or makes no drafter."""
        make = imported(name, "drafter")
        try:
            drafter = make()
        except Exception as error:
            raise InvalidSetup(f"the drafter {name!r} cannot be made without arguments: {error!r}") from error
        if not callable(getattr(drafter, "propose", None)):
            raise InvalidSetup(f"the drafter {name!r} has no method propose(tokens, count)")
        return cls(make, num_tokens)

    def __call__(self) -> Drafter:
        """A drafter for a sequence."""
        return _Guarded(self)

    def made(self) -> Drafter | None:
        """An unguarded drafter; None if it cannot be made, or if drafters are off."""
        try:
            return None if self._off else self._make()
        except Exception:
            self._turn_off("it cannot be made", trace=True)
            return None

    def asked(self, drafter: Drafter, tokens: Sequence[int], count: int) -> Sequence[int]:
        """A drafter's proposal, or none where it breaks a rule."""
        if self._off:
            return ()
        try:
            found = [operator.index(token) for token in drafter.propose(tokens, count)]
        except Exception:
            self._turn_off("it failed", trace=True)
            return ()
        if len(found) > count:
            self._turn_off(f"it proposed {len(found)} tokens where at most {count} were asked for")
        elif found and not 0 <= min(found) <= max(found) < self._num_tokens:
            self._turn_off(f"it proposed {found}; token ids are 0 to {self._num_tokens - 1}")
        else:
            return found
        return ()

    def _turn_off(self, reason: str, *, trace: bool = False) -> None:
        self._off = True
        log.error(
            "the drafter is off, and requests go on without drafts: %s (%r)",
            reason,
            self._make,
            exc_info=trace,
        )


class _Guarded:
    """The drafter of one sequence."""

    def __init__(self, guard: GuardedDrafters) -> None:
        self._guard = guard
        self._drafter = guard.made()

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """See Drafter."""
        return () if self._drafter is None else self._guard.asked(self._drafter, tokens, count)
