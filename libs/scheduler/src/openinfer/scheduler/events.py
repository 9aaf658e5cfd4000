"""The results of StepLoop.step(), in order, and its counters. A sequence has one Scheduled, Tokens, one Finished."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

from .errors import RejectReason
from .runner import Row
from .sequence import FinishReason, Owner, Payload, Seq


@dataclass(frozen=True, slots=True)
class Scheduled(Generic[Owner]):
    """A sequence runs for the first time. A resumed sequence makes no such event."""

    seq: Seq[Owner]
    num_cached: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Tokens(Generic[Owner, Payload]):
    """The host read a step that emitted tokens. One event a step, for all rows."""

    step: int
    rows: Sequence[Row[Owner]]
    """The rows of the step, as launched. The runner lays `payload` out along them."""
    dead: Set[Seq[Owner]]
    """Sequences whose rows must be skipped, because they ended or were aborted earlier. Mostly empty."""
    payload: Payload
    advanced: Mapping[int, int] | None = None
    """StepResult.advanced: decode rows, by slot, that advanced by less than their q_len."""

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
        """Tokens that an emitting row has here: more than one only where drafts were accepted."""
        row = self.rows[position]
        if row.start is not None:
            return 1
        return row.num_tokens if self.advanced is None else self.advanced.get(row.seq.slot, row.num_tokens)


@dataclass(frozen=True, slots=True)
class Finished(Generic[Owner]):
    """The last event of a sequence. All its tokens were reported before."""

    seq: Seq[Owner]
    reason: FinishReason


Event: TypeAlias = Scheduled[Owner] | Tokens[Owner, Payload] | Finished[Owner]
"""step() and drain() return a list of these."""


@dataclass(slots=True)
class Stats:
    """Gauges and counters of a loop; reading them is O(1)."""

    waiting: int = 0
    """Sequences without a row."""
    loading: int = 0
    """Waiting sequences whose prefix is being loaded."""
    running: int = 0
    in_flight: int = 0
    """Steps launched and not read yet."""
    steps: int = 0
    """Steps launched."""
    submitted: int = 0
    finished: int = 0
    preemptions: int = 0
    loads: int = 0
    """Loads started."""
    dry: int = 0
    """Turns without a launch, because the pool had too few free blocks."""
    prefill_tokens: int = 0
    """Prompt tokens launched in chunks, recomputed tokens included."""
    rejected: Counter[RejectReason] = field(default_factory=Counter)
