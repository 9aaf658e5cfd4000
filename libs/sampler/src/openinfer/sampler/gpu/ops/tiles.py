"""How a row of logits is cut for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from openinfer.kernels.authoring import Aligned, power_of_two

CHUNK = 4096
"""Logits a program of a streaming kernel reads."""

SMALLEST_GROUP = 128
MOST_GROUPS = 2048
"""Groups of a row whose maxima one program holds."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A row of `vocabulary` logits as `parts` of `chunk` for streaming, and as `groups` of `group` that are skipped by
    their maxima. Chunk and group are powers of two, and a chunk is whole groups."""

    vocabulary: int
    chunk: int
    parts: int
    group: int
    groups: int

    @classmethod
    def of(cls, vocabulary: int) -> Tiles:
        group = max(SMALLEST_GROUP, power_of_two(-(-vocabulary // MOST_GROUPS)))
        chunk = max(CHUNK, group)
        return cls(vocabulary, chunk, -(-vocabulary // chunk), group, -(-vocabulary // group))

    @property
    def row_length(self) -> Aligned | int:
        """The vocabulary as an argument: rows are read in wide loads where it allows them."""
        return self.vocabulary if self.vocabulary % 16 else Aligned(self.vocabulary)

    @property
    def parts_padded(self) -> int:
        return power_of_two(self.parts)

    @property
    def groups_padded(self) -> int:
        return power_of_two(self.groups)
