"""Drafting: how many drafts a row has in a step, and which tokens a host's drafter proposes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openinfer.graph.rows import Rows
from openinfer.graph.runner.verifying import DraftCounts, write_drafts
from openinfer.scheduler import Drafter, Seq, Step, View

if TYPE_CHECKING:
    from openinfer.graph.runner.runner import Sampling


@dataclass(slots=True)
class Proposal:
    """A sequence's drafter, and the tokens that it proposed last for the positions from `position` on."""

    drafter: Drafter
    position: int = 0
    tokens: Sequence[int] = ()

    def renew(self, tokens: Sequence[int], count: int) -> None:
        """Ask the drafter, unless the sequence has no more tokens than when it was asked last."""
        if len(tokens) != self.position:
            self.position, self.tokens = len(tokens), self.drafter.propose(tokens, count)


@dataclass(slots=True)
class Drafting:
    """scheduler.Speculation of an engine whose drafts come from the host.

    max_drafts: of a row. max_tokens: of a step. make_drafter: a drafter for a sequence that starts.

    A proposal covers every position that the next step can reach, because the step before is still under way: up to
    max_drafts + 1 tokens from that one, and max_drafts from the next.
    """

    max_drafts: int
    max_tokens: int
    make_drafter: Callable[[], Drafter]
    counts: DraftCounts = field(default_factory=DraftCounts)

    def num_drafts(self, view: View) -> Mapping[Seq[Sampling], int]:
        """See scheduler.Speculation. A row with a grammar has no drafts: its mask depends on the token before."""
        room = self.max_tokens - 1 - len(view.decoding)
        wanted: dict[Seq[Sampling], int] = {}
        for seq in view.decoding:
            sampling: Sampling = seq.owner
            if sampling.constraint is not None:
                continue
            if sampling.proposal is None:
                sampling.proposal = Proposal(self.make_drafter())
            sampling.proposal.renew(seq.tokens, 2 * self.max_drafts + 1)
            count = min(self.max_drafts, len(sampling.proposal.tokens), room)
            if count > 0:
                wanted[seq] = count
                room -= count
        return wanted

    def write(self, rows: Rows, step: Step[Sampling]) -> None:
        """Write the proposals of the step's rows with drafts."""
        for seq in step.drafts:
            proposal = seq.owner.proposal
            if proposal is not None:
                write_drafts(rows, seq.slot, proposal.position, proposal.tokens)
