"""The sampling ops. What they share: a row's results, and how its logits are cut for the kernels."""

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

from openinfer.kernels.authoring import Scratch, power_of_two

Array = np.ndarray[Any, Any]

NO_TOKEN = -1
"""In place of a token: the row does not sample."""

UNSOUND = -2
"""In place of a token: no token can be drawn from the row's logits."""


class RowStatus(IntEnum):
    """The state of a row after a step: the second column of `advance`'s result."""

    IDLE = 0
    """Dead, or without tokens in the step; nothing was touched."""
    RUNNING = 1
    STOP = 2
    """Ended: the token is among the row's stop ids."""
    LENGTH = 3
    """Ended: the sequence, its new token included, is as long as it may be."""
    FAILED = 4
    """Ended: no token could be drawn (NaN or +inf among the logits, or nothing left to draw)."""
    DRAFTED_STOP = 5
    """Ended like STOP, and the token is the row's next draft, as `accept` found."""
    UNTRIED = -1
    """RUNNING, and there is no next draft where the row could have one, as `accept` found."""


class Adjustment(IntFlag):
    """The kinds of changes to a row's logits before a token is chosen: the bits of the field `adjusts`."""

    ALLOWED = 1
    BAD_WORDS = 2
    BIAS = 4
    PENALTIES = 8


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
    def of(cls, vocabulary: int) -> "Tiles":
        group = max(SMALLEST_GROUP, power_of_two(-(-vocabulary // MOST_GROUPS)))
        chunk = max(CHUNK, group)
        return cls(vocabulary, chunk, -(-vocabulary // chunk), group, -(-vocabulary // group))

    def found(self, rows: int, dtype: Any, *names: str) -> dict[str, Scratch]:
        """Scratch [rows, parts] by name: what the programs of a streaming kernel leave for the next kernel."""
        return {name: Scratch((rows, self.parts), dtype) for name in names}
