"""Policies decide who runs; FirstCome is first come first served, with chunked prefill and mixed steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from .errors import InvalidSetup
from .sequence import Seq


@dataclass(slots=True)
class View:
    """What a policy may look at. Collections are live and ordered by admission; read only."""

    step: int
    """Index of the step being planned."""
    max_rows: int
    free_slots: int
    num_free_blocks: int
    num_decode: int
    """Decode rows: they run in every step, one token each."""
    prefilling: dict[Seq, None]
    running: dict[Seq, None]
    """All that hold a slot, prefilling ones included."""


@dataclass(slots=True)
class Decision:
    """A policy's answer, as deltas: whom it does not name goes on as before."""

    chunks: Mapping[Seq, int] = field(default_factory=dict)
    """Tokens of this step for prefilling sequences, at most (fewer when fewer remain). Unnamed ones pause. An
    admitted one may be named too, as a cap on its first chunk."""
    admit: Sequence[Seq] = ()
    """Waiting sequences to admit, in this order, until slots, blocks or admit_tokens run out."""
    admit_tokens: int = 0
    """Tokens of this step that the admitted ones share, in order. (How many each needs depends on its cached
    prefix.)"""
    preempt: Sequence[Seq] = ()
    """Running sequences to send back to waiting. They are drained first: plan() is asked again until nothing
    is in flight, and only the last answer counts."""


class Policy(Protocol):
    """Who runs. It keeps its own queue of what waits; the on_ calls say what became of its proposals."""

    def on_submit(self, seq: Seq) -> None:
        """A new sequence waits."""

    def on_admit(self, seq: Seq) -> None:
        """A waiting sequence that the policy named got its slot and blocks, and runs."""

    def on_preempt(self, seq: Seq) -> None:
        """A running sequence waits again; what it has computed counts as its prompt now."""

    def on_finish(self, seq: Seq) -> None:
        """A sequence ended, running or waiting (aborted)."""

    def plan(self, view: View) -> Decision:
        """What changes with the next step. Called only after something happened or while a prefill is
        unfinished. May be called again for the same step: it must not count on its answer being used."""

    def victim(self, view: View) -> Seq:
        """Whom of view.running to preempt, now that the pool is dry and nothing is in flight."""


class FirstCome:
    """Continuous batching: decode first, then what prefills, then who waits, in order of arrival.

    A step has at most max_batched_tokens tokens (>= the loop's max_rows, so that prefill cannot starve), a
    chunk at most max_chunk_tokens. Prefill and decode mix in a step. A preempted sequence goes to the head of
    the queue; victims are taken from the latest admitted.
    """

    def __init__(self, max_batched_tokens: int = 2048, max_chunk_tokens: int | None = None) -> None:
        if max_batched_tokens < 1 or (max_chunk_tokens is not None and max_chunk_tokens < 1):
            raise InvalidSetup(
                "max_batched_tokens and max_chunk_tokens must be at least 1, "
                f"given {max_batched_tokens} and {max_chunk_tokens}"
            )
        self.max_batched_tokens = max_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens or max_batched_tokens
        self._waiting: OrderedDict[Seq, None] = OrderedDict()

    def on_submit(self, seq: Seq) -> None:
        """Queue it at the end."""
        self._waiting[seq] = None

    def on_admit(self, seq: Seq) -> None:
        """It waits no longer."""
        del self._waiting[seq]

    def on_preempt(self, seq: Seq) -> None:
        """Queue it at the head."""
        self._waiting[seq] = None
        self._waiting.move_to_end(seq, last=False)

    def on_finish(self, seq: Seq) -> None:
        """Forget it."""
        self._waiting.pop(seq, None)

    def plan(self, view: View) -> Decision:
        """Spend what the decode rows leave of the step's budget."""
        if view.max_rows > self.max_batched_tokens:
            raise InvalidSetup(
                f"max_batched_tokens is {self.max_batched_tokens}, "
                f"it must be at least max_rows ({view.max_rows}): "
                "with every row decoding nothing would be left for a prompt"
            )
        budget = self.max_batched_tokens - view.num_decode
        chunks = {}
        for seq in view.prefilling:
            if budget <= 0:
                break
            chunks[seq] = min(seq.remaining, self.max_chunk_tokens, budget)
            budget -= chunks[seq]
        if budget <= 0:
            return Decision(chunks)
        admit = list(islice(self._waiting, view.free_slots))
        chunks.update((seq, self.max_chunk_tokens) for seq in admit)
        return Decision(chunks, admit, budget)

    def victim(self, view: View) -> Seq:
        """The latest admitted: the oldest always gets on, so everything ends."""
        return next(reversed(view.running))
