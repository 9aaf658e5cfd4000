"""What a policy is asked and answers. Those that come with the library are in policies/."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .runner import Row, Step
from .sequence import Seq


@dataclass(slots=True)
class View:
    """What a policy may look at. Collections are live and ordered by admission; read only."""

    step: int
    """Index of the step being planned."""
    now: float
    """Seconds of the loop's clock."""
    max_rows: int
    free_slots: int
    num_free_blocks: int
    decode_tokens: int
    """Tokens of the decode rows, which run in every step: one a row, and its drafts."""
    decoding: Mapping[Seq[Any], Row[Any]]
    prefilling: dict[Seq[Any], None]
    running: dict[Seq[Any], None]
    """All that hold a slot, prefilling ones included."""
    num_loading: int
    """Waiting sequences in state LOADING. To name one of them changes nothing."""
    look_up: Callable[[Seq[Any]], int]
    """Tokens of a waiting sequence that are cached now. Costs what the pool's acquire() costs: ask of few."""


@dataclass(slots=True)
class Decision:
    """A policy's answer, as deltas: whom it does not name goes on as before."""

    chunks: Mapping[Seq[Any], int] = field(default_factory=dict)
    """Tokens of this step for prefilling sequences, at most (fewer when fewer remain). Unnamed ones pause. An
    admitted one may be named too, as a cap on its first chunk."""
    admit: Sequence[Seq[Any]] = ()
    """Waiting sequences to admit, in this order, until slots, blocks or admit_tokens run out. One whose prefix can be
    loaded from elsewhere turns LOADING instead, and waits again when the load has ended: name it again then."""
    admit_tokens: int = 0
    """Tokens of this step that the admitted ones share, in order. (How many each needs depends on its cached
    prefix.)"""
    preempt: Sequence[Seq[Any]] = ()
    """Running sequences to send back to waiting. They are drained first: plan() is asked again until nothing
    is in flight, and only the last answer counts."""


class Policy(Protocol):
    """Who runs. It keeps its own queue of what waits; the on_ calls say what became of its proposals."""

    uses_priority: bool
    """Whether Seq.priority counts. Where it does not, an engine should refuse a request that sets it."""

    def on_submit(self, seq: Seq[Any]) -> None:
        """A new sequence waits."""

    def on_admit(self, seq: Seq[Any]) -> None:
        """A waiting sequence that the policy named got its slot and blocks, and runs."""

    def on_preempt(self, seq: Seq[Any]) -> None:
        """A running sequence waits again; what it has computed counts as its prompt now."""

    def on_finish(self, seq: Seq[Any]) -> None:
        """A sequence ended, running or waiting (aborted)."""

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """A step was read; `seconds` it took. Called for every step: do little."""

    def plan(self, view: View) -> Decision:
        """What changes with the next step. Called only after something happened or while a prefill is
        unfinished. May be called again for the same step: it must not count on its answer being used."""

    def victim(self, view: View) -> Seq[Any]:
        """Whom of view.running to preempt, now that the pool is dry and nothing is in flight."""
