"""The ops that only DeepSeek-V4 has: contract, numpy reference, launches, cost."""

from collections.abc import Iterator
from typing import NamedTuple

from openinfer.kernels.authoring import Array

PAGE = 128
"""Tokens of a page of either group: the least common multiple of the ratios 4 and 128."""


class LiveRow(NamedTuple):
    """A row that a step runs: tokens first .. last - 1 of the step are at positions start, start + 1, ..."""

    slot: int
    first: int
    last: int
    start: int


def live_rows(slots: Array, q_starts: Array, seq_lens: Array, alive: Array) -> Iterator[LiveRow]:
    """The rows of a step that have tokens and are alive (as in expand_rows)."""
    for row, slot in enumerate(slots):
        first, last = int(q_starts[row]), int(q_starts[row + 1])
        if first < last and alive[slot]:
            yield LiveRow(int(slot), first, last, int(seq_lens[slot]))
