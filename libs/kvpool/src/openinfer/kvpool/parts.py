"""What a lease holds of one group: pages (all of them, or those of a window), or a live state and its snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .ledger import Ledger
from .tails import tail_name


@dataclass(frozen=True, slots=True)
class Copy:
    """State to be copied inside one group."""

    group: int
    source: int
    """Block to copy from. It stays as it is until the lease's next commit."""
    target: int
    """Block to copy to: the lease's own."""
    num_tokens: int
    """Of a page: its first num_tokens tokens. Of a snapshot: the tokens that the state has seen."""


class Pages:
    """A block table: entry i is the block of tokens i * block_size and on, 0 where a window has moved past it."""

    def __init__(self, ledger: Ledger, scale: int, priority: int) -> None:
        self.ledger = ledger
        self._priority = priority
        self.table: list[int] = []
        self.source = 0  # begins as our first new block does: to be copied into it
        self._scale = scale  # hashes a block
        self._block_size = ledger.group.block_size
        self._window = ledger.group.window
        self._first = 0  # entries before are out of the window
        self._num_committed = 0  # blocks
        self._tail: Sequence[int] = ()  # committed tokens of the block after them, if tails are shared

    def attach(self, blocks: list[int], source: int) -> None:
        """Start from these complete blocks, 0 for those not needed."""
        self.table = blocks
        self._num_committed = len(blocks)
        if self._window is not None:
            self._first = blocks.count(0)
        self.ledger.share(blocks[self._first :])
        if source:
            self.ledger.share([source])
            self.source = source

    def held(self) -> Iterator[int]:
        """Blocks in use, for audits."""
        yield from self.table[self._first :]
        if self.source:
            yield self.source

    def missing(self, num_tokens: int) -> int:
        """Blocks to allocate before num_tokens tokens fit."""
        return -(-num_tokens // self._block_size) - len(self.table)

    def grow(self, count: int) -> list[int]:
        """Append `count` new blocks; the source itself if there is no room for a copy."""
        blocks = self.ledger.allocate(count, self.source)
        if blocks[0] == self.source:
            self.source = 0
        self.table.extend(blocks)
        return blocks

    def num_hashes(self, num_confirmed: int) -> int:
        """Hashes that register() needs: 0 if it has nothing to do."""
        last = num_confirmed // self._block_size
        return last * self._scale if last > self._num_committed else 0

    def register(self, hashes: list[bytes], root: bytes, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the blocks that the confirmed tokens fill."""
        size, scale = self._block_size, self._scale
        first, last = self._num_committed, num_confirmed // size
        tails = self.ledger.tails
        if last > first:
            names = hashes[(first + 1) * scale - 1 : last * scale : scale]
            parent = hashes[first * scale - 1] if first else None
            own = tokens[first * size : last * size]
            self.ledger.register(self.table[first:last], names, parent, own)
            self._num_committed = last
            if tails is not None:
                for index, name in enumerate(names):
                    tails.add(parent or root, name, own[index * size : (index + 1) * size])
                    parent = name
        if tails is not None:
            self._tail = tokens[last * size : num_confirmed]

    def slide(self, num_confirmed: int) -> None:
        """Give back what the tokens after the confirmed ones do not need."""
        if self._window is None:
            return
        first = max(num_confirmed - self._window, 0) // self._block_size
        if first > self._first:
            self.ledger.release(self.table[self._first : first], self._priority)
            self.table[self._first : first] = [0] * (first - self._first)
            self._first = first

    def drop_source(self) -> None:
        """The copy was carried out, or will not be."""
        if self.source:
            self.ledger.release([self.source], self._priority)
            self.source = 0

    def keep_tail(self, hashes: list[bytes], root: bytes) -> None:
        """Make the last, unfinished block findable, before a release."""
        tails, index = self.ledger.tails, self._num_committed
        if tails is None or len(self._tail) < tails.min_tokens:
            return
        parent = hashes[index - 1] if index else None
        name = tail_name(parent or root, self._tail)
        self.ledger.register(self.table[index : index + 1], [name], parent, None)
        tails.add(parent or root, name, self._tail)

    def release(self) -> None:
        """Give everything back."""
        self.drop_source()
        self.ledger.release(reversed(self.table[self._first :]), self._priority)
        self.table.clear()
        self._first = 0


class Snapshots:
    """A live block, the whole of the table, and the snapshots that were taken and not committed."""

    def __init__(self, ledger: Ledger, scale: int, priority: int) -> None:
        self.ledger = ledger
        self._priority = priority
        self.table: list[int] = []
        self.source = 0  # the state to begin with: to be copied into the live block
        self._unit = ledger.group.block_size // scale
        self._pending: dict[int, int] = {}  # tokens seen -> block

    def attach(self, source: int) -> None:
        """Start from this snapshot."""
        self.ledger.share([source])
        self.source = source

    def held(self) -> Iterator[int]:
        """Blocks in use, for audits."""
        yield from self.table
        yield from self._pending.values()
        if self.source:
            yield self.source

    def missing(self, num_tokens: int) -> int:
        """The live block, once."""
        return 0 if self.table else 1

    def grow(self, count: int) -> list[int]:
        """Allocate the live block; the source itself if there is no room for a copy."""
        self.table = self.ledger.allocate(count, self.source)
        if self.table[0] == self.source:
            self.source = 0
        return list(self.table)

    def has_room(self, boundary: int) -> bool:
        """Whether snapshot(boundary) can be."""
        return boundary in self._pending or self.ledger.num_free > 0

    def snapshot(self, boundary: int) -> int:
        """A block to copy the live one into when it has seen `boundary` tokens. There must be room."""
        if boundary not in self._pending:
            (self._pending[boundary],) = self.ledger.allocate(1)
        return self._pending[boundary]

    def num_hashes(self, num_confirmed: int) -> int:
        """Hashes that register() needs: 0 if it has nothing to do."""
        return max((end for end in self._pending if end <= num_confirmed), default=0) // self._unit

    def register(self, hashes: list[bytes], root: bytes, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the snapshots that confirmed tokens led to, and let go of them: they are in the cache now."""
        for end in sorted(end for end in self._pending if end <= num_confirmed):
            block = self._pending.pop(end)
            self.ledger.register([block], [hashes[end // self._unit - 1]], None, ())
            self.ledger.release([block], self._priority)

    def drop_source(self) -> None:
        """The copy was carried out, or will not be."""
        if self.source:
            self.ledger.release([self.source], self._priority)
            self.source = 0

    def release(self) -> None:
        """Give everything back."""
        self.drop_source()
        self.ledger.release([*self._pending.values(), *self.table], self._priority)
        self._pending.clear()
        self.table.clear()
