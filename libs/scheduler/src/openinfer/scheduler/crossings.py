"""Crossings: a calendar of which decode rows need a block, by the step that needs it; and that they get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .pool import Lease
from .runner import BlockWrite
from .sequence import Seq

if TYPE_CHECKING:
    from .loop import StepLoop

LOOK_AHEAD = 48  # tokens of room beyond what a decode row needs: fewer requests to the pool,
ROOMY = 16  # as long as it has more than so many free blocks a row
COMMIT_EVERY = 256  # tokens of a decode row, in one go; the rest when it ends


class Crossings:
    """Decode rows advance by one token a step, so the step that outgrows a row's blocks is known when it gets
    them. Entries of rows that left, or fell behind, are recognized as stale when they are due."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[Seq[Any]]] = {}

    def schedule(self, seq: Seq[Any]) -> None:
        """Note the first step for which the row's blocks do not suffice, if it can live to see it."""
        room = seq.lease.num_tokens if seq.lease else 0
        seq._crossing = 0
        if room < seq.max_len - 1:
            seq._crossing = step = seq._entered + room - seq._base + 1
            if step in self.by_step:
                self.by_step[step].append(seq)
            else:
                self.by_step[step] = [seq]

    def due(self, step: int) -> tuple[Seq[Any], Lease] | None:
        """Somebody who needs a block for this step, until schedule() moves it on; None: nobody is left."""
        seqs = self.by_step.get(step)
        while seqs:
            seq = seqs[-1]
            if seq._crossing == step and seq.lease is not None:
                return seq, seq.lease
            seqs.pop()
        if seqs is not None:
            del self.by_step[step]
        return None


def grow(loop: StepLoop[Any, Any], index: int) -> bool:
    """Blocks for the decode rows that step `index` takes over a boundary. False: dry, drain first."""
    ahead = -1
    while (due := loop._crossings.due(index)) is not None:
        seq, lease = due
        if ahead < 0:
            ahead = LOOK_AHEAD if loop._pool.num_free > ROOMY * loop.max_rows else 0
        needed = seq._base + index - seq._entered
        if needed - seq._committed >= COMMIT_EVERY:
            loop._commit(seq)  # first: its window may give back what it then takes
        if (grown := lease.reserve(min(needed + ahead, seq.max_len - 1))) is not None:
            for group, first, blocks in grown:
                loop._blocks.append(BlockWrite(seq, group, first, blocks))
            loop._crossings.schedule(seq)
        elif ahead:
            ahead = 0  # many blocks are free, but not of every group
        elif loop._gives_back((seq,) if loop._in_flight else loop._running):
            pass
        elif loop._in_flight:
            return False
        else:
            loop._preempt(loop._policy.victim(loop._view(index)))
    return True
