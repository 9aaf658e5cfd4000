"""Hold: keeps blocks unchanged while a copy reads them, or while a prefix is pinned."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Self

from .errors import InvalidBlocks
from .ledger import Ledger


def with_ancestors(ledger: Ledger, blocks: Sequence[int]) -> list[int]:
    """These blocks and all their ancestors, each once, parents first. O(blocks returned)."""
    found: dict[int, None] = {}
    for block in blocks:
        if not ledger.complete(block):
            raise InvalidBlocks(
                f"block {block} of group {ledger.group.name!r} is not complete, only complete blocks can be "
                "held; to copy one that is being written, keep its lease"
            )
        line = []
        for ancestor in ledger.ancestry(block):
            if ancestor in found:
                break
            line.append(ancestor)
        found.update(dict.fromkeys(reversed(line)))
    return list(found)


class Hold:
    """Blocks that the pool neither evicts nor reuses until `release()`. Made by `Pool.hold` and `Pool.pin`.

    It is also a context manager. A hold that is dropped without a release releases itself and warns (ResourceWarning).
    """

    num_tokens: int
    """Length of the pinned prefix; 0 for a hold on blocks."""

    def __init__(self, parts: Sequence[tuple[Ledger, list[int]]], num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        self._parts = parts
        self._released = not any(blocks for _, blocks in parts)
        for ledger, blocks in parts:
            ledger.share(blocks)

    def held(self, ledger: Ledger) -> Iterator[int]:
        """Blocks of a group in use, for audits."""
        for other, blocks in self._parts:
            if other is ledger and not self._released:
                yield from blocks

    def records(self) -> Iterator[tuple[int, list[bytes], list[int]]]:
        """Group, names and blocks of what is held, for copies elsewhere."""
        for ledger, blocks in self._parts:
            named = [(name, block) for block in blocks if (name := ledger.name(block)) is not None]
            yield ledger.index, [name for name, _ in named], [block for _, block in named]

    def release(self) -> None:
        """Release the blocks. Idempotent."""
        if self._released:
            return
        self._released = True
        for ledger, blocks in self._parts:
            ledger.release(reversed(blocks), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            warnings.warn("a hold was never released", ResourceWarning, stacklevel=2)
            self.release()
