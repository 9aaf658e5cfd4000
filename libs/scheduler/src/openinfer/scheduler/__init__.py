"""Continuous batching: policies, and the step loop that runs one step ahead. Pure logic, no dependency."""

from .errors import ContractError, IntegrityError, InvalidSetup, Rejected, RejectReason, SchedulerError
from .events import Event, Finished, Scheduled, Tokens
from .loop import StepLoop
from .policy import Decision, FirstCome, Policy, View
from .protocols import BlockWrite, Lease, Pool, Row, Runner, Step, StepResult
from .sequence import FinishReason, Seq, SeqState
from .stats import Stats

__all__ = [
    "BlockWrite",
    "ContractError",
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
