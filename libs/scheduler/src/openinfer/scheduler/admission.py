"""Which sequences a loop can take at all, and which there is room for now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Rejected, RejectReason
from .sequence import Seq

if TYPE_CHECKING:
    from .loop import StepLoop
    from .protocols import Lease, Pool


def refusal(loop: StepLoop, seq: Seq) -> Rejected | None:
    """What submit() raises for a sequence that the loop cannot take, or None."""
    if seq.id in loop._live or seq._clock is not None:
        return Rejected(
            RejectReason.INVALID,
            f"request {seq.id} was submitted before; make a new Seq, with an id of its own",
        )
    if not seq.prompt_len or seq.max_tokens < 1:
        return Rejected(
            RejectReason.INVALID,
            f"request {seq.id} has {seq.prompt_len} prompt tokens and max_tokens {seq.max_tokens}; "
            "both must be >= 1",
        )
    if seq.prompt_len >= loop.max_model_len:
        return Rejected(
            RejectReason.TOO_LONG,
            f"request {seq.id} has {seq.prompt_len} prompt tokens; "
            f"the model's length of {loop.max_model_len} allows {loop.max_model_len - 1} and one of output",
        )
    needed = min(loop.max_model_len, seq.prompt_len + seq.max_tokens) - 1
    if needed > loop._pool.capacity_tokens:
        return Rejected(
            RejectReason.POOL_TOO_SMALL,
            f"request {seq.id} may need {needed} tokens of cache; "
            f"the pool holds {loop._pool.capacity_tokens}; lower max_tokens or give the pool more memory",
        )
    if loop.stats.waiting >= loop.max_queued:
        return Rejected(
            RejectReason.QUEUE_FULL,
            f"{loop.stats.waiting} requests wait already (max_queued); try later",
        )
    return None


class Headroom:
    """Room that admissions leave free, in tokens: the guard against thrashing.

    Admission is optimistic (nobody's output is reserved), so a pool can be filled with sequences that then
    preempt each other. The level follows the recent number of preemptions for each sequence that ended: each
    preemption adds 1/32 of the pool, each ending takes 1/32 of the level away. Where nothing is preempted it
    is 0.
    """

    def __init__(self, pool: Pool, ceiling: float) -> None:
        self._pool, self._ceiling = pool, ceiling
        self._tokens_per_block = pool.capacity_tokens / max(1, pool.num_free)
        self._level = 0.0

    def allows(self, num_tokens: int) -> bool:
        """Whether the level is kept when so many tokens are given out; with several groups, on average."""
        if not self._level:
            return True
        free = self._pool.num_free * self._tokens_per_block
        return num_tokens + self._level * self._pool.capacity_tokens <= free

    def on_preempt(self) -> None:
        """Too much was admitted."""
        self._level = min(self._ceiling, self._level + 1 / 32)

    def on_finish(self) -> None:
        """What was admitted is getting done."""
        self._level -= self._level / 32


def num_cached(pool: Pool, seq: Seq) -> int:
    """Tokens of a waiting sequence that the pool has cached."""
    lease = pool.acquire(seq.tokens, seq.salt, seq.hashes)
    found = lease.num_cached
    lease.release()
    return found


def lease_for(seq: Seq, pool: Pool, headroom: Headroom | None) -> Lease | None:
    """A lease with room for all that the sequence has, so that only decode rows can ever run dry; None: no room.
    `headroom`: what to leave; None where nobody runs who could need it."""
    lease = pool.acquire(seq.tokens, seq.salt, seq.hashes)
    # Asked before reserve(), which would evict what is cached.
    fits = headroom is None or headroom.allows(len(seq.tokens) - lease.num_cached)
    if fits and lease.reserve(len(seq.tokens)) is not None:
        return lease
    lease.release()
    return None
