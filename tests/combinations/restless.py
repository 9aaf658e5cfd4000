"""A scheduling policy for tests: `--scheduling-policy restless:priority` preempts rows whether there is need or not."""

from __future__ import annotations

from typing import Any

from openinfer.scheduler import Decision, Policy, Seq, View
from openinfer.scheduler.policies import make_policy

EVERY, MOST = 3, 12


class Restless:
    """Another policy, which sends its last row back at every third change, twelve times."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._changes, self.preempted = policy, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def on_preempt(self, seq: Seq) -> None:
        self._changes, self.preempted = 0, self.preempted + 1
        self._policy.on_preempt(seq)

    def plan(self, view: View) -> Decision:
        decision = self._policy.plan(view)
        self._changes += 1
        if self._changes >= EVERY and self.preempted < MOST and view.running:
            decision.preempt = [list(view.running)[-1]]
        return decision


def priority(max_batched_tokens: int) -> Restless:
    return Restless(make_policy("priority", max_batched_tokens=max_batched_tokens))
