"""Continuous batching: scheduling policies, and a step loop that runs one step ahead. Pure logic, no dependency."""

from .drafters import Drafter, NGram
from .errors import ContractError, IntegrityError, InvalidSetup, Rejected, RejectReason, SchedulerError
from .events import Event, Finished, Scheduled, Stats, Tokens
from .guarded import GuardedDrafters
from .loop import StepLoop
from .policies import POLICIES, Deadline, FairShare, LongestPrefix, Priority, imported, make_policy
from .policies.batching import Batching, FirstCome, Pace
from .policy import Decision, Policy, Speculation, View
from .pool import Lease, Pool
from .runner import BlockWrite, Row, Runner, Step, StepResult
from .sequence import FinishReason, Seq, SeqState
from .suffixes import Suffixes
from .worth import Worth

__all__ = [
    "POLICIES", "Batching", "BlockWrite", "ContractError", "Deadline", "Decision", "Drafter", "Event",
    "FairShare", "FinishReason", "Finished", "FirstCome", "GuardedDrafters", "IntegrityError", "InvalidSetup",
    "Lease", "LongestPrefix", "NGram", "Pace", "Policy", "Pool", "Priority", "RejectReason", "Rejected",
    "Row", "Runner", "Scheduled", "SchedulerError", "Seq", "SeqState", "Speculation", "Stats", "Step",
    "StepLoop", "StepResult", "Suffixes", "Tokens", "View", "Worth", "imported", "make_policy",
]  # fmt: skip
