"""The division of a model among ranks. A config is always the whole model's; its Part says which part a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass

from openinfer.recipes.engine.config_fields import FP8_BLOCK
from openinfer.recipes.engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several ranks has: an even share of all things of a kind. Where ranks are more than heads, groups of
    ranks have the same head."""

    rank: int = 0
    ranks: int = 1

    def of(self, count: int) -> int:
        """How many of `count` things this rank has."""
        return max(1, count // self.ranks)

    def first(self, count: int) -> int:
        """The first of them."""
        return self.rank * count // self.ranks

    def slice(self, count: int) -> slice:
        """All of them."""
        return slice(self.first(count), self.first(count) + self.of(count))

    def check(self, sizes: Mapping[str, tuple[int, int]], heads: Mapping[str, int] | None = None) -> None:
        """Raise UnsupportedModel unless ranks can share what these keys of config.json count, each with its unit: a
        rank's part is whole units. Units of FP8_BLOCK are blocks of a scale: a part begins with a block, or lies within
        one. heads: of which ranks have the same number each, or groups of ranks the same head."""
        for key, (size, unit) in sizes.items():
            part, rest = divmod(size, self.ranks)
            starts, fits = [rank * part % unit for rank in range(self.ranks)], part % unit == 0
            if unit == FP8_BLOCK:
                fits = part % 16 == 0 and all(start == 0 or start + part <= unit for start in starts)
            if rest or not part or not fits:
                raise UnsupportedModel(
                    f"config.json: {key} is {size}; {self.ranks} ranks cannot share it in multiples of {unit}"
                )
        for key, count in (heads or {}).items():
            if max(self.ranks, count) % min(self.ranks, count):
                raise UnsupportedModel(
                    f"config.json: {key} is {count}; {self.ranks} ranks cannot share or repeat them"
                )


WHOLE = Part()
"""A model on one rank."""
