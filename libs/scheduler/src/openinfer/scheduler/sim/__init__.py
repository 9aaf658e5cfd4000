"""A simulator of serving: any policy and any pool, through the real StepLoop, in virtual time."""

from .cost import CostModel, LinearCost, StepWork
from .pool import SimLease, SimPool
from .report import Percentiles, Record, Report
from .runner import SimRunner, SteadyDrafts
from .simulate import simulate
from .tiers import SimTiers, SimTierStats, TierSpeeds
from .workloads import Request, bursts, chats, poisson, read_trace

__all__ = [
    "CostModel", "LinearCost", "Percentiles", "Record", "Report", "Request", "SimLease", "SimPool",
    "SimRunner", "SimTierStats", "SimTiers", "SteadyDrafts", "StepWork", "TierSpeeds", "bursts", "chats",
    "poisson", "read_trace", "simulate",
]  # fmt: skip
