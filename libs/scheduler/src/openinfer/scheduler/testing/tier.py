"""FakeTier: another process that has blocks. Its copies are slow, and some fail."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from .fake_runner import FakeRunner, cell


class TierPiece(NamedTuple):
    """A block to fill with the last cells of `tokens`."""

    group: int
    block: int
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class TierLoad:
    """A load: the pieces that are copied."""

    pieces: Sequence[TierPiece]
    polls: int
    """Number of polls before the poll that ends the load."""
    failed: set[TierPiece] = field(default_factory=set)
    """After the end: pieces that did not come. Their blocks hold garbage."""


class FakeTier:
    """Holds every block of some sequences, and copies blocks of them to the memory of a FakeRunner.

    sequences: lists of tokens. delay(): polls that a load takes. fails(): whether a piece does not come. Until a
    load has ended its blocks are empty, so a row that reads them too early causes a DeviceFault.
    """

    def __init__(
        self,
        runner: FakeRunner,
        sequences: Iterable[Sequence[int]],
        *,
        delay: Callable[[], int] = lambda: 0,
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sequences = [tuple(tokens) for tokens in sequences]
        self.loads: list[TierLoad] = []
        self.num_failed = 0
        self._held = {tokens[:end] for tokens in self.sequences for end in range(1, len(tokens) + 1)}
        self._runner, self._delay, self._fails = runner, delay, fails

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the tier has the blocks that end with this prefix."""
        return tuple(tokens) in self._held

    def begin(self, pieces: Sequence[TierPiece]) -> TierLoad:
        """Start a load. No row may use the blocks until the load has ended."""
        load = TierLoad(pieces, self._delay())
        self.loads.append(load)
        for piece in pieces:
            self._runner.fill(piece.group, piece.block, 0, [])
        return load

    def poll(self, wait_s: float | None = 0.0) -> list[TierLoad]:
        """Loads that have ended. A wait without limit ends one load."""
        for load in self.loads:
            load.polls -= 1
        if wait_s is None and self.loads:
            self.loads[0].polls = -1
        ended = [load for load in self.loads if load.polls < 0]
        self.loads = [load for load in self.loads if load.polls >= 0]
        for load in ended:
            for piece in load.pieces:
                self._copy(load, piece)
        return ended

    def _copy(self, load: TierLoad, piece: TierPiece) -> None:
        cells = list(accumulate(piece.tokens, cell, initial=0))[1:]
        if self._fails():
            load.failed.add(piece)
            cells = [-1] * len(cells)
        self.num_failed += piece in load.failed
        size = self._runner.block_size(piece.group)
        self._runner.fill(piece.group, piece.block, len(cells) - size, cells[-size:])
