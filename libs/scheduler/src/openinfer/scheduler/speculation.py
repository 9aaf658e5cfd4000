"""Speculation: who says how many drafts a decode row verifies in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .policy import View
from .sequence import Owner, Seq


class Speculation(Protocol[Owner]):
    """Chooses the number of drafts. The drafts themselves stay between the chooser and the runner.

    A row with k drafts runs as 1 + k tokens, and its step reports how far it advanced (StepResult.advanced). A number
    may come from the acceptance seen, the cost of the step or the drafts at hand: layers of the model that draft on
    the device know their number before the drafts exist; a look-up on the host gives none where it found none.
    """

    def num_drafts(self, view: View) -> Mapping[Seq[Owner], int]:
        """Drafts of decode rows in step `view.step`, by sequence; a sequence that is not named has none.

        Called before each step that has decode rows, and again if the step cannot be launched yet: do little, and
        name no row that is not in view.decoding. 1 + k tokens a row, over all rows, must leave room for prompts in
        what the policy gives a step. The loop lowers a number near the end of a sequence, and sets it to 0 where the
        pool has no blocks for the drafts: Step.drafts is what runs.
        """
