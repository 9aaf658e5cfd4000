"""The wishes of the sequences in the slots. A step does no more than its rows ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from openinfer.graph.runner.sampling import Sampling

Array = np.ndarray[Any, Any]


class Wishes:
    """By slot. A slot that never held a sequence asks for nothing."""

    def __init__(self, slots: int) -> None:
        self._tops, self._more = np.zeros(slots, bool), np.zeros(slots, bool)

    def join(self, slot: int, sampling: Sampling) -> None:
        """A sequence takes the slot."""
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
