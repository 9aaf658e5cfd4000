"""SteadyDrafts: the speculation of a simulation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..policy import View
from ..sequence import Seq
from ..worth import Worth
from .report import Record


@dataclass(slots=True)
class SteadyDrafts:
    """A Speculation: each step has as many drafts a row as pay (Worth), as far as a step of `max_tokens` tokens has
    room. A draft is accepted with the chance `acceptance`, if those before it were.

    levels: see Worth. cost(rows, drafts): seconds of a step of these decode rows with this number of drafts each.
    """

    levels: Sequence[int]
    max_tokens: int
    acceptance: float
    cost: Callable[[int, int], float]
    seed: int = 0
    rest_until: int = 0
    _worth: Worth = field(init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random, self._worth = random.Random(self.seed), Worth(self.levels)

    def num_drafts(self, view: View) -> Mapping[Seq[Record], int]:
        """See Speculation. One token of a step is left for prompts."""
        rows, wanted = len(view.decoding), {}
        most = self._worth.choose([self.levels[-1]] * rows, rows, partial(self.cost, rows))
        room = self.max_tokens - 1 - rows
        for seq in view.decoding:
            count = min(most, room)
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
        self._worth.saw({(drafts, found): 1})
        return found

    def spent(self, rows: int, accepted: int, seconds: float) -> None:
        """A step of decode rows with drafts took so long."""
        self._worth.spent(rows, accepted, seconds, self.cost(rows, 0))
