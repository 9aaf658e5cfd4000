"""Loading: blocks whose content comes from elsewhere: host memory, a disk, another process.

A load takes private blocks, has a Loader fill them, and then makes the filled blocks findable. The pool keeps the
blocks until the loader reports the end of the load, even if the lease is released before.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .events import PoolStats
from .hashing import Chain
from .ledger import Ledger
from .matching import Index

if TYPE_CHECKING:
    from .lease import Lease


class Piece(NamedTuple):
    """A block to be filled."""

    group: int
    name: bytes
    """Name of the content, as hash_blocks makes it."""
    block: int
    """The private block of the group to fill."""


@dataclass(slots=True, eq=False)
class Load:
    """A request to a loader."""

    pieces: Sequence[Piece]
    failed: set[Piece] = field(default_factory=set)
    """The loader adds the pieces that it could not bring. Their blocks may hold anything."""


class Loader(Protocol):
    """Has blocks elsewhere, and copies them into blocks of the pool. One thread, that of the pool's owner, calls it."""

    def holds(self, group: int, names: Sequence[bytes]) -> Sequence[bool]:
        """For each name, whether the loader has the block. It may be gone when begin() reads it, and fails then."""

    def expect(self, group: int, names: Sequence[bytes]) -> None:
        """A load of these blocks begins when the pool has evicted others for it. The loader keeps them until then."""

    def begin(self, load: Load) -> None:
        """Start to fill the load's blocks. They are the loader's until poll() returns the load."""

    def poll(self, wait_s: float | None) -> Sequence[Load]:
        """Loads that have ended, each once. Waits up to wait_s seconds (None: no limit) for one, if any loads."""


@dataclass(slots=True, eq=False)
class LoadPart:
    """A load's run of blocks in one group. Some of them may be cached already."""

    ledger: Ledger
    names: Sequence[bytes]
    parent: bytes | None
    """Name of the block before the run. None for a first block and for snapshots."""
    tokens: Sequence[int]
    """Tokens of the run. () for a snapshot."""
    salt: bytes
    """Salt of the sequence, for events."""
    blocks: list[int] = field(default_factory=list)
    """Blocks along the names; 0 where the block is missing."""

    def share(self) -> None:
        """Use the cached blocks, so that they are not evicted."""
        self.blocks = [self.ledger.find(name) or 0 for name in self.names]
        self.ledger.share([block for block in self.blocks if block])

    @property
    def missing(self) -> list[bytes]:
        """Names of the blocks to be filled."""
        return [name for name, block in zip(self.names, self.blocks, strict=True) if not block]

    def room(self, leave: float) -> int:
        """Blocks that allocate() may take if that part of the group stays free."""
        group = self.ledger.group
        return self.ledger.num_free - (0 if group.snapshots else math.ceil(leave * (group.num_blocks - 1)))

    def allocate(self) -> Iterator[tuple[bytes, int]]:
        """Allocate the missing blocks. Yields name and block of each. The caller has checked room()."""
        fresh = iter(self.ledger.allocate(self.blocks.count(0)))
        for index, block in enumerate(self.blocks):
            if not block:
                self.blocks[index] = next(fresh)
                yield self.names[index], self.blocks[index]

    def register(self, come: set[bytes]) -> None:
        """Make blocks findable whose content has come; where pages need those before, up to the first missing."""
        size, parent = self.ledger.group.block_size, self.parent
        for index, (name, block) in enumerate(zip(self.names, self.blocks, strict=True)):
            if name in come:
                tokens = self.tokens[index * size : (index + 1) * size]
                self.ledger.register([block], [name], parent, tokens, self.salt)
            elif self.ledger.lineage and not self.ledger.complete(block):
                break
            parent = name

    def release(self) -> None:
        """Release all blocks. Blocks without a name are free then."""
        self.ledger.release([block for block in reversed(self.blocks) if block], 0)


class BlockLoads:
    """The loads of a pool. loader None: nothing can be loaded."""

    def __init__(self, index: Index, loader: Loader | None, stats: PoolStats) -> None:
        self._index, self._loader, self.stats = index, loader, stats
        self._under_way: dict[Load, tuple[Lease, list[LoadPart]]] = {}  # who waits, and the blocks in use

    def reach(self, tokens: Sequence[int], chain: Chain) -> int:
        """Length of the prefix that is cached or held by the loader. 0 without a loader. O(blocks)."""
        return 0 if self._loader is None else self._index.match_with(tokens, chain, self._loader.holds)

    def begin(self, lease: "Lease", tokens: Sequence[int], chain: Chain, end: int, leave: float) -> bool:
        """Load the blocks of the first `end` tokens that are not cached. Calls `Lease.landed` at the end. False: no
        room."""
        if self._loader is None:
            return False
        parts = [self._part(ledger, tokens, chain, end) for ledger in self._index.ledgers]
        for part in parts:
            part.share()
        missing = [part.missing for part in parts]
        if any(len(names) > part.room(leave) for part, names in zip(parts, missing, strict=True) if names):
            for part in parts:
                part.release()
            return False
        for group, names in enumerate(missing):
            self._loader.expect(group, names)
        pieces = [Piece(group, *found) for group, part in enumerate(parts) for found in part.allocate()]
        load = Load(pieces)
        self._under_way[load] = lease, parts
        self._loader.begin(load)
        return True

    def _part(self, ledger: Ledger, tokens: Sequence[int], chain: Chain, end: int) -> LoadPart:
        group = ledger.group
        start = end - group.num_needed(end) * group.block_size
        names = self._index.names(ledger, chain.names, start, end)
        if group.snapshots:
            return LoadPart(ledger, names, None, (), chain.salt)
        parent = chain.names[start // self._index.unit - 1] if start else None
        return LoadPart(ledger, names, parent, tokens[start:end], chain.salt)

    def poll(self, wait_s: float | None) -> "list[Lease]":
        """Leases whose loads have ended."""
        if self._loader is None or not self._under_way:
            return []
        ended = []
        for load in self._loader.poll(wait_s):
            lease, parts = self._under_way.pop(load)
            for group, part in enumerate(parts):
                part.register({p.name for p in load.pieces if p.group == group and p not in load.failed})
            lease.landed()
            for part in parts:
                part.release()
            self.stats.loaded += len(load.pieces) - len(load.failed)
            self.stats.failed += len(load.failed)
            ended.append(lease)
        return ended

    def held(self, group: int) -> Iterator[int]:
        for _, parts in self._under_way.values():
            yield from parts[group].blocks
