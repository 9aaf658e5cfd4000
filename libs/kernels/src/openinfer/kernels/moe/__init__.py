"""A mixture of experts of any weights: the pairs of its launches, the loop of its reference, the bytes of its cost.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, multiplied twice with the experts'
weights, and added up by token. Products of few pairs find them without a sort. plain.py has the kernels for weights
that a product takes unchanged, packed.py those for weights that it unpacks or takes as codes, ring.py rings of
weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.op.launch import Scratch, power_of_two
from openinfer.kernels.op.reference import Array
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, int32

SORT_BLOCK = 4096
"""The most pairs that a sorting program looks at, at a time."""
UNSORTED = 32
"""The most pairs that a product looks through in place of a sort. Of more, the search takes longer than the sort."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a step: `order` has them sorted by expert, expert e those from starts[e] to starts[e + 1]. fixed:
    kernels do not depend on how many there are."""

    tokens: int
    chosen: int
    experts: int
    order: Scratch
    starts: Scratch
    fixed: bool

    @classmethod
    def of(cls, target: Target, expert_ids: Tensor, experts: int) -> "Pairs":
        """The pairs of expert_ids int32 [T, K]."""
        tokens, chosen = expert_ids.shape
        order, starts = Scratch((tokens * chosen,), int32), Scratch((experts + 1,), int32)
        return cls(tokens, chosen, experts, order, starts, target.batch_invariant)

    @property
    def sorted(self) -> dict[str, Scratch]:
        """`order` and `starts` as arguments of a kernel."""
        return {"order": self.order, "starts": self.starts}

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return self.tokens * self.chosen

    @property
    def sorted_at_once(self) -> int:
        """Pairs that a sorting program looks at, at a time."""
        return SORT_BLOCK if self.fixed else min(SORT_BLOCK, power_of_two(self.count))

    def few(self, places: int) -> bool:
        """Whether a tile a pair is fewer tiles than `places` a tile and one more for each expert."""
        return not self.fixed and self.count < self.count // places + self.experts

    def looked_through(self, places: int) -> int:
        """UNSORTED where a product with `places` places a tile looks through the pairs, 1 where it has no need to; 0
        where they are sorted."""
        return (1 if self.tokens == 1 else UNSORTED) if self.count <= UNSORTED and self.few(places) else 0

    def tiles(self, places: int) -> int:
        """An upper bound of the number of tiles, with `places` places each."""
        return self.count if self.few(places) else self.count // places + self.experts


def results(expert_ids: Array, width: int, mlp: Callable[[int, Array, Array], Array]) -> Array:
    """Float32 [T, K, width]: the result of each pair, zero for no expert. `mlp(expert, tokens, choices)` gives the rows
    of the pairs of one expert."""
    out = np.zeros((*expert_ids.shape, width), np.float32)
    for expert in np.unique(expert_ids[expert_ids >= 0]):
        token, choice = np.nonzero(expert_ids == expert)
        out[token, choice] = mlp(int(expert), token, choice)
    return out


def weight_bytes(tokens: int, chosen: int, all_experts: int, *weights: Linear[Tensor] | Tensor) -> int:
    """The bytes of these experts' weights that a call reads, as many experts as evenly random routing hits; tokens
    choose among `all_experts`, some of which other ranks may have."""
    hit = 1 - (1 - min(1, chosen / all_experts)) ** tokens
    return int(sum(weight.nbytes for weight in weights) * hit)
