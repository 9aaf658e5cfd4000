"""Queues of waiting sequences."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from ..sequence import Seq


class ArrivalQueue:
    """In order of arrival, preempted sequences at the head. O(1)."""

    def __init__(self) -> None:
        self._seqs: OrderedDict[Seq[Any], None] = OrderedDict()

    def push(self, seq: Seq[Any]) -> None:
        """Add one."""
        self._seqs[seq] = None
        if seq.num_preemptions:
            self._seqs.move_to_end(seq, last=False)

    def discard(self, seq: Seq[Any]) -> None:
        """Remove one, if it is here."""
        self._seqs.pop(seq, None)

    def __iter__(self) -> Iterator[Seq[Any]]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


class SortedQueue:
    """A queue by rank, the lowest first; equal ranks in the order of push(). push() reads the rank once. An operation
    takes O(log n) comparisons and a shift of a list."""

    def __init__(self, rank: Callable[[Seq[Any]], float]) -> None:
        self._rank = rank
        self._entries: list[tuple[float, int, Seq[Any]]] = []
        self._keys: dict[Seq[Any], tuple[float, int]] = {}
        self._pushed = 0

    def push(self, seq: Seq[Any]) -> None:
        """Add one."""
        self._pushed += 1
        key = self._keys[seq] = (self._rank(seq), self._pushed)
        insort(self._entries, (*key, seq))

    def discard(self, seq: Seq[Any]) -> None:
        """Remove one, if it is here."""
        key = self._keys.pop(seq, None)
        if key is not None:
            del self._entries[bisect_left(self._entries, key)]

    def before(self, rank: float) -> Iterator[Seq[Any]]:
        """Sequences of a lower rank, the lowest first."""
        return (self._entries[i][2] for i in range(bisect_left(self._entries, (rank,))))

    def since(self, rank: float) -> Iterator[Seq[Any]]:
        """The other sequences, the lowest rank first."""
        return (self._entries[i][2] for i in range(bisect_left(self._entries, (rank,)), len(self._entries)))

    def __iter__(self) -> Iterator[Seq[Any]]:
        return (seq for _, _, seq in self._entries)

    def __len__(self) -> int:
        return len(self._entries)
