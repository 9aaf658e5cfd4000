"""Continuous batching: policies, and the step loop that runs one step ahead. Pure logic, no dependency."""

from .errors import IntegrityError, InvalidSetup, Rejected, RejectReason, RunnerError, SchedulerError
from .events import Event, Finished, Scheduled, Tokens
from .loop import Stats, StepLoop
from .policy import Decision, FirstCome, Policy, View
from .protocols import BlockWrite, Lease, Pool, Row, Runner, Step, StepResult
from .sequence import FinishReason, Seq, SeqState

__all__ = [
    "BlockWrite",
    "Decision",
    "Event",
    "FinishReason",
    "Finished",
    "FirstCome",
    "IntegrityError",
    "InvalidSetup",
    "Lease",
    "Policy",
    "Pool",
    "RejectReason",
    "Rejected",
    "Row",
    "Runner",
    "RunnerError",
    "Scheduled",
    "SchedulerError",
    "Seq",
    "SeqState",
    "Stats",
    "Step",
    "StepLoop",
    "StepResult",
    "Tokens",
    "View",
]
