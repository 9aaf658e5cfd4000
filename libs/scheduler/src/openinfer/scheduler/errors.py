"""Everything this library raises.

    SchedulerError (Exception)
     ├─ InvalidSetup    (ValueError)      a loop or policy that cannot work as configured
     ├─ Rejected        (ValueError)      submit() refuses a sequence; `reason` says why
     ├─ ContractError   (RuntimeError)    runner, pool, policy, speculation or engine broke its contract
     └─ IntegrityError  (RuntimeError)    check() found the loop's books wrong: a bug

An exception of the runner passes through unchanged.
"""

from enum import Enum


class SchedulerError(Exception):
    """Base of all errors of openinfer.scheduler."""


class InvalidSetup(SchedulerError, ValueError):
    """A loop or policy that cannot work as configured."""

    user_can_mend = True


class RejectReason(Enum):
    """Why submit() refuses."""

    QUEUE_FULL = "queue_full"
    """max_queued sequences wait already; later may succeed."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a token within max_model_len."""
    POOL_TOO_SMALL = "pool_too_small"
    """The whole pool could not hold prompt and output."""
    INVALID = "invalid"
    """No prompt, max_tokens < 1, or an id in use."""


class Rejected(SchedulerError, ValueError):
    """submit() refused a sequence, which has left no trace."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ContractError(SchedulerError, RuntimeError):
    """The runner, the pool, the policy, the speculation or the engine broke its contract."""


class IntegrityError(SchedulerError, RuntimeError):
    """The loop's books contradict themselves; `problems` lists how."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the step loop is inconsistent: " + "; ".join(problems))
        self.problems = problems
