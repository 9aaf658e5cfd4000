"""Crossings: a calendar of which decode rows need a block, by the step that needs it."""

from __future__ import annotations

from .protocols import Lease
from .sequence import Seq


class Crossings:
    """Decode rows advance by one token a step, so the step that outgrows a row's blocks is known when it gets
    them. Entries of rows that left, or fell behind, are recognized as stale when they are due."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[Seq]] = {}

    def schedule(self, seq: Seq) -> None:
        """Note the first step for which the row's blocks do not suffice, if it can live to see it."""
        room = seq.lease.num_tokens if seq.lease else 0
        seq._crossing = 0
        if room < seq.max_len - 1:
            seq._crossing = step = seq._entered + room - seq._base + 1
            if step in self.by_step:
                self.by_step[step].append(seq)
            else:
                self.by_step[step] = [seq]

    def due(self, step: int) -> tuple[Seq, Lease] | None:
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
