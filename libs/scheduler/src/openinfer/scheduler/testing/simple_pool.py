"""SimplePool: the smallest pool with a prefix cache to test a StepLoop over. Slow, and obviously right."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class SimplePool:
    """Blocks of one or several groups. A prefix is looked up by the tokens themselves; nothing is hashed.

    groups: (block size in tokens, number of blocks) of each; block 0 is padding.
    """

    def __init__(self, groups: Sequence[tuple[int, int]], *, prefix_cache: bool = True) -> None:
        self.block_sizes = [size for size, _ in groups]
        self.prefix_cache = prefix_cache
        self.num_total = sum(count - 1 for _, count in groups)
        self.capacity_tokens = min(size * (count - 1) for size, count in groups)
        self.users: list[dict[int, int]] = [dict.fromkeys(range(1, count), 0) for _, count in groups]
        self.index: list[dict[Hashable, int]] = [{} for _ in groups]  # in order of use, the oldest first

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.users)

    @property
    def num_free(self) -> int:
        """Blocks without a user, cached ones included, over all groups."""
        return sum(not count for users in self.users for count in users.values())

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> SimpleLease:
        """A lease on the longest prefix cached in every group; `hashes` is not needed here."""
        lease = SimpleLease(self, salt)
        for end in range(len(tokens) - 1, 0, -1):
            if any(end % size for size in self.block_sizes):
                continue
            tables = [
                [index.get(lease.name(tokens, stop)) for stop in range(size, end + 1, size)]
                for size, index in zip(self.block_sizes, self.index, strict=True)
            ]
            if all(block is not None for table in tables for block in table):
                lease.share(tokens, end)
                break
        return lease

    def take(self, group: int, count: int) -> list[int]:
        """`count` blocks without a user, unnamed ones first, then the longest unused."""
        named = {block: name for name, block in self.index[group].items()}
        unused = [block for block, count in self.users[group].items() if not count]
        age = {block: age for age, block in enumerate(named)}
        blocks = sorted(unused, key=lambda block: age.get(block, -1))[:count]
        for block in blocks:
            self.index[group].pop(named.get(block), None)
            self.users[group][block] = 1
        return blocks


class SimpleLease:
    """One sequence's blocks in a SimplePool."""

    def __init__(self, pool: SimplePool, salt: bytes) -> None:
        self.num_cached = 0
        self._pool, self._salt = pool, salt
        self._tables: list[list[int]] = [[] for _ in pool.users]

    def name(self, tokens: Sequence[int], end: int) -> Hashable:
        """The identity of the block that ends at `end`."""
        return self._salt, tuple(tokens[:end])

    def share(self, tokens: Sequence[int], end: int) -> None:
        """Start from the cached blocks of tokens[:end]."""
        self.num_cached = end
        for group, size in enumerate(self._pool.block_sizes):
            for stop in range(size, end + 1, size):
                name = self.name(tokens, stop)
                block = self._pool.index[group].pop(name)
                self._pool.index[group][name] = block
                self._pool.users[group][block] += 1
                self._tables[group].append(block)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the blocks held."""
        return min(
            len(table) * size for table, size in zip(self._tables, self._pool.block_sizes, strict=True)
        )

    def block_table(self, group: int = 0) -> Sequence[int]:
        """Block ids of a group."""
        return self._tables[group]

    def reserve(self, num_tokens: int) -> list[tuple[int, int, list[int]]] | None:
        """Grow to num_tokens in all; None, and nothing changed, if there are not blocks enough."""
        pool = self._pool
        wanted = [
            max(0, -(-num_tokens // size) - len(table))
            for size, table in zip(pool.block_sizes, self._tables, strict=True)
        ]
        if any(
            list(users.values()).count(0) < count for users, count in zip(pool.users, wanted, strict=True)
        ):
            return None
        grown = []
        for group, count in enumerate(wanted):
            if count:
                grown.append((group, len(self._tables[group]), pool.take(group, count)))
                self._tables[group] += grown[-1][2]
        return grown

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """Name the blocks that the first num_confirmed tokens fill; what has a name already keeps it."""
        if not self._pool.prefix_cache:
            return
        for group, size in enumerate(self._pool.block_sizes):
            for end in range(size, num_confirmed + 1, size):
                self._pool.index[group].setdefault(
                    self.name(tokens, end), self._tables[group][end // size - 1]
                )

    def release(self) -> None:
        """Give everything back."""
        for users, table in zip(self._pool.users, self._tables, strict=True):
            for block in table:
                users[block] -= 1
            table.clear()
