"""Pages and Snapshots: the part of a lease in one group."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .hashing import Chain
from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class Copy:
    """The state of a group of snapshots, to be copied from one block to another."""

    group: int
    source: int
    """Block to copy from. It stays unchanged until the lease commits more than num_cached tokens."""
    target: int
    """Block to copy to. It belongs to the lease."""
    num_tokens: int
    """Tokens that the state has seen."""


class Pages:
    """A block table. Entry i is the block of the tokens from i * block_size on; 0 where the window has moved past."""

    def __init__(self, ledger: Ledger, scale: int, priority: int) -> None:
        self.ledger = ledger
        self._priority = priority
        self.table: list[int] = []
        self.num_tokens = 0  # tokens that fit into the table
        self.due = 0  # commit() has work to do from this number of confirmed tokens on
        self._scale = scale  # hashes a block
        self._block_size = ledger.group.block_size
        self._window = ledger.group.window
        self._first = 0  # earlier entries are out of the window
        self._num_committed = 0  # blocks

    def attach(self, blocks: list[int]) -> None:
        """Start from these complete blocks. An entry is 0 where the window does not need the block."""
        self.table = blocks
        self.num_tokens = len(blocks) * self._block_size
        self._num_committed = len(blocks)
        if self._window is not None:
            self._first = blocks.count(0)
        self.ledger.share(blocks[self._first :])

    def held(self) -> Iterator[int]:
        yield from self.table[self._first :]

    def missing(self, num_tokens: int, kept_tokens: int) -> int:
        """Blocks to allocate until num_tokens tokens fit, or kept_tokens if that is more and there is no window."""
        if self._window is None and kept_tokens > num_tokens:
            num_tokens = kept_tokens
        return -(-num_tokens // self._block_size) - len(self.table)

    def room(self, leave: float) -> int:
        """Blocks that grow() may append if that part of the group stays free."""
        room = self.ledger.room()
        return room - math.ceil(leave * (self.ledger.group.num_blocks - 1)) if leave else room

    def reach(self, leave: float) -> int:
        """Tokens that fit when all of room() is used."""
        return (len(self.table) + max(0, self.room(leave))) * self._block_size

    def grow(self, count: int) -> list[int]:
        blocks = self.ledger.allocate(count)
        self.table.extend(blocks)
        self.num_tokens = len(self.table) * self._block_size
        return blocks

    def commit(self, chain: Chain, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the blocks that the confirmed tokens fill, and release blocks that have left the window."""
        size, last = self._block_size, num_confirmed // self._block_size
        if chain.enabled and last > self._num_committed:
            self._register(chain, tokens, last)
        self.due = (last + 1) * size
        if self._window is not None:
            first = max(num_confirmed - self._window, 0) // size
            if first > self._first:
                self.ledger.release(self.table[self._first : first], self._priority)
                self.table[self._first : first] = [0] * (first - self._first)
                self._first = first
            self.due = min(self.due, (first + 1) * size + self._window)

    def _register(self, chain: Chain, tokens: Sequence[int], last: int) -> None:
        size, scale, first = self._block_size, self._scale, self._num_committed
        chain.extend(tokens, last * scale)
        names = chain.names[(first + 1) * scale - 1 : last * scale : scale]
        parent = chain.names[first * scale - 1] if first else None
        own = tokens[first * size : last * size]
        self.ledger.register(self.table[first:last], names, parent, own, chain.salt)
        self._num_committed = last

    def release(self) -> None:
        self.ledger.release(reversed(self.table[self._first :]), self._priority)
        self.table.clear()
        self._first = 0


class Snapshots:
    """One live block, which is the whole table, and the snapshots that are taken and not committed."""

    def __init__(self, ledger: Ledger, scale: int, priority: int) -> None:
        self.ledger = ledger
        self._priority = priority
        self.table: list[int] = []
        self.num_tokens = 0  # tokens that fit: no limit, once there is a live block
        self.due = sys.maxsize  # commit() has work to do from this number of confirmed tokens on
        self.source = 0  # snapshot to copy into the live block
        self._unit = ledger.group.block_size // scale
        self._pending: dict[int, int] = {}  # tokens seen -> block

    def attach(self, num_tokens: int, source: int) -> None:
        """Start from this snapshot of the state after num_tokens tokens."""
        self.ledger.share([source])
        self.source = source
        self.num_tokens = num_tokens

    def held(self) -> Iterator[int]:
        yield from self.table
        yield from self._pending.values()
        if self.source:
            yield self.source

    def missing(self, num_tokens: int, kept_tokens: int) -> int:
        """The live block, once."""
        return 0 if self.table else 1

    def room(self, leave: float) -> int:
        """Blocks that grow() may allocate, the source among them. A sequence needs one, so `leave` is ignored."""
        return self.ledger.room(self.source)

    def reach(self, leave: float) -> int:
        """No limit, if there is a live block or room for it."""
        return sys.maxsize if self.table or self.room(leave) else 0

    def grow(self, count: int) -> list[int]:
        """Allocate the live block. Without room for a copy, the source itself becomes the live block."""
        self.table = self.ledger.allocate(count, self.source)
        if self.table[0] == self.source:
            self.source = 0
        self.num_tokens = sys.maxsize
        return list(self.table)

    def has_room(self, boundary: int) -> bool:
        """Whether snapshot(boundary) has a block."""
        return boundary in self._pending or self.ledger.num_free > 0

    def snapshot(self, boundary: int) -> int:
        """A block to copy the live one into when it has seen `boundary` tokens. Call has_room() first."""
        if boundary not in self._pending:
            (self._pending[boundary],) = self.ledger.allocate(1)
            self.due = min(self._pending)
        return self._pending[boundary]

    def commit(self, chain: Chain, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the snapshots of confirmed tokens and release them into the cache."""
        for end in sorted(end for end in self._pending if end <= num_confirmed):
            block = self._pending.pop(end)
            chain.extend(tokens, end // self._unit)
            self.ledger.register([block], [chain.names[end // self._unit - 1]], None, ())
            self.ledger.release([block], self._priority)
        self.due = min(self._pending, default=sys.maxsize)

    def drop_source(self) -> None:
        """The copy was carried out, or will not be."""
        if self.source:
            self.ledger.release([self.source], self._priority)
            self.source = 0

    def release(self) -> None:
        self.drop_source()
        self.ledger.release([*self._pending.values(), *self.table], self._priority)
        self._pending.clear()
        self.table.clear()
