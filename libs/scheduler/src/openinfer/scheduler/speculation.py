"""Speculation: the protocol that chooses how many drafts a decode row verifies in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .policy import View
from .sequence import Owner, Seq


class Speculation(Protocol[Owner]):
    """Chooses the number of drafts of each decode row. The draft tokens pass from the engine to the runner, not through
    the loop.

    A row with k drafts runs as 1 + k tokens, and the step reports how far it advanced (StepResult.advanced). The number
    can follow from the cost of the step, the acceptance rate, or the drafts at hand: an MTP head drafts on the device,
    an n-gram look-up on the host, and a look-up that finds nothing gives 0.

    rest_until: the loop does not ask before this step, and no row has drafts until then. 0: it asks before each.
    """

    rest_until: int

    def num_drafts(self, view: View) -> Mapping[Seq[Owner], int]:
        """Number of drafts of each row in step `view.step`. A row that is not named has none.

        The loop calls it before each step that has decode rows, and again if the step cannot be launched yet. Name
        rows of view.decoding only. The tokens of all decode rows must leave room for prompts in the policy's
        budget. The loop lowers a number near the end of a sequence, and sets it to 0 if the pool has no blocks for
        the drafts. Step.drafts has the numbers that run.
        """
