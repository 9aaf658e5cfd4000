"""Loads: waiting sequences whose prefix the pool loads, and waiting sequences whose load has ended."""

from typing import Generic

from .errors import ContractError
from .events import Stats
from .pool import Lease, Pool
from .sequence import Owner, Seq, SeqState


class Loads(Generic[Owner]):
    """A sequence that loads has a lease and no row. When its load has ended, the sequence waits again. It keeps the
    lease until the loop admits it, or until a row needs the blocks."""

    def __init__(self, pool: Pool, stats: Stats) -> None:
        self.under_way: dict[Lease, Seq[Owner] | None] = {}
        """Leases that load. None: the sequence was aborted, and the pool keeps the blocks until the load has ended."""
        self.ended: dict[Seq[Owner], None] = {}
        """Waiting sequences that hold the lease of an ended load, the oldest first."""
        self.wanted: dict[Seq[Owner], float] = {}
        """Waiting sequences whose load begins in this turn, and the part of the pool that it leaves free."""
        self.short: dict[Seq[Owner], None] = {}
        """Waiting sequences whose load had no room in the last turn."""
        self._pool, self._stats = pool, stats

    def want(self, seq: Seq[Owner], lease: Lease, leave: float) -> bool:
        """Have a waiting sequence's prefix loaded. The load begins after the launch of this turn's step, because to
        begin it takes time of the host; it begins now if it had no room in the last turn. False: there is no room."""
        if seq in self.short:
            del self.short[seq]
            return self.begin(seq, lease, leave)
        self.wanted[seq] = leave
        return True

    def begin(self, seq: Seq[Owner], lease: Lease, leave: float) -> bool:
        """Start to load a waiting sequence's prefix. False: there is no room."""
        if not lease.load(leave):
            return False
        self.under_way[lease] = seq
        seq.state = SeqState.LOADING
        self._stats.loading += 1
        self._stats.loads += 1
        return True

    def begin_wanted(self) -> bool:
        """Start the requested loads. Returns whether the pool has no room for one."""
        if not self.wanted:
            return False
        wanted, self.wanted, missed = self.wanted, {}, False
        for seq, leave in wanted.items():
            if seq.lease is not None and not self.begin(seq, seq.lease, leave):
                self.drop(seq)
                self.short[seq], missed = None, True
        return missed

    def poll(self, wait_s: float | None) -> bool:
        """Move sequences whose load has ended, after up to wait_s seconds. Returns whether any has."""
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
        self.short.pop(seq, None)
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
