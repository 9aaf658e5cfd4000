"""For engines: requests that wait for their grammar, and what a running sequence may say next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from openinfer.sampler.errors import GrammarFailed, GrammarTimeout, InvalidGrammar
from openinfer.sampler.grammar import Compilation, Compiler, Grammar, Matcher

T = TypeVar("T")


class Constraint:
    """What a running sequence may say next: its grammar and, as a mask, the ids that it may have at all.

    Nothing here raises: a grammar that fails leaves no token to choose, and `problem` says why. `ended` is for the
    engine to set when the sequence is over.

    matcher: this sequence's own, past the output so far. allowed_ids: empty for all ids below `vocabulary`.
    """

    def __init__(self, matcher: Matcher, allowed_ids: Sequence[int], vocabulary: int) -> None:
        self.problem, self.ended, self.matcher = "", False, matcher
        self._allowed: NDArray[np.int32] | None = None
        if allowed_ids:
            bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
            bits[np.array(allowed_ids)] = True
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn under the mask."""
        try:
            self.matcher.accept(token)
        except GrammarFailed as error:
            self.problem = self.problem or str(error)

    def restrict(self, mask: NDArray[np.int32]) -> bool:
        """Finish a mask that the matcher has written: take away what is not allowed, all of it after a failure. True
        where the output is complete and nothing but EOS may come."""
        failure = self.matcher.failure
        if failure:
            mask[:] = 0
        elif self._allowed is not None:
            mask &= self._allowed
        if not mask.any():
            self.problem = self.problem or failure or "no token that may be drawn fits the grammar"
            return False
        return self.matcher.must_end


class Masks:
    """Makes the masks of a step's sequences, one after the other: they are some microseconds of work each, and a GPU is
    busy with the step's forward pass meanwhile.

    rows: sequences at most; vocabulary: the model's.
    """

    def __init__(self, rows: int, vocabulary: int) -> None:
        self._masks = np.zeros((rows, -(-vocabulary // 32)), np.int32)
        self._addresses = [mask.ctypes.data for mask in self._masks]
        self._nbytes = self._masks[0].nbytes

    def fill(self, constraints: Sequence[Constraint]) -> tuple[NDArray[np.int32], list[bool]]:
        """int32[n, (V + 31) // 32], bits as in `Matcher.fill`, valid until the next call, all zeros where nothing can
        follow; and for each whether nothing but EOS may come."""
        for one, address in zip(constraints, self._addresses, strict=False):
            one.matcher.inner.unsafe_compute_mask_ptr(address, self._nbytes)
        masks = self._masks[: len(constraints)]
        return masks, [one.restrict(mask) for one, mask in zip(constraints, masks, strict=True)]


class Ready(NamedTuple, Generic[T]):
    """What became of a request's grammar."""

    id: int
    item: T
    matcher: Matcher | None
    problem: str
    """Why there is no matcher."""


class PendingGrammars(Generic[T]):
    """Requests, with an item of the engine's each, whose grammars a Compiler is at."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pending: dict[int, tuple[T, Compilation]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, request_id: int, item: T, grammar: Grammar) -> None:
        """Have the grammar compiled. Never blocks."""
        self._pending[request_id] = item, self._compiler.start(grammar)

    def drop(self, request_id: int) -> bool:
        """Forget a request; False if it does not wait here."""
        return self._pending.pop(request_id, None) is not None

    def ready(self, wait_s: float) -> list[Ready[T]]:
        """Those that wait no longer, in order of arrival. Waits up to `wait_s` seconds for the first."""
        found = []
        for request_id, (item, compilation) in list(self._pending.items()):
            matcher, problem = None, ""
            try:
                matcher = compilation.poll(wait_s)
            except (InvalidGrammar, GrammarTimeout) as error:
                problem = str(error)
            wait_s = 0.0
            if matcher is not None or problem:
                del self._pending[request_id]
                found.append(Ready(request_id, item, matcher, problem))
        return found

    def close(self) -> None:
        """Stop the compiler."""
        self._compiler.close()
