"""Pace: how many prompt tokens a step may carry so that those who decode get their tokens in time."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidSetup
from ..runner import Step

FLOOR = 64
"""Prompt tokens that a step may always carry: prompts must get on even if decoding alone misses the objective."""
START = 512


class Pace:
    """A controller: it scales the share of prompts by what the last mixed step took over what it should take.

    objective_s: seconds that a step with decode rows should take at most, which is the time between two tokens of a
    row. It assumes nothing about the model but that more tokens take longer. Steps without prompts, or in which
    nobody decodes, say nothing and change nothing. Raises InvalidSetup.
    """

    def __init__(self, objective_s: float, max_tokens: int) -> None:
        if objective_s <= 0:
            raise InvalidSetup(f"tpot_s must be positive, given {objective_s}")
        self.objective_s = objective_s
        self._max = max_tokens
        self._floor = min(FLOOR, max_tokens)
        self.prompt_tokens = min(START, max_tokens)

    def observe(self, step: Step[Any], seconds: float) -> None:
        """A step was read."""
        if not 0 < step.num_decode < len(step.rows):
            return
        carried = sum([row.num_tokens for row in step.rows[step.num_decode :]])
        factor = self.objective_s / seconds if seconds > 0 else 1.25
        if factor < 1:
            # By at most a half: one hiccup of the host should not cost many steps.
            self.prompt_tokens = max(self._floor, int(min(carried, self.prompt_tokens) * max(factor, 0.5)))
        elif carried > self.prompt_tokens * 7 // 8:  # it was the limit
            self.prompt_tokens = min(self._max, int(self.prompt_tokens * min(factor, 1.25)) + 1)
