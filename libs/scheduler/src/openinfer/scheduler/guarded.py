"""GuardedDrafters: drafters of a class that may be faulty. A fault turns them off, and no request fails."""

import logging
import operator
from collections.abc import Callable, Sequence

from .drafters import Drafter
from .errors import InvalidSetup
from .policies import imported

log = logging.getLogger("openinfer.scheduler")


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
        """Drafters of the class MODULE:NAME, called without arguments. Raises InvalidSetup if it makes none."""
        make = imported(name, "drafter")
        try:
            drafter = make()
        except Exception as error:
            raise InvalidSetup(f"the drafter {name!r} cannot be made without arguments: {error!r}") from error
        if not callable(getattr(drafter, "propose", None)):
            raise InvalidSetup(f"the drafter {name!r} has no method propose(tokens, count)")
        return cls(make, num_tokens)

    def __call__(self) -> Drafter:
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
    def __init__(self, guard: GuardedDrafters) -> None:
        self._guard = guard
        self._drafter = guard.made()

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        return () if self._drafter is None else self._guard.asked(self._drafter, tokens, count)
