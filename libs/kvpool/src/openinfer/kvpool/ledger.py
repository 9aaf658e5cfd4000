"""One group's books: the state, the users and the name of every block. O(1) a block throughout."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .group import BlockState, Group

if TYPE_CHECKING:
    from .pool import PoolStats

# Members by name: looking one up in its class is what a block would cost most.
PADDING, FREE, PRIVATE, DUPLICATE, SHARED, CACHED = BlockState


class Ledger:
    """The books of one group.

    Two invariants make eviction exact without any tree. (1) A block in use has its parent's content in use
    too: of equal blocks, one that somebody holds carries the registration (see `register` and `release`). So
    every cached block can go. (2) A release queues a table's tail before its head, and whoever used a block
    used its parents, so in the queue of cached blocks a child always comes before its parent.
    """

    def __init__(self, group: Group, stats: PoolStats) -> None:
        self.block_size = group.block_size
        self._group = group
        self._stats = stats
        self._state = [FREE] * group.num_blocks
        self._state[0] = PADDING
        self._users = [0] * group.num_blocks
        self._name: list[bytes | None] = [None] * group.num_blocks
        self._parent: list[bytes | None] = [None] * group.num_blocks
        self._free = list(range(group.num_blocks - 1, 0, -1))  # a stack: the lowest id first
        self._cached: OrderedDict[int, None] = OrderedDict()  # evicted from the front
        self._index: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that a lease holds."""
        return self._group.num_blocks - 1 - self.num_free

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Registered blocks of the longest prefix of `names`."""
        blocks = []
        for name in names:
            block = self._index.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of these registered blocks."""
        for block in blocks:
            self._users[block] += 1
            if self._state[block] is CACHED:
                self._state[block] = SHARED
                del self._cached[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` private blocks, at most num_free: free ones first, then by eviction."""
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self._stats.evicted += 1
            self._state[block] = PRIVATE
            self._users[block] = 1
            blocks.append(block)
        self._stats.allocated += count
        return blocks

    def register(self, block: int, name: bytes, parent: bytes | None) -> None:
        """Give a private block its name. Held by a lease elsewhere already: ours waits as a duplicate."""
        self._name[block], self._parent[block] = name, parent
        other = self._index.get(name)
        if other is not None and self._users[other]:
            self._state[block] = DUPLICATE
            self._duplicates.setdefault(name, {})[block] = None
            return
        if other is not None:  # cached and unused: ours is as good, theirs is room
            del self._cached[other]
            self._forget(other)
            self._state[other] = FREE
            self._free.append(other)
        self._index[name] = block
        self._state[block] = SHARED
        self._stats.registered += 1

    def release(self, table: Sequence[int]) -> None:
        """Take one user from each block of a table, tail first."""
        for block in reversed(table):
            self._users[block] -= 1
            if self._users[block]:
                continue
            state, name = self._state[block], self._name[block]
            if state is SHARED and name is not None and name not in self._duplicates:
                self._state[block] = CACHED
                self._cached[block] = None
                continue
            if state is SHARED and name is not None:
                self._promote(name)
            elif state is DUPLICATE and name is not None:
                self._drop_duplicate(name, block)
            self._name[block] = self._parent[block] = None
            self._state[block] = FREE
            self._free.append(block)

    def drop_cached(self) -> None:
        """Free all cached blocks."""
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._state[block] = FREE
            self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._index[name]
        self._name[block] = self._parent[block] = None

    def _promote(self, name: bytes) -> None:
        """Let a duplicate that is in use carry the registration of `name`."""
        heir = next(iter(self._duplicates[name]))
        self._drop_duplicate(name, heir)
        self._index[name] = heir
        self._state[heir] = SHARED

    def _drop_duplicate(self, name: bytes, block: int) -> None:
        copies = self._duplicates[name]
        del copies[block]
        if not copies:
            del self._duplicates[name]

    def problems(self, tables: Sequence[Sequence[int]]) -> Iterator[str]:
        """Every contradiction in the books, in words. `tables`: the block tables of all live leases."""
        users = Counter(block for table in tables for block in table)
        for block, state in enumerate(self._state):
            for complaint in self._block_problems(block, state, users[block]):
                yield f"group {self._group.name!r}, block {block} ({state.name}): {complaint}"
        for state, listed in ((FREE, self._free), (CACHED, self._cached)):
            members = [block for block, of_block in enumerate(self._state) if of_block is state]
            if sorted(listed) != members:
                yield f"group {self._group.name!r}: listed as {state.name} {sorted(listed)}, by state {members}"
        yield from self._order_problems()

    def _block_problems(self, block: int, state: BlockState, users: int) -> Iterator[str]:
        name = self._name[block]
        if self._users[block] != users:
            yield f"counts {self._users[block]} users, {users} leases hold it"
        expected = {
            PRIVATE: users == 1,
            DUPLICATE: users == 1,
            SHARED: users > 0,
        }
        if not expected.get(state, users == 0):
            yield f"has {users} users"
        if (state is PADDING) != (block == 0):
            yield "only block 0 is padding"
        if (state >= DUPLICATE) != (name is not None):
            yield f"has the name {name!r}"
        if (state in (SHARED, CACHED)) != (name is not None and self._index.get(name) == block):
            yield "and the index disagree"
        if (state is DUPLICATE) != (name is not None and block in self._duplicates.get(name, ())):
            yield "and the list of duplicates disagree"
        if state is DUPLICATE and name is not None and not self._users[self._index.get(name, 0)]:
            yield "the block with the same content is not in use"

    def _order_problems(self) -> Iterator[str]:
        """A cached block's parent must outlive it."""
        rank = {block: position for position, block in enumerate(self._cached)}
        for block, position in rank.items():
            name = self._parent[block]
            parent = self._index.get(name, 0) if name is not None else None
            if parent is not None and not (self._users[parent] or rank.get(parent, -1) > position):
                yield f"group {self._group.name!r}: cached block {block} would outlive its parent (block {parent})"
