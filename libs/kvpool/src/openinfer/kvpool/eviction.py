"""Eviction: the protocol of an eviction policy, and four policies.

A policy keeps the names of a group's cached blocks. All policies obey one rule: a name is never popped before its
children (the names added with it as parent), because a child cannot be found without its parent. Two facts make the
rule cheap. A lease that uses a block also uses the block's parents, and it releases children first. So names arrive
child before parent, and all children of a kept name are kept or evicted.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from .group import Group


class Eviction(Protocol):
    """The eviction order of one group's cached blocks. Every method is O(1) on average."""

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        """The last user released the block. parent: None for a first block, and in groups whose blocks do not depend on
        each other (windows, snapshots). priority: of the lease that released the block."""

    def use(self, name: bytes) -> None:
        """A kept name is in use again. The policy drops it until it is added again."""

    def pop(self) -> bytes:
        """Choose a kept name and drop it. Called only while the policy keeps a name."""

    def __len__(self) -> int:
        """Number of kept names."""

    def __iter__(self) -> Iterator[bytes]:
        """The kept names, in any order (for integrity checks)."""


class Lru:
    """Least recently used first. Blocks are evicted in the order of their release, so children go first."""

    def __init__(self, group: Group) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        self._order[name] = None

    def use(self, name: bytes) -> None:
        del self._order[name]

    def pop(self) -> bytes:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._order)


class _Leaves:
    """The kept names of a policy that evicts leaves: the names without a kept child. `queue` has those of a name."""

    def __init__(self, group: Group) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        self._num_children: dict[bytes, int] = {}

    def queue(self, name: bytes) -> OrderedDict[bytes, None]:
        """The queue of a leaf, the next victim first."""
        raise NotImplementedError

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        self._parents[name] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if name not in self._num_children:
            self.queue(name)[name] = None

    def use(self, name: bytes) -> None:
        self.queue(name).pop(name, None)
        self.remove(name)

    def remove(self, name: bytes) -> None:
        """Drop a name that no queue has. Its parent is queued if that is a leaf now."""
        parent = self._parents.pop(name)
        if parent is None:
            return
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._parents:
                self.queue(parent)[parent] = None

    def __len__(self) -> int:
        return len(self._parents)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parents)


class Lineage(_Leaves):
    """The oldest leaf first. A parent that becomes a leaf joins the end of the queue.

    So all long chains lose blocks in turn, and common prefixes stay.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._queue: OrderedDict[bytes, None] = OrderedDict()

    def queue(self, name: bytes) -> OrderedDict[bytes, None]:
        return self._queue

    def pop(self) -> bytes:
        name, _ = self._queue.popitem(last=False)
        self.remove(name)
        return name


class Priority:
    """The lowest priority first; the least recently used among equals.

    Until its eviction a block keeps the highest priority of the leases that released it. A parent has at least the
    priority of its descendants, so children go first.
    """

    def __init__(self, group: Group) -> None:
        self._queues: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._priority: dict[bytes, int] = {}  # also of names in use
        self._size = 0

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        priority = max(priority, self._priority.get(name, priority))
        self._priority[name] = priority
        if parent is not None:  # the parent is still in use, so no queue has it
            self._priority[parent] = max(priority, self._priority.get(parent, priority))
        self._queues[priority][name] = None
        self._size += 1

    def use(self, name: bytes) -> None:
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


class S3Fifo(_Leaves):
    """S3-FIFO: names that are used once leave by a small queue, and do not push out names that are used again.

    New names enter the probation queue. If probation holds more than a tenth of the names, pop() evicts its oldest
    leaf; a leaf that was used meanwhile moves to the main queue instead. Otherwise pop() evicts the oldest leaf of
    the main queue, where each use grants one more round. A name that returns soon after its eviction skips
    probation. A use counts when the block leaves the cache, not while a lease uses it.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}  # 0..3, also of names that are in use
        self._proven: set[bytes] = set()  # the names of _uses that have passed probation
        self._num_probation = 0  # cached names on probation, leaves or not
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._max_ghosts = group.num_blocks

    def add(self, name: bytes, parent: bytes | None, priority: int) -> None:
        if name not in self._uses:
            self._uses[name] = 0
            if name in self._ghosts:
                del self._ghosts[name]
                self._proven.add(name)
        self._num_probation += name not in self._proven
        super().add(name, parent, priority)

    def use(self, name: bytes) -> None:
        self._uses[name] = min(3, self._uses[name] + 1)
        super().use(name)

    def pop(self) -> bytes:
        """The oldest name without a recent use. Each extra round takes back a use, so O(1) on average."""
        while True:
            on_probation = self._num_probation * 10 > len(self) or not self._kept
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
        self.remove(name)
        del self._uses[name]
        self._proven.discard(name)
        return name

    def queue(self, name: bytes) -> OrderedDict[bytes, None]:
        """That of names on probation, or of those that have passed it."""
        return self._kept if name in self._proven else self._probation

    def remove(self, name: bytes) -> None:
        self._num_probation -= name not in self._proven
        super().remove(name)


Factory = Callable[[Group], Eviction]
"""Makes the policy of a group."""
POLICIES: dict[str, Factory] = {"lineage": Lineage, "lru": Lru, "priority": Priority, "s3fifo": S3Fifo}
"""The policies by the names that Pool(eviction=...) takes."""
