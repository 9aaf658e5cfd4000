"""Which sequences a loop can take at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Rejected, RejectReason
from .sequence import Seq

if TYPE_CHECKING:
    from .loop import StepLoop


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
