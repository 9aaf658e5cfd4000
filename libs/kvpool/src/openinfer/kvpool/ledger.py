"""Ledger: the books of one group, the users and the name of every block. Each operation is O(1) a block."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from .errors import EvictionError
from .events import BlockRemoved, BlockStored, EventLog, PoolStats
from .eviction import Eviction
from .group import BlockState, Group


class Ledger:
    """The books of one group.

    A block's state follows from three facts: the number of its users, its name, and whether the index has it by that
    name. Two invariants make eviction exact without a tree. (1) The content of a used page's parent is in use too. Of
    equal blocks, a used one carries the registration (see `register` and `release`). So every cached block can be
    evicted. (2) Pages are released children first, so the policy gets a child before its parent.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        policy: Eviction,
        stats: PoolStats,
        events: EventLog | None,
        saver: "Saver | None" = None,
    ) -> None:
        self.group = group
        self.index = index
        # Window pages and snapshots are useful without the blocks before them.
        self.lineage = group.window is None and not group.snapshots
        self._policy = policy
        self._stats = stats
        self._events = events
        self._saver = saver
        self._users = [0] * group.num_blocks
        self._name: list[bytes | None] = [None] * group.num_blocks
        self._parent: list[bytes | None] = [None] * group.num_blocks  # valid while the block has a name
        self._free = list(range(group.num_blocks - 1, 0, -1))  # a stack: the lowest id first
        self._index: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}  # used blocks that equal a registered, used block

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could hand out."""
        return len(self._free) + len(self._policy)

    @property
    def num_in_use(self) -> int:
        return self.group.num_blocks - 1 - self.num_free

    def state(self, block: int) -> BlockState:
        name, used = self._name[block], self._users[block] > 0
        if block == 0:
            return BlockState.PADDING
        if name is None:
            return BlockState.PRIVATE if used else BlockState.FREE
        if self._index.get(name) != block:
            return BlockState.DUPLICATE
        return BlockState.SHARED if used else BlockState.CACHED

    # -- looking up --

    def find(self, name: bytes) -> int | None:
        return self._index.get(name)

    def name(self, block: int) -> bytes | None:
        """The name of a complete block; None of any other."""
        return self._name[block]

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Registered blocks of the longest prefix of `names`."""
        blocks = []
        get = self._index.get
        for name in names:
            block = get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which of `names` are registered."""
        return [name in self._index for name in names]

    # -- the life of a block --

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these complete blocks, parents first."""
        users, names, use = self._users, self._name, self._policy.use
        for block in blocks:
            name = names[block]
            if not users[block] and name is not None:
                use(name)
            users[block] += 1

    def room(self, spare: int = 0) -> int:
        """Number of blocks that allocate(..., spare) could hand out."""
        room = len(self._free) + len(self._policy)
        return room + 1 if spare and self._users[spare] == 1 else room

    def allocate(self, count: int, spare: int = 0) -> list[int]:
        """Hand out `count` private blocks, at most room(spare): free blocks first, then evicted blocks.

        If one block is missing, the first is `spare`, a registered block that only the caller uses.
        """
        needs_spare = spare and count > self.num_free
        if needs_spare:
            self.release([spare], 0)  # all free blocks are handed out, so it comes back below
        free, users = self._free, self._users
        fresh = count if count <= len(free) else len(free)
        blocks = free[: -fresh - 1 : -1]
        del free[len(free) - fresh :]
        for block in blocks:
            users[block] = 1
        if count > fresh:
            blocks += self._evict(count - fresh)
        if needs_spare:
            blocks.remove(spare)
            blocks.insert(0, spare)
        self._stats.allocated += count
        return blocks

    def _evict(self, count: int) -> list[int]:
        pop, index, users = self._policy.pop, self._index, self._users
        names = [pop() for _ in range(count)]
        blocks = []
        for name in names:
            block = index.get(name, 0)
            if not block or users[block]:
                raise EvictionError(
                    f"{type(self._policy).__name__}.pop() returned {name.hex()[:16]}, which is "
                    f"{'in use' if block else 'not registered'}; it may return what was added and not used since"
                )
            users[block] = 1
            blocks.append(block)
        for name in names:
            self._name[index.pop(name)] = None
        if self._events is not None and names:
            self._events.removed(self.index, names)
        if self._saver is not None and names:
            self._saver.save(self.index, names, blocks)
        self._stats.evicted += count
        return blocks

    def register(
        self,
        blocks: Sequence[int],
        names: Sequence[bytes],
        parent: bytes | None,
        tokens: Sequence[int],
        salt: bytes = b"",
    ) -> None:
        """Name private blocks, each the child of the one before it, the first of `parent`.

        If another used block has the name, the new block becomes its duplicate. tokens, salt: for events.
        """
        index, fresh, before = self._index, [], parent
        for position, name in enumerate(names):
            block = blocks[position]
            self._name[block] = name
            if self.lineage:
                self._parent[block], before = before, name
            other = index.get(name)
            if other is None:
                index[name] = block
                fresh.append(position)
            elif self._users[other]:
                self._duplicates.setdefault(name, {})[block] = None
            else:  # the other is cached and unused: the new block replaces it, and the other is free
                index[name] = block
                self._policy.use(name)
                self._name[other] = None
                self._free.append(other)
        self._stats.registered += len(fresh)
        if self._events is not None:
            size, parents = self.group.block_size, [parent, *names]
            for first, last in _runs(fresh):
                run = tokens[first * size : last * size]
                self._events.stored(self.index, parents[first], list(names[first:last]), run, size, salt)

    def release(self, blocks: Iterable[int], priority: int) -> None:
        """Take one user from each of these blocks, children first."""
        users, names, parents, add = self._users, self._name, self._parent, self._policy.add
        for block in blocks:
            users[block] -= 1
            if users[block]:
                continue
            name = names[block]
            if name is not None:
                if not self._duplicates or self._is_last(name, block):
                    add(name, parents[block], priority)
                    continue
                names[block] = None
            self._free.append(block)

    def _is_last(self, name: bytes, block: int) -> bool:
        """Whether no other used block has this content. If one has, it carries the registration from now on."""
        copies = self._duplicates.get(name)
        if copies is None:
            return True
        heir = block
        if self._index[name] == block:
            heir = self._index[name] = next(iter(copies))
        del copies[heir]
        if not copies:
            del self._duplicates[name]
        return False

    def cached(self) -> list[tuple[bytes, int]]:
        """Name and block of all cached blocks, a parent before its children."""
        return [(name, block) for name, block in self._index.items() if not self._users[block]]

    def evict(self, count: int) -> int:
        """Evict up to `count` cached blocks. Returns how many."""
        blocks = self._evict(min(count, len(self._policy)))
        for block in blocks:
            self._users[block] = 0
        self._free += blocks
        return len(blocks)

    def drop_cached(self) -> None:
        while len(self._policy):
            name = self._policy.pop()
            block = self._index.pop(name)
            self._name[block] = None
            self._free.append(block)

    # -- auditing --

    def complete(self, block: int) -> bool:
        """Whether this is a block with a name."""
        return 0 < block < self.group.num_blocks and self._name[block] is not None

    def ancestry(self, block: int) -> Iterator[int]:
        """A complete block, then the registered blocks that it descends from, nearest first."""
        yield block
        parent = self._parent[block]
        while parent is not None:
            block = self._index[parent]
            yield block
            parent = self._parent[block]

    def problems(self, uses: Iterable[int]) -> Iterator[str]:
        """Every contradiction in the books, in words. `uses`: each block, once for each user."""
        users, states = Counter(uses), [self.state(block) for block in range(self.group.num_blocks)]
        for block, name in enumerate(self._name):
            for complaint in self._block_problems(block, name, users[block]):
                yield f"group {self.group.name!r}, block {block} ({states[block].name}): {complaint}"
        cached = [n for n, state in zip(self._name, states, strict=True) if n and state is BlockState.CACHED]
        free = [block for block, state in enumerate(states) if state is BlockState.FREE]
        if sorted(self._free) != free:
            yield f"group {self.group.name!r}: listed as FREE {sorted(self._free)}, by state {free}"
        if sorted(self._policy) != sorted(cached) or len(self._policy) != len(cached):
            told = f"{len(self._policy)} names, not the {len(cached)} that are CACHED"
            yield f"group {self.group.name!r}: the eviction policy keeps {told}"
        if len(self._index) != states.count(BlockState.SHARED) + states.count(BlockState.CACHED):
            yield f"group {self.group.name!r}: the index has names that no block has"

    def _block_problems(self, block: int, name: bytes | None, users: int) -> Iterator[str]:
        if self._users[block] != users:
            yield f"counts {self._users[block]} users, {users} are known"
        if block == 0 and (users or name is not None or self._users[0]):
            yield "padding is in use"
        if name is None:
            return
        registered = self._index.get(name)
        if registered is None:
            yield "is named, but not in the index"
        elif registered != block and block not in self._duplicates.get(name, ()):
            yield f"equals block {registered}, but is not listed as its duplicate"
        elif registered != block and not (self._users[registered] and self._users[block]):
            yield f"it or block {registered}, which it equals, is not in use"
        elif registered == block and block in self._duplicates.get(name, ()):
            yield "is listed as a duplicate of itself"
        parent = self._parent[block]
        if parent is None:
            return
        elder = self._index.get(parent)
        if elder is None:
            yield "outlived its parent"
        elif self._users[block] and not self._users[elder]:
            yield f"is in use, its parent (block {elder}) is not"


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs, first and one past the last."""
    first = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or positions[index] != positions[index - 1] + 1:
            yield positions[first], positions[index - 1] + 1
            first = index


class Saver(Protocol):
    """Takes blocks that leave the pool. One thread, that of the pool's owner, calls it."""

    def save(self, group: int, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Cached blocks were evicted; they are about to be written. The saver must read them first: it copies them
        before it returns, or orders its copies before later work of the device."""

    def clear(self) -> None:
        """Forget every block: the pool drops its cache, as after a change of weights."""

    def take_events(self) -> Sequence[BlockStored | BlockRemoved]:
        """Blocks that became findable in the saver, or are no longer, since the last call."""
