"""Pace: limits the prompt tokens of a step, so that decode rows get their tokens in time."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidSetup
from ..runner import Step

FLOOR = 64
"""A step may always carry this many prompt tokens, because prompts must advance even if decoding alone misses the
objective."""
START = 512


class Pace:
    """A controller: it scales the number of prompt tokens by the objective over the time of the last mixed step.

    objective_s: upper limit of a step with decode rows, in seconds. This is the time between two tokens of a row. The
    controller assumes only that more tokens take longer. It ignores steps without prompts and steps without decode
    rows. Raises InvalidSetup.
    """

    def __init__(self, objective_s: float, max_tokens: int) -> None:
        if objective_s <= 0:
            raise InvalidSetup(f"tpot_s must be positive, given {objective_s}")
        self.objective_s = objective_s
        self._max = max_tokens
        self._floor = min(FLOOR, max_tokens)
        self.prompt_tokens = min(START, max_tokens)

    def observe(self, step: Step[Any], seconds: float) -> None:
        """Learn from a step that was read."""
        if not 0 < step.num_decode < len(step.rows):
            return
        carried = sum([row.num_tokens for row in step.rows[step.num_decode :]])
        factor = self.objective_s / seconds if seconds > 0 else 1.25
        if factor < 1:
            # At most halve the number: one slow step of the host must not cost many steps.
            self.prompt_tokens = max(self._floor, int(min(carried, self.prompt_tokens) * max(factor, 0.5)))
        elif carried > self.prompt_tokens * 7 // 8:  # the number limited the step
            self.prompt_tokens = min(self._max, int(self.prompt_tokens * min(factor, 1.25)) + 1)
