"""SimPool: a pool for simulations. It counts blocks and knows cached prefixes, but has no block ids."""

import math
from collections import OrderedDict
from collections.abc import Sequence


class SimPool:
    """A Pool of `num_blocks` blocks of `block_size` tokens. Sequences share whole blocks by prefix. Unused blocks stay
    cached; the least recently used is evicted first. Names are Python's hashes."""

    num_groups = 1

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.capacity_tokens = num_blocks * block_size
        self.num_free = num_blocks  # unused ones, cached ones included
        self.users: dict[int, int] = {}  # by name, of blocks in use
        self.cached: OrderedDict[int, None] = OrderedDict()

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> "SimLease":
        lease, names = SimLease(self, hash(salt)), list[int]()
        name = lease.root
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            name = hash((name, *tokens[start : start + self.block_size]))
            if name in self.users:
                self.users[name] += 1
            elif name in self.cached:
                del self.cached[name]
                self.users[name] = 1
                self.num_free -= 1
            else:
                break
            names.append(name)
        lease.names, lease.num_blocks = names, len(names)
        lease.num_cached = lease.num_tokens = len(names) * self.block_size
        return lease

    def poll(self, wait_s: float | None = 0.0) -> "Sequence[SimLease]":
        """This pool loads nothing."""
        return ()

    def take(self, count: int) -> None:
        """Allocate `count` blocks. The caller has checked that they are free."""
        self.num_free -= count
        while len(self.cached) > self.num_free:
            self.cached.popitem(last=False)


class SimLease:
    """A Lease of a SimPool."""

    num_cached = num_tokens = num_blocks = num_loadable = 0

    def __init__(self, pool: SimPool, root: int) -> None:
        self.root = root
        self.names: Sequence[int] = ()  # of the first blocks: known, and shared
        self._pool = pool

    def load(self, leave: float = 0.0) -> bool:
        """This pool loads nothing."""
        return False

    def block_table(self, group: int = 0) -> Sequence[int]:
        """One entry for each block. The entries have no meaning."""
        return range(self.num_blocks)

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]] | None:
        first = self.num_blocks
        count = -(-max(num_tokens, kept_tokens) // self._pool.block_size) - first
        if count <= 0:
            return []
        if count > self._room(leave):
            return None
        self._pool.take(count)
        self.num_blocks += count
        self.num_tokens = self.num_blocks * self._pool.block_size
        return [(0, first, [0] * count)]

    def reach(self, leave: float = 0.0) -> int:
        return (self.num_blocks + max(0, self._room(leave))) * self._pool.block_size

    def _room(self, leave: float) -> int:
        return self._pool.num_free - math.ceil(leave * self._pool.num_blocks)

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        pool, size, names = self._pool, self._pool.block_size, list(self.names)
        name = names[-1] if names else self.root
        for start in range(len(names) * size, num_confirmed // size * size, size):
            name = hash((name, *tokens[start : start + size]))
            names.append(name)
            if name in pool.users:
                pool.num_free += 1  # two have it: one block is enough
                pool.users[name] += 1
            else:
                pool.users[name] = 1
                pool.cached.pop(name, None)  # ours is as good; that one is free without a name
        self.names = names

    def release(self) -> None:
        """Give all blocks back. Named blocks stay cached; the end of a sequence is evicted before its beginning."""
        pool = self._pool
        pool.num_free += self.num_blocks - len(self.names)
        for name in reversed(self.names):
            pool.users[name] -= 1
            if not pool.users[name]:
                del pool.users[name]
                pool.cached[name] = None
                pool.num_free += 1
        self.names, self.num_blocks, self.num_tokens = (), 0, 0
