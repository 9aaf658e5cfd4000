"""Masking: the masks of rows with a grammar, at each position where the row may draw a token.

A mask depends on all tokens before it. So the masks of a step are made when the step before has been read. The drafts
of the step are known on the host by then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.graph.rows import Rows
from openinfer.graph.runner.model import Constraint, Masks
from openinfer.graph.runner.sampling import Sampling
from openinfer.sampler.gpu import RowStatus, masks_after
from openinfer.scheduler import Seq, Step

Array = np.ndarray[Any, Any]
Counts = Mapping[Seq[Sampling], int]
Constrained = Sequence[tuple[int, Seq[Sampling], Constraint]]
"""The rows of a step that get a token under a grammar: position in the step, sequence, constraint."""


def constrained_rows(step: Step[Sampling], emits: Array) -> Constrained:
    """The rows of a step that emit and have a constraint. emits int32 [R]."""
    seqs = ((at, step.rows[at].seq) for at in emits.nonzero()[0].tolist())
    return [(at, seq, found) for at, seq in seqs if (found := seq.owner.constraint) is not None]


def accept_tokens(constrained: Constrained, result: Array) -> dict[Seq[Sampling], int]:
    """Move constraints past the tokens of a step, result int32 [1 + D, R, 3]. The number of tokens by sequence."""
    counts: dict[Seq[Sampling], int] = {}
    for at, seq, constraint in constrained:
        for token, status in result[:, at, :2].tolist():
            if status in (RowStatus.RUNNING, RowStatus.UNTRIED):
                constraint.accept(token)
                counts[seq] = counts.get(seq, 0) + 1
            elif status > RowStatus.RUNNING:
                constraint.ended = True
    return counts


class NoMasks:
    """The Masks of a runner whose sequences have no constraint."""

    def fill(self, *args: Any) -> Any:
        """Raises TypeError, as does look_ahead."""
        raise TypeError("a sequence has a constraint, and the runner no masks")

    look_ahead = fill


@dataclass(slots=True)
class Masking:
    """Writes the masks that `masks` makes into the rows of a batch."""

    rows: Rows
    masks: Masks
    proposed: Array | None = None
    """The field `drafts`, int32 [S, L], as layers that draft left it after the step that was read last. None: the host
    writes all drafts."""

    def write(self, constrained: Constrained, drafts: Counts, counts: Counts) -> None:
        """Write the masks of a step's rows. drafts: the step's. counts: tokens that are not in `Seq.tokens` yet."""
        if not constrained:
            return
        masks, complete = self.masks.fill([constraint for _, _, constraint in constrained])
        for (_, seq, constraint), mask, ends in zip(constrained, masks, complete, strict=True):
            self.rows.write("allowed_masks", seq.slot, mask)
            if ends:
                self.rows.set("min_lens", seq.slot, 0)  # a complete output ends, however short it is
            if seq in drafts:
                position = len(seq.tokens) + counts.get(seq, 0)
                self._look_ahead(seq, constraint, mask, position, drafts[seq])

    def _look_ahead(
        self, seq: Seq[Sampling], constraint: Constraint, mask: Array, position: int, count: int
    ) -> None:
        """Write the masks after the drafts of a row, which stand from `position` on."""
        rows, slot = self.rows, seq.slot
        drafts = self._drafts(seq, position, count)
        masks, checked = self.masks.look_ahead(constraint, mask, drafts)
        for place, (draft, other) in enumerate(zip(drafts, checked, strict=True)):
            if draft != other:
                rows.write("drafts", slot, [other], offset=(position + place) % rows.width("drafts"))
                break
            rows.write(masks_after(place + 1), slot, masks[place])

    def _drafts(self, seq: Seq[Sampling], position: int, count: int) -> list[int]:
        held = self.rows.held("drafts", seq.slot) if self.proposed is None else self.proposed[seq.slot]
        found = [int(held[(position + place) % len(held)]) for place in range(count)]
        written = seq.owner.proposal
        if written is not None:
            for place in range(count):
                if 0 <= position + place - written.position < len(written.tokens):
                    found[place] = written.tokens[position + place - written.position]
        return found[: found.index(-1)] if -1 in found else found
