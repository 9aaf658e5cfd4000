"""FakeLoader: another process that has the blocks of some sequences. Its copies are slow, and some fail."""

import random
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Any

from ..group import Group
from ..hashing import hash_blocks
from ..loading import Load


def contents(salt: bytes, tokens: Sequence[int]) -> list[int]:
    """The content of a sequence in memory: entry p stands for the salt and the first p tokens."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(salt)))


class FakeLoader:
    """A Loader over the simulated memory of a History: memory[group][block].

    A load takes up to `delay` polls. `failures` is the part of its blocks that does not come. Blocks of a load are
    empty until its end; failed blocks then hold garbage.
    """

    def __init__(
        self, groups: Sequence[Group], seed: int = 0, *, delay: int = 3, failures: float = 0.2
    ) -> None:
        self.memory: list[dict[int, Any]] = [{} for _ in groups]
        self.loads: dict[Load, int] = {}
        """Loads in flight, with the polls that are left."""
        self.num_come = self.num_failed = 0
        self._groups, self._delay, self._failures = groups, delay, failures
        self._random = random.Random(seed)
        self._contents: list[dict[bytes, Any]] = [{} for _ in groups]

    def store(self, tokens: Sequence[int], salt: bytes, unit: int) -> None:
        """Add the blocks of these tokens. unit: the pool's hash_block_size."""
        names, held = hash_blocks(tokens, unit, salt), contents(salt, tokens)
        for group, known in zip(self._groups, self._contents, strict=True):
            size = group.block_size
            for end in range(size, len(tokens) + 1, size):
                page = {offset: held[end - size + offset + 1] for offset in range(size)}
                known[names[end // unit - 1]] = held[end] if group.snapshots else page

    def holds(self, group: int, names: Sequence[bytes]) -> list[bool]:
        return [name in self._contents[group] for name in names]

    def expect(self, group: int, names: Sequence[bytes]) -> None:
        """Nothing: this loader evicts nothing."""

    def begin(self, load: Load) -> None:
        """Start a load, and empty its blocks."""
        self.loads[load] = self._random.randint(0, self._delay)
        for piece in load.pieces:
            self.memory[piece.group].pop(piece.block, None)

    def poll(self, wait_s: float | None) -> list[Load]:
        """Loads that have ended. A wait without limit ends all."""
        self.loads = {load: polls - 1 for load, polls in self.loads.items()}
        ended = [load for load, polls in self.loads.items() if polls < 0 or wait_s is None]
        for load in ended:
            del self.loads[load]
            for piece in load.pieces:
                content = self._contents[piece.group][piece.name]
                if self._random.random() < self._failures:
                    load.failed.add(piece)
                    content = dict.fromkeys(content, "nonsense") if isinstance(content, dict) else "nonsense"
                self.memory[piece.group][piece.block] = copy(content)
            self.num_failed += len(load.failed)
            self.num_come += len(load.pieces) - len(load.failed)
        return ended
