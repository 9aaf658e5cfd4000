"""Admission: the lengths that a loop can serve, and room for a waiting sequence."""

from typing import Any

from .errors import Rejected, RejectReason
from .pool import Lease, Pool
from .runner import BlockWrite
from .sequence import Owner, Seq


def refusal(seq: Seq[Any], max_model_len: int, capacity_tokens: int) -> Rejected | None:
    """The error that submit() raises for a sequence that is too long for the model or the pool, or None."""
    has = f"request {seq.id} has {seq.prompt_len} prompt tokens"
    if not seq.prompt_len or seq.max_tokens < 1:
        why = f"{has} and max_tokens {seq.max_tokens}; both must be >= 1"
        return Rejected(RejectReason.INVALID, why)
    if seq.prompt_len >= max_model_len:
        why = f"{has}; the model's length of {max_model_len} allows {max_model_len - 1} and one of output"
        return Rejected(RejectReason.TOO_LONG, why)
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
    """Blocks that admissions leave free, against thrashing.

    Admission is optimistic: it reserves neither a sequence's output nor the window blocks of later chunks. So admitted
    sequences can fill the pool and then preempt each other. The level follows recent preemptions per ended sequence:
    one adds 1/32, and an ending multiplies it by 31/32.
    """

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self.level = 0.0
        """The part of each group's blocks that admissions leave free, 0..1."""

    def on_preempt(self) -> None:
        """A running sequence was preempted: too many were admitted."""
        self.level = min(self._ceiling, self.level + 1 / 32)

    def on_finish(self) -> None:
        self.level -= self.level / 32


def num_cached(pool: Pool, seq: Seq[Any]) -> int:
    """Cached tokens of a waiting sequence."""
    lease = pool.acquire(seq.tokens, seq.salt, seq.hashes)
    found = lease.num_cached
    lease.release()
    return found


def promise(lease: Lease, seq: Seq[Any], num_tokens: int, leave: float) -> bool:
    """Reserve the whole sequence in groups without a window, and a chunk of up to num_tokens tokens in windows.
    leave: the part of the pool that must stay free. False: no room."""
    end = min(lease.num_cached + num_tokens, len(seq.tokens), lease.reach(leave))
    return end > lease.num_cached and lease.reserve(end, len(seq.tokens), leave) is not None


def room_for(seq: Seq[Owner], end: int, writes: list[BlockWrite[Owner]]) -> int:
    """Reserve a prefilling sequence's tokens up to `end`, or as far as windows have room. Returns that end, and
    appends the new blocks to `writes`."""
    lease = seq.lease
    if lease is None or end <= lease.num_tokens:
        return end
    writes += (BlockWrite(seq, *grown) for grown in lease.reserve(min(end, lease.reach())) or ())
    return min(end, lease.num_tokens)
