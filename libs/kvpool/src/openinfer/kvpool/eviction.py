"""Which cached block goes next: the protocol, and four policies.

A policy keeps the names of a group's cached blocks and knows nothing else of them. One rule binds all: a name is
never popped before its children (the names added with it as parent), as nobody could find those without it. Two
facts make that cheap. Whoever used a block used its parents, and whoever lets go of blocks lets go of the last
one first: so names arrive child before parent, and a kept name's children are all kept too, or gone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from .group import Group


class Eviction(Protocol):
    """The order in which one group's cached blocks are evicted. Every method is O(1) on average."""

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """Nobody uses the block any more. parent: None for a first block, and in groups where blocks do not
        depend on each other (windows, snapshots). priority: of the lease that let it go."""

    def use(self, name: bytes) -> None:
        """A kept name is in use again, and no longer kept here until it is added again."""

    def pop(self) -> bytes:
        """Choose a kept name, and forget it. Called only while there is one."""

    def __len__(self) -> int:
        """How many names are kept."""

    def __iter__(self) -> Iterator[bytes]:
        """The kept names, in any order (for integrity checks)."""


class Lru:
    """Least recently used first. The order of release is the order of eviction, so children go first."""

    def __init__(self, group: Group) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """The most recent one now."""
        self._order[name] = None

    def use(self, name: bytes) -> None:
        """Take it out of the order."""
        del self._order[name]

    def pop(self) -> bytes:
        """The one used longest ago."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._order)


class Leaves:
    """Of a set of names, which have no child in the set. For policies that choose among leaves only."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        self._num_children: dict[bytes, int] = {}

    def add(self, name: bytes, parent: bytes | None) -> bool:
        """Whether `name`, new in the set, is a leaf."""
        self._parents[name] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        return name not in self._num_children

    def remove(self, name: bytes) -> bytes | None:
        """The parent of `name`, if that is a leaf now."""
        parent = self._parents.pop(name)
        if parent is None:
            return None
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return None
        del self._num_children[parent]
        return parent if parent in self._parents else None

    def __len__(self) -> int:
        return len(self._parents)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parents)


class Lineage:
    """The oldest leaf first; a parent that becomes a leaf queues anew.

    Long tails are shortened in turn, and what many sequences begin with stays.
    """

    def __init__(self, group: Group) -> None:
        self._leaves = Leaves()
        self._queue: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """Queue it if it is a leaf."""
        if self._leaves.add(name, parent):
            self._queue[name] = None

    def use(self, name: bytes) -> None:
        """Take it out of the queue."""
        self._queue.pop(name, None)
        self._remove(name)

    def pop(self) -> bytes:
        """The leaf that has been one for longest."""
        name, _ = self._queue.popitem(last=False)
        self._remove(name)
        return name

    def _remove(self, name: bytes) -> None:
        parent = self._leaves.remove(name)
        if parent is not None:
            self._queue[parent] = None

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._leaves)


class Priority:
    """The lowest priority first, in it the least recently used.

    A block keeps the highest priority that any lease let it go with, until it is evicted, and has at least that
    of what descends from it. So children go first here too.
    """

    def __init__(self, group: Group) -> None:
        self._queues: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._priority: dict[bytes, int] = {}  # also of names in use
        self._size = 0

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """The most recent of its priority."""
        priority = max(priority, self._priority.get(name, priority))
        self._priority[name] = priority
        if parent is not None:  # still in use, so that no queue has it
            self._priority[parent] = max(priority, self._priority.get(parent, priority))
        self._queues[priority][name] = None
        self._size += 1

    def use(self, name: bytes) -> None:
        """Take it out of its queue."""
        del self._queues[self._priority[name]][name]
        self._size -= 1

    def pop(self) -> bytes:
        """The oldest of the lowest priority. O(distinct priorities)."""
        lowest = min(priority for priority, queue in self._queues.items() if queue)
        name, _ = self._queues[lowest].popitem(last=False)
        del self._priority[name]
        self._size -= 1
        return name

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return (name for queue in self._queues.values() for name in queue)


class S3Fifo:
    """S3-FIFO: what is used once leaves by a small queue, without pushing out what is used again.

    New names are on probation. The oldest leaf there is evicted, or kept for good if it was used meanwhile, as long
    as probation takes more than a tenth; else the oldest kept one goes, each use since having bought it a round.
    A name that comes back soon after its eviction skips probation. A use is counted when the block leaves the
    cache, not while somebody has it anyway.
    """

    def __init__(self, group: Group) -> None:
        self._leaves = Leaves()
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}  # 0..3, also of names in use again
        self._proven: set[bytes] = set()  # of these, the ones past probation
        self._num_probation = 0  # in the cache, leaves or not
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._max_ghosts = group.num_blocks

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """Queue it if it is a leaf; new ones on probation."""
        if name not in self._uses:
            self._uses[name] = 0
            if name in self._ghosts:
                del self._ghosts[name]
                self._proven.add(name)
        self._num_probation += name not in self._proven
        if self._leaves.add(name, parent):
            self._queue(name)[name] = None

    def use(self, name: bytes) -> None:
        """Count it."""
        self._uses[name] = min(3, self._uses[name] + 1)
        self._probation.pop(name, None)
        self._kept.pop(name, None)
        self._remove(name)

    def pop(self) -> bytes:
        """The oldest that nobody used lately. Rounds are paid for by uses, so O(1) on average."""
        while True:
            on_probation = self._num_probation * 10 > len(self._leaves) or not self._kept
            if on_probation and self._probation:
                name, _ = self._probation.popitem(last=False)
                if not self._uses[name]:
                    self._ghosts[name] = None
                    if len(self._ghosts) > self._max_ghosts:
                        self._ghosts.popitem(last=False)
                    break
                self._proven.add(name)
                self._num_probation -= 1
            else:
                name, _ = self._kept.popitem(last=False)
                if not self._uses[name]:
                    break
                self._uses[name] -= 1
            self._kept[name] = None
        self._remove(name)
        del self._uses[name]
        self._proven.discard(name)
        return name

    def _queue(self, name: bytes) -> OrderedDict[bytes, None]:
        return self._kept if name in self._proven else self._probation

    def _remove(self, name: bytes) -> None:
        self._num_probation -= name not in self._proven
        parent = self._leaves.remove(name)
        if parent is not None:
            self._queue(parent)[parent] = None

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._leaves)


POLICIES: dict[str, Callable[[Group], Eviction]] = {
    "lineage": Lineage,
    "lru": Lru,
    "priority": Priority,
    "s3fifo": S3Fifo,
}
"""By the names that Pool(eviction=...) takes."""
