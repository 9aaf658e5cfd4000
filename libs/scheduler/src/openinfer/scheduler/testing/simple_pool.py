"""SimplePool: a small pool with a prefix cache, for tests of a StepLoop. It is slow and obviously right."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from .tier import FakeTier, TierLoad, TierPiece

Name: TypeAlias = tuple[bytes, tuple[int, ...]]
"""A block: the salt, and all tokens up to its end."""


class PoolShape(NamedTuple):
    """A group of blocks. Block 0 is padding. A token needs the `window` tokens before it; None: all."""

    block_size: int
    num_blocks: int
    window: int | None = None

    @property
    def capacity_tokens(self) -> int:
        """Capacity of one sequence: no limit, if the window and the block being written fit."""
        num_blocks = self.num_blocks - 1
        if self.window is not None and num_blocks > math.ceil(self.window / self.block_size):
            return sys.maxsize
        return num_blocks * self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """The first block that is needed after num_tokens tokens."""
        return 0 if self.window is None else max(0, num_tokens - self.window) // self.block_size


class SimplePool:
    """A Pool of one or several groups. A block's name is its prefix of tokens, not a hash. tier: loads other blocks."""

    def __init__(
        self,
        groups: Sequence[tuple[int, int] | PoolShape],
        tier: FakeTier | None = None,
        *,
        prefix_cache: bool = True,
    ) -> None:
        self.shapes = [PoolShape(*group) for group in groups]
        self.prefix_cache = prefix_cache
        self.num_total = sum(shape.num_blocks - 1 for shape in self.shapes)
        self.capacity_tokens = min(shape.capacity_tokens for shape in self.shapes)
        self.users = [dict.fromkeys(range(1, shape.num_blocks), 0) for shape in self.shapes]
        self.tier = tier
        self.loads: dict[TierLoad, SimpleLoad] = {}
        self.index: list[dict[Name, int]] = [{} for _ in groups]  # in order of use, the oldest first

    @property
    def num_groups(self) -> int:
        return len(self.users)

    @property
    def num_free(self) -> int:
        return sum(map(self.num_unused, range(self.num_groups)))

    def num_unused(self, group: int) -> int:
        """Blocks of one group without a user."""
        return list(self.users[group].values()).count(0)

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> "SimpleLease":
        """A lease on the longest prefix that every group has cached. `hashes` is ignored."""
        lease = SimpleLease(self, salt, tokens)
        lease.share(self.longest(lease, lambda group, name: name in self.index[group]))
        return lease

    def longest(self, lease: "SimpleLease", found: Callable[[int, Name], bool]) -> int:
        """Length of the longest prefix whose needed blocks are found in every group."""
        for end in range(len(lease.tokens) - 1, 0, -1):
            if any(end % shape.block_size for shape in self.shapes):
                continue
            needed = lease.needed(lease.tokens, end)
            if all(found(group, name) for group, names in enumerate(needed) for name in names):
                return end
        return 0

    def poll(self, wait_s: float | None = 0.0) -> "list[SimpleLease]":
        """Leases whose load has ended, released or not."""
        ended = []
        for load in self.tier.poll(wait_s) if self.tier else ():
            record = self.loads.pop(load)
            for piece, name in zip(load.pieces, record.names, strict=True):
                if piece not in load.failed and self.prefix_cache:
                    self.index[piece.group].setdefault(name, piece.block)
            lease = record.lease
            if not lease.released:
                lease.clear()
                lease.share(self.longest(lease, lambda group, name: name in self.index[group]))
            ended.append(lease)
            self.use(record.users, -1)
        return ended

    def use(self, blocks: Iterable[tuple[int, int]], users: int) -> None:
        """Count more users, or fewer, of these (group, block)."""
        for group, block in blocks:
            self.users[group][block] += users

    def take(self, group: int, count: int) -> list[int]:
        """Allocate `count` blocks without a user: unnamed blocks first, then the least recently used."""
        named: dict[int, Name] = {block: name for name, block in self.index[group].items()}
        unused = [block for block, count in self.users[group].items() if not count]
        age = {block: age for age, block in enumerate(named)}
        blocks = sorted(unused, key=lambda block: age.get(block, -1))[:count]
        for block in blocks:
            if block in named:
                del self.index[group][named[block]]
            self.users[group][block] = 1
        return blocks


class SimpleLoad(NamedTuple):
    """A load in flight: its lease, the names of its pieces, and (group, block) of the blocks that it uses."""

    lease: "SimpleLease"
    names: list[Name]
    users: list[tuple[int, int]]


