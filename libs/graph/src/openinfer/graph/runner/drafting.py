"""Drafting: how many drafts a row has in a step, and which tokens a host's drafter proposes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openinfer.graph.rows import Rows
from openinfer.graph.runner.model import Constraint
from openinfer.graph.runner.verifying import DraftCounts, write_drafts
from openinfer.scheduler import Drafter, Seq, Step, View

if TYPE_CHECKING:
    from openinfer.graph.runner.sampling import Sampling


WORTH = 0.4
"""A draft that is accepted less often is left out: its tokens cost about what it brings."""
REMEMBERED = 16
"""Rows over which the chance of a draft is averaged."""
PROBED = 32
"""In one of this many steps rows have all drafts, whatever their chances."""


@dataclass(slots=True)
class Proposal:
    """A sequence's drafter, and the tokens that it proposed last for the positions from `position` on."""

    drafter: Drafter | None
    position: int = 0
    tokens: Sequence[int] = ()

    def renew(self, tokens: Sequence[int], count: int, constraint: Constraint | None) -> None:
        """Propose what a grammar forces, or ask the drafter where it forces nothing; neither if the sequence has
        no more tokens than before. The drafter: None if layers of the model draft."""
        if len(tokens) == self.position:
            return
        self.position = len(tokens)
        self.tokens = () if constraint is None else constraint.forced()[:count]
        if not self.tokens and self.drafter is not None:
            self.tokens = self.drafter.propose(tokens, count)


@dataclass(slots=True)
class Drafting:
    """scheduler.Speculation of an engine.

    max_drafts: of a row. max_tokens: of a step. make_drafter: a drafter for a sequence that starts; None: layers of the
    model draft, for every row.

    A proposal covers every position that the next step can reach, because the step before is still under way: up to
    max_drafts + 1 tokens from that one, and max_drafts from the next.
    """

    max_drafts: int
    max_tokens: int
    make_drafter: Callable[[], Drafter] | None
    counts: DraftCounts = field(default_factory=DraftCounts)
    _chances: list[float] = field(init=False)  # that the first, second, ... draft of a row is accepted
    _asked: int = 0

    def __post_init__(self) -> None:
        self._chances = [1.0] * self.max_drafts

    def saw(self, num_drafts: int, accepted: int) -> None:
        """A row with drafts has been read."""
        self.counts.add(num_drafts, accepted)
        for place in range(num_drafts):
            self._chances[place] += ((place < accepted) - self._chances[place]) / REMEMBERED

    def _most(self) -> int:
        """Drafts of a row in this step: those that are accepted often enough. All of them now and then, to see more."""
        self._asked += 1
        if self._asked % PROBED == 0:
            return self.max_drafts
        return next((n for n, chance in enumerate(self._chances) if chance < WORTH), self.max_drafts)

    def num_drafts(self, view: View) -> Mapping[Seq[Sampling], int]:
        """See scheduler.Speculation."""
        room, most = self.max_tokens - 1 - len(view.decoding), self._most()
        if not most:
            return {}
        wanted: dict[Seq[Sampling], int] = {}
        for seq in view.decoding:
            sampling: Sampling = seq.owner
            if sampling.draftless:
                continue
            count = min(most, room)
            if self.make_drafter is not None or sampling.constraint is not None:
                proposal = sampling.proposal
                if proposal is None:
                    drafter = None if self.make_drafter is None else self.make_drafter()
                    proposal = sampling.proposal = Proposal(drafter)
                proposal.renew(seq.tokens, 2 * self.max_drafts + 1, sampling.constraint)
                if self.make_drafter is not None:
                    # The tokens of the step under way come first, all of its drafts if they are right.
                    count = min(count, len(proposal.tokens) - (seq.bound - seq.confirmed))
            if count > 0:
                wanted[seq] = count
                room -= count
        return wanted

    def write(self, rows: Rows, step: Step[Sampling]) -> None:
        """Write the proposals of the step's rows with drafts."""
        for seq in step.drafts:
            proposal = seq.owner.proposal
            if proposal is not None and proposal.tokens:
                write_drafts(rows, seq.slot, proposal.position, proposal.tokens)
