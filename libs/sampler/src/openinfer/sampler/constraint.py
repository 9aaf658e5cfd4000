"""For engines: requests that wait for their grammar, and the tokens that a running sequence may draw next."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from openinfer.sampler.adjust import mask_of
from openinfer.sampler.errors import GrammarFailed, InvalidGrammar
from openinfer.sampler.form import Grammar
from openinfer.sampler.grammar import Compilation, Compiler, Matcher

T = TypeVar("T")


SLOW_S = 0.001
"""A sequence whose last mask took longer than this makes its next one in a thread. Most masks are so short that handing
them over would take as long as making them."""


class Constraint:
    """The tokens that a running sequence may draw next: by its grammar and by a mask of the ids it may have at all.

    No method raises. A grammar that fails, or that exceeds the limits of work, leaves no token to choose, and `problem`
    says why. The engine sets `ended` when the sequence is over.

    matcher: this sequence's own, past the output so far. allowed_ids: empty for all ids below `vocabulary`.
    """

    def __init__(self, matcher: Matcher, allowed_ids: Sequence[int], vocabulary: int) -> None:
        self.problem, self.ended = "", False
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._tokens: list[int] = []  # drawn, and not yet matched
        self.slow = False  # the last mask was
        self._allowed = mask_of(allowed_ids, vocabulary) if allowed_ids else None

    def accept(self, token: int) -> None:
        """Advance by a token that was drawn under the mask. Takes no time: the token is matched with the next mask."""
        self._tokens.append(token)

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice: drafts that cost no guess."""
        if self.problem:
            return []
        try:
            self._catch_up()
            return self._matcher.forced()
        except BaseException:  # as in fill, which says so with the next mask
            return []

    def look_ahead(
        self, mask: NDArray[np.int32], masks: NDArray[np.int32], drafts: Sequence[int]
    ) -> list[int]:
        """Write the masks that follow drafts of the next tokens, after `fill` has written `mask`, the first of all.

        masks int32 [D, W]: one gets the mask after each draft, as far as the grammar allows the drafts. Returns the
        drafts to verify. Where no mask was made although the grammar allows the draft before, that draft is another
        token, which its mask forbids: so no row goes on without a mask. That is the case where the output is complete
        after the draft, and where masks take too long.
        """
        drafts, trial = list(drafts), self._matcher.copy()
        for place, draft in enumerate(drafts):
            if not mask[draft // 32] >> draft % 32 & 1:  # it is forbidden
                break
            other = _forbidden(mask, self._vocabulary)
            if (self.slow and other is not None) or not self._mask_after(trial, draft, masks[place]):
                drafts[place] = draft if other is None else other
                break
            mask = masks[place]
        return drafts

    def _mask_after(self, trial: Matcher, draft: int, mask: NDArray[np.int32]) -> bool:
        """Write the mask after one more draft. False: the output is complete or no token can follow."""
        try:
            trial.accept(draft)
            trial.fill(mask)
        except BaseException:  # as in fill, which says so if the token is drawn
            mask[:] = 0
            return False
        if self._allowed is not None and not trial.forces:
            mask &= self._allowed
        return bool(mask.any()) and not trial.must_end

    def _catch_up(self) -> None:
        tokens, self._tokens = self._tokens, []
        for token in tokens:
            self._matcher.accept(token)

    def fill(self, mask: NDArray[np.int32]) -> bool:
        """Write the mask of the next token as `Matcher.fill` does, all zeros where no token can follow.

        True where the output is complete and only EOS may come. Any thread may call it, one at a time."""
        if self.problem:
            mask[:] = 0
            return False
        began = time.thread_time()
        try:
            self._catch_up()
            self._matcher.fill(mask)
        except GrammarFailed as error:
            self.problem = str(error)
        # A bug in the matcher, and a panic is no Exception: one request's grammar must not take an engine along.
        except BaseException as error:
            self.problem = f"the grammar's matcher fails: {error}"
        self.slow = time.thread_time() - began > SLOW_S
        if self._allowed is not None and not self._matcher.forces:
            mask &= self._allowed
        if not self.problem and not mask.any():
            self.problem = "no token that may be drawn fits the grammar"
        if self.problem:
            mask[:] = 0
            return False
        return self._matcher.must_end


def _forbidden(mask: NDArray[np.int32], vocabulary: int) -> int | None:
    """The first token that a mask forbids; None if it forbids none."""
    words = (mask != -1).nonzero()[0]
    if not len(words):
        return None
    free = int(~mask[words[0]])
    token = int(words[0]) * 32 + (free & -free).bit_length() - 1
    return token if token < vocabulary else None


class Masks:
    """Makes the masks of a step's sequences, of some microseconds each, during the step's forward pass. Slow ones are
    made in threads of their own: matching does not hold the GIL. `Constraint` bounds what a sequence may take.

    rows: sequences at most; vocabulary: the model's; max_drafts: of a sequence in a step.
    """

    def __init__(self, rows: int, vocabulary: int, max_drafts: int = 0) -> None:
        words = -(-vocabulary // 32)
        self._masks = np.zeros((rows, words), np.int32)
        self._ahead = np.zeros((max_drafts, words), np.int32)
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="masks")

    def fill(self, constraints: Sequence[Constraint]) -> tuple[NDArray[np.int32], list[bool]]:
        """int32[n, (V + 31) // 32], bits as in `Matcher.fill`, valid until the next call, all zeros where nothing can
        follow; and for each whether nothing but EOS may come."""
        masks = self._masks[: len(constraints)]
        slow = {
            row: self._threads.submit(one.fill, masks[row]) for row, one in enumerate(constraints) if one.slow
        }
        done = [row in slow or one.fill(masks[row]) for row, one in enumerate(constraints)]
        for row, future in slow.items():
            done[row] = future.result()
        return masks, done

    def look_ahead(
        self, constraint: Constraint, mask: NDArray[np.int32], drafts: Sequence[int]
    ) -> tuple[NDArray[np.int32], list[int]]:
        """Masks int32 [D, W] after each of a sequence's drafts, valid until the next call, and the drafts to verify:
        `Constraint.look_ahead`. mask: the sequence's, of `fill`."""
        return self._ahead, constraint.look_ahead(mask, self._ahead, drafts)


class _Ready(NamedTuple, Generic[T]):
    id: int
    item: T
    matcher: Matcher | None
    problem: str
    """Why there is no matcher."""


class PendingGrammars(Generic[T]):
    """Requests whose grammar is still being compiled. `item` is whatever the engine wants back with the result."""

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

    def ready(self, wait_s: float) -> list[_Ready[T]]:
        """The requests that wait no longer, in order of arrival. Waits up to `wait_s` seconds for the first."""
        found = []
        for request_id, (item, compilation) in list(self._pending.items()):
            matcher, problem = None, ""
            try:
                matcher = compilation.poll(wait_s)
            except InvalidGrammar as error:
                problem = str(error)
            wait_s = 0.0
            if matcher is not None or problem:
                del self._pending[request_id]
                found.append(_Ready(request_id, item, matcher, problem))
        return found

    def close(self) -> None:
        self._compiler.close()