class SimpleLease:
    """A Lease of a SimplePool."""

    def __init__(self, pool: SimplePool, salt: bytes, tokens: Sequence[int]) -> None:
        self.num_cached = 0
        self.tokens = list(tokens)
        self.released = False
        self._pool, self._salt = pool, salt
        self._tables: list[list[int]] = [[] for _ in pool.users]

    def name(self, tokens: Sequence[int], end: int) -> Name:
        """The identity of the block that ends at `end`."""
        return self._salt, tuple(tokens[:end])

    def needed(self, tokens: Sequence[int], end: int) -> Iterator[list[Name]]:
        """The names of the blocks that a sequence reads to continue after tokens[:end], a list for each group."""
        for shape in self._pool.shapes:
            size = shape.block_size
            first = size * (1 + shape.first_needed(end))
            yield [self.name(tokens, stop) for stop in range(first, end + 1, size)]

    @property
    def num_loadable(self) -> int:
        tier, pool = self._pool.tier, self._pool
        if tier is None or self._salt or not pool.prefix_cache:
            return 0
        end = pool.longest(self, lambda group, name: name in pool.index[group] or tier.holds(name[1]))
        return end - self.num_cached

    def load(self, leave: float = 0.0) -> bool:
        """Start to load them. Their cached blocks are used until the load has ended."""
        pool, tier = self._pool, self._pool.tier
        count = self.num_loadable
        if tier is None or not count:
            return False
        needed = enumerate(self.needed(self.tokens, self.num_cached + count))
        wanted = [(group, name, pool.index[group].get(name)) for group, names in needed for name in names]
        missing = [(group, name) for group, name, block in wanted if block is None]
        kept = [(group, block) for group, _, block in wanted if block is not None]
        pool.use(kept, 1)
        if any(n > self._room(group, leave) for group, n in Counter(group for group, _ in missing).items()):
            pool.use(kept, -1)
            return False
        pieces = [TierPiece(group, pool.take(group, 1)[0], name[1]) for group, name in missing]
        users = [*kept, *((piece.group, piece.block) for piece in pieces)]
        pool.loads[tier.begin(pieces)] = SimpleLoad(self, [name for _, name in missing], users)
        return True

    def share(self, end: int) -> None:
        """Start from the cached blocks of the first `end` tokens."""
        self.num_cached = end
        for group, names in enumerate(self.needed(self.tokens, end)):
            shape, index = self._pool.shapes[group], self._pool.index[group]
            self._tables[group] = [0] * shape.first_needed(end)
            for name in names:
                index[name] = block = index.pop(name)
                self._pool.users[group][block] += 1
                self._tables[group].append(block)

    @property
    def num_tokens(self) -> int:
        pairs = zip(self._tables, self._pool.shapes, strict=True)
        return min(len(table) * shape.block_size for table, shape in pairs)

    def block_table(self, group: int = 0) -> Sequence[int]:
        return self._tables[group]

    def _room(self, group: int, leave: float) -> int:
        pool = self._pool
        return pool.num_unused(group) - math.ceil(leave * (pool.shapes[group].num_blocks - 1))

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]] | None:
        pool = self._pool
        wanted = []
        for shape, table in zip(pool.shapes, self._tables, strict=True):
            end = num_tokens if shape.window is not None else max(num_tokens, kept_tokens)
            wanted.append(max(0, -(-end // shape.block_size) - len(table)))
        if any(count > self._room(group, leave) for group, count in enumerate(wanted) if count):
            return None
        grown = []
        for group, count in enumerate(wanted):
            if count:
                grown.append((group, len(self._tables[group]), pool.take(group, count)))
                self._tables[group] += grown[-1][2]
        return grown

    def reach(self, leave: float = 0.0) -> int:
        return min(
            (len(table) + max(0, self._room(group, leave))) * self._pool.shapes[group].block_size
            for group, table in enumerate(self._tables)
        )

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the blocks that the first num_confirmed tokens fill. Give back blocks that have left a window."""
        for group, (shape, table) in enumerate(zip(self._pool.shapes, self._tables, strict=True)):
            for position in range(num_confirmed // shape.block_size):
                if table[position] and self._pool.prefix_cache:
                    name = self.name(tokens, (position + 1) * shape.block_size)
                    self._pool.index[group].setdefault(name, table[position])
            for position in range(shape.first_needed(num_confirmed)):
                if table[position]:
                    self._pool.users[group][table[position]] -= 1
                    table[position] = 0

    def release(self) -> None:
        self.released = True
        self.clear()

    def clear(self) -> None:
        """Hold no blocks."""
        for group, table in enumerate(self._tables):
            self._pool.use(((group, block) for block in table if block), -1)
            table.clear()
