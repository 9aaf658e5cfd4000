"""Which sequences a loop can take at all, and which there is room for now."""

from __future__ import annotations

from typing import Any

from .errors import Rejected, RejectReason
from .pool import Lease, Pool
from .runner import BlockWrite
from .sequence import Owner, Seq


def refusal(seq: Seq[Any], max_model_len: int, capacity_tokens: int) -> Rejected | None:
    """What submit() raises for a sequence whose lengths the loop or the pool cannot serve, or None."""
    if not seq.prompt_len or seq.max_tokens < 1:
        return Rejected(
            RejectReason.INVALID,
            f"request {seq.id} has {seq.prompt_len} prompt tokens and max_tokens {seq.max_tokens}; "
            "both must be >= 1",
        )
    if seq.prompt_len >= max_model_len:
        return Rejected(
            RejectReason.TOO_LONG,
            f"request {seq.id} has {seq.prompt_len} prompt tokens; "
            f"the model's length of {max_model_len} allows {max_model_len - 1} and one of output",
        )
    needed = min(max_model_len, seq.prompt_len + seq.max_tokens) - 1
    if needed > capacity_tokens:
        advice = "lower max_tokens" if seq.prompt_len <= capacity_tokens else "shorten the prompt"
        return Rejected(
            RejectReason.POOL_TOO_SMALL,
            f"request {seq.id} may need {needed} tokens of cache, {seq.prompt_len} of them for its prompt; "
            f"the pool holds {capacity_tokens} of one sequence; {advice} or give the pool more memory",
        )
    return None


class Headroom:
    """Room that admissions leave free: the guard against thrashing.

    Admission is optimistic (nobody's output is reserved, nor what chunks need of windows), so a pool can be filled
    with sequences that then preempt each other. The level follows the recent number of preemptions for each sequence
    that ended: each preemption adds 1/32, each ending takes 1/32 of the level away. Where nothing is preempted it is 0.
    """

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self.level = 0.0
        """The part of each group's blocks that is left."""

    def on_preempt(self) -> None:
        """Too much was admitted."""
        self.level = min(self._ceiling, self.level + 1 / 32)

    def on_finish(self) -> None:
        """What was admitted is getting done."""
        self.level -= self.level / 32


def num_cached(pool: Pool, seq: Seq[Any]) -> int:
    """Tokens of a waiting sequence that the pool has cached."""
    lease = pool.acquire(seq.tokens, seq.salt, seq.hashes)
    found = lease.num_cached
    lease.release()
    return found


def promise(lease: Lease, seq: Seq[Any], num_tokens: int, leave: float) -> bool:
    """Room for all that the sequence has in groups that keep all; in windows for a chunk of num_tokens tokens, or fewer
    where they have less room. False: no room. leave: the part of the pool that is to stay free."""
    end = min(lease.num_cached + num_tokens, len(seq.tokens), lease.reach(leave))
    return end > lease.num_cached and lease.reserve(end, len(seq.tokens), leave) is not None


def room_for(seq: Seq[Owner], end: int, writes: list[BlockWrite[Owner]]) -> int:
    """Make room for the tokens of a prefilling sequence up to `end`, or as far as windows have room. Returns how far
    that is; what its tables get is appended to `writes`."""
    lease = seq.lease
    if lease is None or end <= lease.num_tokens:
        return end
    for group, first, blocks in lease.reserve(min(end, lease.reach())) or ():
        writes.append(BlockWrite(seq, group, first, blocks))
    return min(end, lease.num_tokens)
