"""Seq: one request as the loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from .pool import Lease

Owner = TypeVar("Owner")
"""What an engine keeps with each of its sequences: `Seq.owner`."""
Payload = TypeVar("Payload")
"""What an engine's runner returns of a step for the engine alone: `StepResult.payload`."""


class SeqState(Enum):
    """WAITING -> PREFILL -> DECODE -> FINISHED; preempted: back to WAITING. Or WAITING -> LOADING -> WAITING -> ..."""

    WAITING = "waiting"
    LOADING = "loading"
    """Part of its prefix is on its way to the pool. It has no row."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """EOS or a stop id (found by the device), or a stop string (by whoever called abort with this reason)."""
    LENGTH = "length"
    """max_tokens or the model's length is reached."""
    ABORT = "abort"
    """The host gave it up."""
    ERROR = "error"
    """The runner could not go on with this row, whose step does not count; the others are unharmed."""


@dataclass(slots=True)
class Clock:
    """The loop's two step counters, from which those of decode rows without drafts follow: one token a step."""

    launched: int = 0
    """Index of the last launched step; 0 before the first."""
    collected: int = 0
    """Index of the last step whose result was read."""


@dataclass(slots=True, eq=False)
class Seq(Generic[Owner]):
    """One request. The owner makes it, submits it and appends to `tokens`; the rest is the loop's (read only).

    id: unique among live sequences. tokens: prompt, then confirmed output; the owner appends what Tokens
    events bring, before it calls step() again. max_tokens: output tokens at most, >= 1. priority (lower
    first), tenant, arrival (seconds, of the loop's clock) and the objectives ttft_s and tpot_s (seconds; None:
    the policy's) are for policies. salt and hashes are handed to the pool's acquire(). owner: what the
    engine keeps with the sequence; the loop does not use it. Without an owner the type is Seq[None]. Compared and
    hashed by identity.
    """

    id: int
    tokens: list[int] = field(repr=False)
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    arrival: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    salt: bytes = field(default=b"", repr=False)
    hashes: Sequence[bytes] | None = field(default=None, repr=False)
    owner: Owner = field(default=cast(Any, None), repr=False)

    prompt_len: int = field(init=False)
    """Tokens at submission."""
    max_len: int = field(init=False, default=0)
    """Tokens at which the device ends the row (LENGTH): min(max_model_len, prompt_len + max_tokens)."""
    state: SeqState = field(init=False, default=SeqState.WAITING)
    slot: int = field(init=False, default=0)
    """Row of the device's batch while running; the last one held after that; 0 before the first."""
    lease: Lease | None = field(init=False, default=None)
    """Held from admission, or from the start of a load, to preemption or, after the end, to the fence of the last step
    that ran the row."""
    target: int = field(init=False, default=0)
    """Tokens to prefill, as of the last admission: the prompt, or everything known when it was preempted."""
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)

    # Counters of the loop: its modules write them, and nothing else reads them.
    clock: Clock | None = field(init=False, default=None, repr=False)
    prefilled: int = field(init=False, default=0, repr=False)  # confirmed, outside DECODE
    scheduled: int = field(init=False, default=0, repr=False)  # bound, outside DECODE
    committed: int = field(init=False, default=0, repr=False)  # of confirmed, told to the lease
    # In DECODE: bound = base + steps launched since entered, confirmed = base - ahead + steps collected since entered.
    base: int = field(init=False, default=0, repr=False)
    entered: int = field(init=False, default=0, repr=False)
    ahead: int = field(init=False, default=0, repr=False)  # drafts in flight: in base as if all were kept
    last_step: int = field(init=False, default=0, repr=False)  # the row's length ends it there at the latest
    crossing: int = field(init=False, default=0, repr=False)  # step for which blocks run out; 0: none

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def confirmed(self) -> int:
        """Tokens whose KV is known to be computed. 0 while waiting."""
        if self.state is SeqState.DECODE and self.clock and self.clock.collected >= self.entered:
            return self.base - self.ahead + self.clock.collected - self.entered
        return self.prefilled

    @property
    def bound(self) -> int:
        """The most tokens whose KV is computed when all launched steps are done: every draft counts as accepted. It
        falls when a step is read whose drafts were not. Blocks are reserved for it."""
        if self.state is SeqState.DECODE and self.clock:
            return min(self.base + self.clock.launched - self.entered, self.max_len - 1)
        return self.scheduled

    @property
    def remaining(self) -> int:
        """Prompt tokens not scheduled yet (in PREFILL)."""
        return max(0, self.target - self.bound)

    @property
    def num_output(self) -> int:
        """Output tokens that the owner has appended."""
        return len(self.tokens) - self.prompt_len
