"""Sampling: the part of a request that its row on the device needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from openinfer.graph.runner.drafting import Proposal
from openinfer.graph.runner.model import Constraint
from openinfer.graph.runner.scoring import PromptScore
from openinfer.graph.runner.verifying import DraftCounts
from openinfer.kernels.lora.adapters import Adapter
from openinfer.sampler import SamplingParams


@dataclass(slots=True)
class Sampling:
    """The sampling state that a sequence brings to its row: the owner of every Seq that a Runner runs."""

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    """Every id that ends the sequence, EOS included unless ignored."""
    constraint: Constraint | None = None
    score: PromptScore | None = None
    adapter: Adapter | None = None
    place: int = 0  # of the adapter in the batch's Adapters, from 1 on; 0: none
    proposal: Proposal | None = None
    draftless: bool = False  # the request wants no drafts
    drafted: DraftCounts = field(default_factory=DraftCounts)
