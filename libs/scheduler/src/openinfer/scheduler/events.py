"""What StepLoop.step() returns: events, in order. Of a sequence: Scheduled, Tokens ..., Finished, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeAlias

from .runner import Row
from .sequence import FinishReason, Owner, Payload, Seq


@dataclass(frozen=True, slots=True)
class Scheduled(Generic[Owner]):
    """A sequence runs for the first time (not again after a preemption)."""

    seq: Seq[Owner]
    num_cached: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Tokens(Generic[Owner, Payload]):
    """A step that emitted was read. Columnar: one event a step, however many rows."""

    step: int
    rows: Sequence[Row[Owner]]
    """The step's rows in batch order, as launched; `payload` is laid out by the runner along them."""
    dead: Set[Seq[Owner]]
    """Rows to skip: they ended or were aborted before this step counted. Empty nearly always."""
    payload: Payload
    advanced: Mapping[int, int] | None = None
    """As in StepResult: decode rows, by slot, that advanced by less than their q_len."""

    def emitting(self) -> Iterator[tuple[int, Seq[Owner]]]:
        """(position in rows, sequence) of each row that has tokens here."""
        if not self.dead and not self.advanced:
            yield from ((position, row.seq) for position, row in enumerate(self.rows) if row.emits)
            return
        still = self.advanced or {}
        for position, row in enumerate(self.rows):
            if row.emits and row.seq not in self.dead and still.get(row.seq.slot) != 0:
                yield position, row.seq

    def num_tokens(self, position: int) -> int:
        """Tokens that an emitting row has here: more than one only where drafts were kept."""
        row = self.rows[position]
        if row.start is not None:
            return 1
        return row.num_tokens if self.advanced is None else self.advanced.get(row.seq.slot, row.num_tokens)


@dataclass(frozen=True, slots=True)
class Finished(Generic[Owner]):
    """The one terminal event of a sequence. Its tokens have all been reported."""

    seq: Seq[Owner]
    reason: FinishReason


Event: TypeAlias = Scheduled[Owner] | Tokens[Owner, Payload] | Finished[Owner]
"""What step() and drain() return a list of."""
