"""For tests: a policy that preempts rows whether there is need or not, and a drafter that is wrong at times."""

import random
from collections.abc import Sequence
from typing import Any

from openinfer.scheduler import Decision, Policy, Seq, View, make_policy


class Restless:
    """A wrapped policy that also preempts its last row after `every` changes, then one more each time, up to `most`."""

    def __init__(self, policy: Policy, every: int = 3, most: int = 12) -> None:
        self._policy, self._every, self._most = policy, every, most
        self._changes = self._preempted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def on_preempt(self, seq: Seq[Any]) -> None:
        self._changes, self._every, self._preempted = 0, self._every + 1, self._preempted + 1
        self._policy.on_preempt(seq)

    def plan(self, view: View) -> Decision:
        decision = self._policy.plan(view)
        self._changes += 1
        if self._changes >= self._every and self._preempted < self._most and view.running:
            decision.preempt = [list(view.running)[-1]]
        return decision


def fcfs(max_batched_tokens: int) -> Restless:
    """`--scheduling-policy openinfer.recipes.engine.testing.restless:fcfs`: now and then, for as long as it runs."""
    return Restless(make_policy("fcfs", max_batched_tokens=max_batched_tokens), every=12, most=1 << 30)


def priority(max_batched_tokens: int) -> Restless:
    """Like fcfs, with priorities: twelve times, soon after the start."""
    return Restless(make_policy("priority", max_batched_tokens=max_batched_tokens))


class Planted:
    """A scheduler.Drafter. answers: prompts with their outputs. right: the chance that a token which it proposes is the
    answer's; else it is another one."""

    def __init__(self, answers: Sequence[Sequence[int]], right: float = 0.75) -> None:
        self._answers, self._right = answers, right

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The next tokens of the answer that begins with these tokens, some of them changed."""
        length, known = len(tokens), list(tokens)
        rest = (list(answer[length:]) for answer in self._answers if list(answer[:length]) == known)
        right = next(rest, [])
        rng = random.Random(length)
        return [token if rng.random() < self._right else token ^ 1 for token in right[:count]]
