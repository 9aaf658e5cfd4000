"""Sampling: the part of a request that its row on the device needs; Wishes: what the rows of a step ask for."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph.runner.drafting import Proposal
from openinfer.graph.runner.model import Constraint
from openinfer.graph.runner.scoring import PromptScore
from openinfer.graph.runner.verifying import DraftCounts
from openinfer.kernels.lora.adapters import Adapter
from openinfer.sampler import SamplingParams

Array = np.ndarray[Any, Any]


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

    @property
    def adapter_digest(self) -> bytes | None:
        """None: no adapter."""
        return None if self.adapter is None else self.adapter.digest


class Wishes:
    """The wishes of the sequences in the slots, because a step does no more than its rows ask for."""

    def __init__(self, slots: int) -> None:
        self._tops, self._more = np.zeros(slots, bool), np.zeros(slots, bool)

    def join(self, slot: int, sampling: Sampling) -> None:
        params = sampling.params
        self._tops[slot] = bool(params.logprobs)
        self._more[slot] = (
            not params.is_greedy
            or params.adjusts_logits
            or params.logprobs is not None
            or sampling.constraint is not None
        )

    def tops(self, slots: Array) -> bool:
        """Whether one of these slots asks for the most likely tokens."""
        return bool(self._tops[slots].any())

    def greedy(self, slots: Array) -> bool:
        """Whether all of these slots want the largest of the raw logits and no logprob (sampler.gpu.greedy_rows)."""
        return not self._more[slots].any()
