"""Where the recurrent states of rows are read and written, and where in a prompt snapshots of them are taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph import Rows
from openinfer.kvpool import Lease
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.scheduler import Seq, Step

STATES = 1
"""The pool's group of recurrent states; group 0 has the pages of full attention."""


@dataclass(slots=True)
class States:
    """graph.runner.States of Qwen3.5: a row reads the snapshot at the end of its cached prefix, then its own block.

    Snapshots of a prompt's state are taken at the multiples of `interval`, the end of the prompt's last whole chunk,
    and the powers of two from STATE_CHUNK up to `interval`. The powers of two let short shared prefixes be found too.
    """

    interval: int
    max_tokens: int
    lags: bool = True
    _joined: list[tuple[int, int]] = field(default_factory=list)

    @property
    def max_snapshots(self) -> int:
        """The most snapshots of a row in a step."""
        return self.max_tokens // self.interval + (self.interval // STATE_CHUNK).bit_length() + 1

    def join(self, rows: Rows, joined: Sequence[Seq[Any]]) -> None:
        """Write where a joining sequence reads its state, and where it keeps it."""
        for slot, live in self._joined:  # their first step has read what they started from
            rows.set("state_from", slot, live)
        self._joined = []
        for seq in joined:
            lease = _lease(seq)
            (live,) = lease.block_table(STATES)
            sources = [copy.source for copy in lease.copies if copy.group == STATES]
            rows.set("state_from", seq.slot, sources[0] if sources else live)
            rows.set("state_to", seq.slot, live)
            self._joined.append((seq.slot, live))

    def snapshots(self, start: int, end: int, prompt: int) -> list[int]:
        """Positions p where a chunk leaves snapshots: start < p <= end, and p < prompt, because a prefix hit must leave
        one token to compute. delta_step, which takes chunks of one token, writes none."""
        powers = (STATE_CHUNK << n for n in range((self.interval // STATE_CHUNK).bit_length()))
        last = (prompt - 1) // STATE_CHUNK * STATE_CHUNK
        regular = {*range(self.interval, end + 1, self.interval), last, *powers}
        return sorted(n for n in regular if start < n <= end and n < prompt) if end - start > 1 else []

    def chunks(self, rows: Rows, step: Step[Any], num_rows: int) -> None:
        """Write where the step's chunks leave snapshots, as far as the pool has room. The lease's commit makes these
        findable."""
        wanted = np.zeros((2, num_rows, self.max_snapshots), np.int32)
        for index, row in enumerate(step.rows[step.num_decode :], start=step.num_decode):
            if row.start is None:
                continue
            lease, count = _lease(row.seq), 0
            for end in self.snapshots(row.start, row.start + row.num_tokens, row.seq.target):
                for copy in lease.snapshot(end) or ():
                    wanted[:, index, count] = end, copy.target
                    count += 1
        rows.write("snapshot_ends", 0, wanted[0].reshape(-1))
        rows.write("snapshot_blocks", 0, wanted[1].reshape(-1))


def _lease(seq: Seq[Any]) -> Lease:
    if not isinstance(seq.lease, Lease):
        raise TypeError(f"sequence {seq.id} has no lease of the pool")
    return seq.lease
