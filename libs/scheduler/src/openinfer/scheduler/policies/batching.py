"""Batching: what all policies of this library have in common, and FirstCome, which adds nothing to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ..errors import InvalidSetup
from ..policy import Decision, View
from ..runner import Step
from ..sequence import Seq, SeqState
from .pace import Pace
from .queues import ArrivalQueue, SortedQueue


class Batching:
    """Continuous batching: decode rows first, then what prefills, then who waits; they mix in a step.

    A step has at most max_batched_tokens tokens (>= the loop's max_rows, so that prefill cannot starve), a chunk at
    most max_chunk_tokens. With tpot_s, the part of the budget that prompts get adapts so that a step with decode rows
    takes at most so many seconds (see Pace). rank: who goes first, the lowest first, fixed while a sequence waits;
    None: in order of arrival, those that were preempted at the head. Victims are taken from the other end.

    To write a policy of your own, subclass it and override `candidates`, which chooses from `waiting`. Raises
    InvalidSetup.
    """

    uses_priority = False

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
        rank: Callable[[Seq[Any]], float] | None = None,
    ) -> None:
        if max_batched_tokens < 1 or (max_chunk_tokens is not None and max_chunk_tokens < 1):
            raise InvalidSetup(
                "max_batched_tokens and max_chunk_tokens must be at least 1, "
                f"given {max_batched_tokens} and {max_chunk_tokens}"
            )
        self.max_batched_tokens = max_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens or max_batched_tokens
        self.pace = None if tpot_s is None else Pace(tpot_s, max_batched_tokens)
        self._rank = rank
        self.waiting = ArrivalQueue() if rank is None else SortedQueue(rank)

    def on_submit(self, seq: Seq[Any]) -> None:
        """Queue it."""
        self.waiting.push(seq)

    def on_admit(self, seq: Seq[Any]) -> None:
        """It waits no longer."""
        self.waiting.discard(seq)

    def on_preempt(self, seq: Seq[Any]) -> None:
        """Queue it again."""
        self.waiting.push(seq)

    def on_finish(self, seq: Seq[Any]) -> None:
        """Forget it."""
        self.waiting.discard(seq)

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """Learn how long steps take, if there is an objective."""
        if self.pace is not None:
            self.pace.observe(step, seconds)

    def candidates(self, view: View) -> Iterable[Seq[Any]]:
        """The waiting sequences, who should go first first. Read as far as there is room."""
        return self.waiting

    def plan(self, view: View) -> Decision:
        """Spend what the decode rows leave of the step's budget."""
        if view.max_rows > self.max_batched_tokens:
            raise InvalidSetup(
                f"max_batched_tokens is {self.max_batched_tokens}, "
                f"it must be at least max_rows ({view.max_rows}): "
                "with every row decoding nothing would be left for a prompt"
            )
        budget = self.max_batched_tokens - view.decode_tokens
        if self.pace is not None and view.decoding:
            budget = min(budget, self.pace.prompt_tokens)
        room = min(view.free_slots, budget)  # each takes one token at least
        waiting = self.candidates(view) if room > 0 else ()
        if view.num_loading:
            waiting = (seq for seq in waiting if seq.state is not SeqState.LOADING)
        admit = list(islice(waiting, max(0, room)))
        chunks = self._chunks(view, budget, admit)
        budget -= sum(chunks.values())
        if budget <= 0:
            return Decision(chunks)
        chunks.update((seq, self.max_chunk_tokens) for seq in admit)
        return Decision(chunks, admit, budget)

    def _chunks(self, view: View, budget: int, admit: list[Seq[Any]]) -> dict[Seq[Any], int]:
        """Shares of those that prefill already. By rank, where there is one: newcomers that rank before all of them
        are left what they need, but never more than three quarters."""
        prefilling: Iterable[Seq[Any]] = view.prefilling
        if self._rank is not None and view.prefilling:
            prefilling = sorted(view.prefilling, key=self._rank)
            first = self._rank(prefilling[0])
            urgent = sum(len(seq.tokens) for seq in admit if self._rank(seq) < first)
            budget -= min(urgent, budget * 3 // 4)
        chunks: dict[Seq[Any], int] = {}
        for seq in prefilling:
            if budget <= 0:
                break
            chunks[seq] = min(seq.remaining, self.max_chunk_tokens, budget)
            budget -= chunks[seq]
        return chunks

    def victim(self, view: View) -> Seq[Any]:
        """The lowest in rank; among equals, the latest admitted. The first always gets on, so everything ends."""
        latest_first = reversed(view.running)
        return next(latest_first) if self._rank is None else max(latest_first, key=self._rank)


class FirstCome(Batching):
    """First come, first served. A preempted sequence goes to the head of the queue."""
