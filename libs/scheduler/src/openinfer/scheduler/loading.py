"""Loads: waiting sequences whose prefix the pool loads, and waiting sequences whose load has ended."""

from __future__ import annotations

from typing import Generic

from .errors import ContractError
from .pool import Lease, Pool
from .sequence import Owner, Seq, SeqState
from .stats import Stats


class Loads(Generic[Owner]):
    """A sequence that loads has a lease and no row. When its load has ended, the sequence waits again. It keeps the
    lease until the loop admits it, or until a row needs the blocks."""

    def __init__(self, pool: Pool, stats: Stats) -> None:
        self.under_way: dict[Lease, Seq[Owner] | None] = {}
        """Leases that load. None: the sequence was aborted, and the pool keeps the blocks until the load has ended."""
        self.ended: dict[Seq[Owner], None] = {}
        """Waiting sequences that hold the lease of an ended load, the oldest first."""
        self._pool, self._stats = pool, stats

    def begin(self, seq: Seq[Owner], lease: Lease, leave: float) -> bool:
        """Start to load a waiting sequence's prefix. False: there is no room."""
        if not lease.load(leave):
            return False
        self.under_way[lease] = seq
        seq.state = SeqState.LOADING
        self._stats.loading += 1
        self._stats.loads += 1
        return True

    def poll(self, wait_s: float | None) -> bool:
        """Move sequences whose load has ended. Waits for a load, up to wait_s seconds. Returns whether any has
        ended."""
        leases = self._pool.poll(wait_s)
        for lease in leases:
            if lease not in self.under_way:
                raise ContractError("the pool's poll() names a lease that loads nothing")
            seq = self.under_way.pop(lease)
            if seq is not None:
                seq.state = SeqState.WAITING
                self.ended[seq] = None
                self._stats.loading -= 1
        return bool(leases)

    def drop(self, seq: Seq[Owner]) -> None:
        """Release the lease of a waiting sequence, if it has one. Loaded blocks stay cached until they are evicted."""
        if seq.lease is not None:
            if seq.state is SeqState.LOADING:
                self.under_way[seq.lease] = None
                self._stats.loading -= 1
            self.ended.pop(seq, None)
            seq.lease.release()
            seq.lease = None

    def drop_latest(self, spared: Seq[Owner] | None = None) -> bool:
        """Drop the lease of the sequence whose load ended last, except `spared`. False: there is no such sequence."""
        latest = next((seq for seq in reversed(self.ended) if seq is not spared), None)
        if latest is not None:
            self.drop(latest)
        return latest is not None
