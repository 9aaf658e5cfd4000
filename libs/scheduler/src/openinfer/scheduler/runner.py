"""Runner: the protocol of a device that runs steps, and the steps themselves.

The device holds the batch in fixed slots 1..max_rows; slot 0 is padding. It feeds the last sampled token of a row back
by itself. It also ends rows by itself: EOS, stop ids and length clear the row's alive bit. A dead row changes nothing
and yields nothing in later steps. So the host can launch a step before it has read the step before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, cast

from .sequence import FinishReason, Owner, Payload, Seq


class Row(NamedTuple, Generic[Owner]):
    """One row of a step.

    A decode row (start None) feeds the token that the device sampled last, at the position that the device counts,
    and emits the next token. With k drafts its q_len is 1 + k. It feeds the drafts after that token and accepts the
    longest prefix of drafts that equals its own samples. It emits one more token than it accepts. So it advances
    by 1 to 1 + k tokens (StepResult.advanced). Later steps overwrite the KV of rejected drafts. The loop gives a row
    no drafts that could stand at positions from seq.max_len - 1 on, because the row has no blocks there.

    A prefill chunk (start given) feeds seq.tokens[start : start + num_tokens], and emits if it reaches seq.target.
    """

    seq: Seq[Owner]
    num_tokens: int
    """q_len."""
    emits: bool
    """Whether the row samples: a decode row does, and the last chunk of a prompt."""
    start: int | None
    """Position of the chunk's first token; None for a decode row."""


class BlockWrite(NamedTuple, Generic[Owner]):
    """An update of a row's block table: table[first : first + len(blocks)] = blocks."""

    seq: Seq[Owner]
    group: int
    first: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Step(Generic[Owner]):
    """One step. `left`, `joined` and `blocks` list changes only, so they are mostly empty.

    The runner applies left, joined and blocks in this order, then runs the rows. It may keep the step.
    """

    index: int
    """1, 2, 3, ... in order of launch."""
    rows: Sequence[Row[Owner]]
    """Batch order: decode rows, then chunks. The same object as in the step before while nothing changed."""
    changed: bool
    """Whether `rows` differs from the step before."""
    num_decode: int
    """rows[:num_decode] are the decode rows."""
    left: Sequence[int]
    """Slots whose rows must be dead from this step on, because they were aborted or preempted. Rows that the device
    ended are dead already and are not listed."""
    joined: Sequence[Seq[Owner]]
    """Sequences that got a slot. The runner writes the row: alive, length seq.lease.num_cached, sampling state, limits.
    Tokens come with the chunks; the whole block table comes with `blocks`."""
    blocks: Sequence[BlockWrite[Owner]]
    """Block-table writes."""
    drafts: Mapping[Seq[Owner], int] = field(default_factory=dict)
    """Number of drafts of each decode row that has any."""
    launched_at: float = 0.0
    """Time of the launch by the loop's clock."""


@dataclass(slots=True)
class StepResult(Generic[Payload]):
    """The result of a step."""

    index: int
    finished: Sequence[tuple[int, FinishReason]] = ()
    """Slots of rows that ended in this step, each once. The row's last token of this step counts. A row that failed
    (ERROR) has the tokens that `advanced` says, and none without an entry there."""
    payload: Payload = field(default=cast(Any, None))
    """Tokens, log-probabilities, ...: opaque to the loop, which passes it on in the Tokens event."""
    advanced: Mapping[int, int] | None = None
    """Tokens that a decode row advanced by, by slot, where that is less than its q_len: 1 + accepted drafts, or fewer
    where the row ended; 0: it emitted no token. Other live rows advanced by their q_len. None: all did."""
    seconds: float | None = None
    """Seconds that the device took. None: the loop measures from the launch, or from the result before if that came
    later, to the reading of this result."""


class Runner(Protocol[Owner, Payload]):
    """Runs steps in order. A row that fails gets FinishReason.ERROR; an exception ends the loop."""

    def launch(self, step: Step[Owner]) -> None:
        """Start a step and return. At most the loop's `depth` steps are in flight."""

    def collect(self, wait_s: float | None) -> StepResult[Payload] | None:
        """The oldest launched step's result; None if it is not ready within wait_s seconds (None: no limit)."""
