"""SteadyDrafts: the speculation of a simulation."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..policy import View
from ..sequence import Seq
from .report import Record


@dataclass(slots=True)
class SteadyDrafts:
    """A Speculation: every decode row has `count` drafts, as far as a step of `max_tokens` tokens has room for them. A
    draft is accepted with the chance `acceptance`, if those before it were."""

    count: int
    max_tokens: int
    acceptance: float
    seed: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def num_drafts(self, view: View) -> Mapping[Seq[Record], int]:
        """See Speculation. One token of a step is left for prompts."""
        room, wanted = self.max_tokens - 1 - len(view.decoding), {}
        for seq in view.decoding:
            count = min(self.count, room)
            if count <= 0:
                break
            wanted[seq] = count
            room -= count
        return wanted

    def accepted(self, drafts: int) -> int:
        """How many of a row's drafts are accepted."""
        chance, found = self._random.random, 0
        while found < drafts and chance() < self.acceptance:
            found += 1
        return found
