"""Runner: what runs steps on a device; and what the loop hands to it: Steps.

The device holds the batch in fixed slots 1..max_rows; slot 0 is padding. What a row's next token is, the
device knows (it feeds tokens back by itself), and it ends rows by itself: EOS, stop ids and length clear the
row's alive bit, and a dead row in a step launched later changes nothing and yields nothing. So a step can be
launched before the last is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, cast

from .sequence import FinishReason, Owner, Payload, Seq


class Row(NamedTuple, Generic[Owner]):
    """One row of a step.

    A decode row (start None) feeds the token that the device sampled last, at the position that the device counts,
    and emits the next token. With k drafts its q_len is 1 + k: it feeds the drafts after that token, keeps the prefix
    of the drafts that are what it samples itself, and emits one token more than it keeps. So it advances by 1 to 1 + k
    tokens (StepResult.advanced). What it wrote for the other drafts is overwritten later. Drafts for positions from
    seq.max_len - 1 on are neither written nor kept: the row has no blocks for them.

    A prefill chunk (start given) feeds seq.tokens[start : start + num_tokens], and emits only if it reaches the end
    (seq.target).
    """

    seq: Seq[Owner]
    num_tokens: int
    """q_len."""
    emits: bool
    """Whether tokens are sampled: in a decode row and in the last chunk of a prompt."""
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
    """What a runner launches. Only changes are listed: `left`, `joined` and `blocks` are mostly empty.

    Apply in this order: left, joined, blocks; then run the rows. The runner may keep the step: the loop does
    not change it any more.
    """

    index: int
    """1, 2, 3, ... in order of launch."""
    rows: Sequence[Row[Owner]]
    """Batch order: decode rows, then chunks. The very same object as last time while nothing changed."""
    changed: bool
    """Whether `rows` differs from the step before."""
    num_decode: int
    """rows[:num_decode] are the decode rows."""
    left: Sequence[int]
    """Slots whose rows must be dead from this step on: aborted or preempted. (Rows that the device ended
    itself are dead already and are not listed.)"""
    joined: Sequence[Seq[Owner]]
    """Newly given a slot: write its row (alive, sequence length seq.lease.num_cached, sampling state,
    limits). Their tokens come with their chunks, their whole block tables with `blocks`."""
    blocks: Sequence[BlockWrite[Owner]]
    """Block-table writes."""
    drafts: Mapping[Seq[Owner], int] = field(default_factory=dict)
    """Decode rows with drafts, and how many: those of q_len above 1."""
    launched_at: float = 0.0
    """By the loop's clock."""


@dataclass(slots=True)
class StepResult(Generic[Payload]):
    """What became of a step."""

    index: int
    finished: Sequence[tuple[int, FinishReason]] = ()
    """Rows (slots) that ended in this step. The token of this step is their last and counts, unless the reason is
    ERROR. Each row
    once."""
    payload: Payload = field(default=cast(Any, None))
    """Tokens, logprobs, ...: opaque here, passed on in the Tokens event."""
    advanced: Mapping[int, int] | None = None
    """Decode rows, by slot, that advanced by less than their q_len, and by how many tokens: 1 + the drafts kept, of
    which the last token emitted was the last; 0: the row stood still and emitted nothing. Other live rows advanced by
    their q_len. None: all did."""
    seconds: float | None = None
    """How long the device took. None: the loop takes the time from launch, or from the result before if that
    came later, to the reading of this one."""


class Runner(Protocol[Owner, Payload]):
    """Runs steps, in order. It raises only when all is lost; one failed row is a FinishReason.ERROR."""

    def launch(self, step: Step[Owner]) -> None:
        """Start a step without waiting for it. At most the loop's `depth` steps are in flight."""

    def collect(self, wait_s: float | None) -> StepResult[Payload] | None:
        """The oldest launched step's result; None if it is not ready within wait_s seconds (None: no limit)."""
