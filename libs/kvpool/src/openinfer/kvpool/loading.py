"""Loading: blocks whose content comes from elsewhere: memory of the host, a disk, another process.

A load takes private blocks, has a Loader fill them, and then makes findable what has come. The pool keeps the blocks
until the loader says that it is done with them, whatever becomes of the lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .ledger import Ledger

if TYPE_CHECKING:
    from .lease import Lease


class Piece(NamedTuple):
    """A block to be filled."""

    group: int
    name: bytes
    """What it is to hold: a name as hash_blocks gives it."""
    block: int
    """Where: a private block of the group."""


@dataclass(slots=True, eq=False)
class Load:
    """What a loader is asked to bring."""

    pieces: Sequence[Piece]
    failed: set[Piece] = field(default_factory=set)
    """The loader adds what did not come. The content of such a block does not matter."""


class Loader(Protocol):
    """Has blocks elsewhere, and copies them into blocks of the pool. One owner, the pool's."""

    def holds(self, group: int, names: Sequence[bytes]) -> Sequence[bool]:
        """Which of these blocks it has, as far as it knows: begin() may find one gone, and fail."""

    def begin(self, load: Load) -> None:
        """Start to fill the blocks of the load, and return. They are the loader's until poll() names the load."""

    def poll(self, wait_s: float | None) -> Sequence[Load]:
        """Loads that have ended, each once. Waits up to wait_s seconds (None: no limit) for the first if none has, and
        not at all if nothing loads."""


@dataclass(slots=True, eq=False)
class Part:
    """What a load uses of one group: a run of blocks, some of them cached already."""

    ledger: Ledger
    names: Sequence[bytes]
    parent: bytes | None
    """Name of the block before the first of a group of pages; None where there is none."""
    root: bytes
    """What the chain of names begins with."""
    tokens: Sequence[int]
    """Of the run; () for a snapshot."""
    blocks: list[int] = field(default_factory=list)
    """Along the names; 0 where none is there yet."""

    def share(self) -> None:
        """Keep what is cached."""
        self.blocks = [self.ledger.find(name) or 0 for name in self.names]
        self.ledger.share([block for block in self.blocks if block])

    @property
    def num_missing(self) -> int:
        """Blocks to be filled."""
        return self.blocks.count(0)

    def allocate(self) -> Iterator[tuple[bytes, int]]:
        """Take the missing blocks: name and block of each. There must be room."""
        fresh = iter(self.ledger.allocate(self.num_missing))
        for index, block in enumerate(self.blocks):
            if not block:
                self.blocks[index] = next(fresh)
                yield self.names[index], self.blocks[index]

    def register(self, come: set[bytes]) -> None:
        """Make findable what has come. Pages that need those before them: up to the first that has not."""
        size, parent = self.ledger.group.block_size, self.parent
        for index, (name, block) in enumerate(zip(self.names, self.blocks, strict=True)):
            if name in come:
                tokens = self.tokens[index * size : (index + 1) * size]
                self.ledger.register([block], [name], parent, tokens)
                if self.ledger.tails is not None:
                    self.ledger.tails.add(parent or self.root, name, tokens)
            elif self.ledger.lineage and not self.ledger.complete(block):
                break
            parent = name

    def release(self) -> None:
        """Let go of all blocks; those without a name are free."""
        self.ledger.release([block for block in reversed(self.blocks) if block], 0)


class LoadUnderWay(NamedTuple):
    """Whose load it is, and what it uses."""

    lease: Lease
    parts: Sequence[Part]

    def held(self, group: int) -> Iterator[int]:
        """Blocks in use, for audits."""
        yield from self.parts[group].blocks
