"""Seq: one request, and the loop's counters of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from .pool import Lease

Owner = TypeVar("Owner")
"""The type of `Seq.owner`: an engine's own record of a sequence."""
Payload = TypeVar("Payload")
"""The type of `StepResult.payload`: a runner's results for its engine."""


class SeqState(Enum):
    """WAITING -> PREFILL -> DECODE -> FINISHED; preempted: back to WAITING. Or WAITING -> LOADING -> WAITING -> ..."""

    WAITING = "waiting"
    LOADING = "loading"
    """The pool loads a part of its prefix. The sequence has no row."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """The device found EOS or a stop id, or the host found a stop string and called abort with this reason."""
    LENGTH = "length"
    """max_tokens or the model's length is reached."""
    ABORT = "abort"
    """The host aborted the request."""
    ERROR = "error"
    """The runner failed this row. The row's last step does not count; other rows are not affected."""


@dataclass(slots=True)
class Clock:
    """The loop's two step counters. A decode row without drafts advances by one a step, so its own follow."""

    launched: int = 0
    """Index of the last launched step; 0 before the first."""
    collected: int = 0
    """Index of the last step whose result was read."""


@dataclass(slots=True, eq=False)
class Seq(Generic[Owner]):
    """One request. The engine makes it, submits it and appends to `tokens`. All other fields belong to the loop.

    id: unique among live sequences. tokens: prompt, then confirmed output; the engine appends the tokens of Tokens
    events before it calls step() again. max_tokens: limit of output tokens, >= 1. For policies: priority (the lowest
    first), tenant, arrival (seconds of the loop's clock), and the objectives ttft_s and tpot_s (seconds; None: those of
    the policy). salt and hashes: arguments of the pool's acquire(). owner: the engine's own record, which the loop does
    not read; without one the type is Seq[None]. Sequences are compared and hashed by identity.
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
    """Row of the batch while the sequence runs, and its last row afterwards. 0: it has had no row."""
    lease: Lease | None = field(init=False, default=None)
    """Held from admission or the start of a load, to preemption or the end, with the fence of the row's last step."""
    target: int = field(init=False, default=0)
    """Tokens to prefill since the last admission: the prompt, and the output if the sequence was preempted."""
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)

    # Counters of the loop. Only modules of this library read and write them.
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
        """Tokens whose KV is computed for certain. 0 while waiting."""
        if self.state is SeqState.DECODE and self.clock and self.clock.collected >= self.entered:
            return self.base - self.ahead + self.clock.collected - self.entered
        return self.prefilled

    @property
    def bound(self) -> int:
        """Upper bound of the tokens whose KV is computed when all launched steps are done. Every draft in flight
        counts as accepted; the bound falls when a draft was rejected. The loop reserves blocks for the bound."""
        if self.state is SeqState.DECODE and self.clock:
            return min(self.base + self.clock.launched - self.entered, self.max_len - 1)
        return self.scheduled

    @property
    def remaining(self) -> int:
        """Prompt tokens not scheduled yet (in PREFILL)."""
        return max(0, self.target - self.bound)

    @property
    def num_output(self) -> int:
        """Output tokens that the engine has appended."""
        return len(self.tokens) - self.prompt_len
