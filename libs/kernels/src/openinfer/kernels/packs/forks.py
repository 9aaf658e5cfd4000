"""Which calls of a step run side by side, from what each of them reads and writes."""

from collections.abc import Sequence
from typing import Any

from openinfer.kernels.op.op import Op, extent, tensors_in
from openinfer.tensor import Tensor

FORKED = 256
"""The most tokens of a step whose calls run side by side. The kernels of larger ones fill a GPU by themselves."""

Fork = tuple[slice, slice]
"""Two windows of a step's calls that run side by side, one right behind the other."""


def forks(calls: Sequence[tuple[Op[Any], Any]]) -> list[Fork]:
    """The forks in the calls of a step, from the first on.

    Two windows that are neighbours become a fork if no call of one writes what a call of the other uses, the first of
    each needs the call or fork ahead of both, and the call behind needs both. No call of a fork is a collective, which
    is ordered among ranks, or has more than FORKED tokens, and not all are of one op: such products wait alike.
    """
    uses = [_Use(op, args) for op, args in calls]
    found: list[Fork] = []
    opened = start = 0  # the next window begins at `start` or later, behind what begins at `opened`
    for middle, call in enumerate(uses):
        if call.alone:
            opened, start = middle, middle + 1
        first, end = middle, middle + 1
        while first > start and not call.needs(uses[first - 1]):
            first -= 1
        if first == middle:
            continue
        ahead, one = uses[opened if first == start else first - 1 : first], uses[first:middle]
        while end < len(uses) and not uses[end].alone and not uses[end].needs(*one):
            end += 1
        other = uses[middle:end]
        opens = one[0].needs(*ahead) and call.needs(*ahead) and len({use.name for use in one + other}) > 1
        if opens and any(use.needs(*one) and use.needs(*other) for use in uses[end : end + 1]):
            found.append((slice(first, middle), slice(middle, end)))
            opened, start = first, end
    return found


class _Use:
    """The memory that a call uses. `alone`: it is in no fork."""

    def __init__(self, op: Op[Any], args: Any) -> None:
        used = tensors_in(args)
        self.name, self._used, self._written = op.name, _spans(used), _spans(op.written(args))
        self.alone = op.collective or (bool(used) and used[0].shape[0] * op.dealt_to > FORKED)

    def needs(self, *calls: "_Use") -> bool:
        """Whether it and one of the calls cannot run side by side."""
        return any(self._may_write_for(call) or call._may_write_for(self) for call in calls)

    def _may_write_for(self, other: "_Use") -> bool:
        for start, end, written in self._written:
            for its_start, its_end, used in other._used:
                near = start < its_end and its_start < end
                if near and (start == its_start or may_share_memory(written, used)):
                    return True
        return False


def _spans(tensors: Sequence[Tensor]) -> list[tuple[int, int, Tensor]]:
    """Tensors with where they begin and end: most are told apart by that."""
    return [(one.ptr, one.ptr + extent(one), one) for one in tensors]


def may_share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory. Columns of one matrix, or layers of one cache, are known to be apart."""
    if min(a.numel, b.numel) == 0 or a.ptr + extent(a) <= b.ptr or b.ptr + extent(b) <= a.ptr:
        return False
    pitch, other = (t.strides[0] * t.dtype.itemsize if t.ndim > 1 else 0 for t in (a, b))
    if not pitch or pitch != other:
        return True
    between, own, its = (b.ptr - a.ptr) % pitch, *(extent(t, axis=1) for t in (a, b))
    return between < own or pitch - between < its
