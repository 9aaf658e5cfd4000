"""The conformance suite passes for every policy of the library, and for no broken one."""

import random

import pytest

from openinfer.scheduler import POLICIES, Batching, FirstCome, StepLoop, make_policy
from openinfer.scheduler.testing import DeviceFault, Mismatch, PolicyConformance


class FewSchedules(PolicyConformance):
    """The library's own policies play more in the slow test below."""

    num_schedules = 30


class TestFirstCome(FewSchedules):
    def make_policy(self, max_batched_tokens):
        return make_policy("fcfs", max_batched_tokens=max_batched_tokens)


class TestPaced(FewSchedules):
    def make_policy(self, max_batched_tokens):
        # Every step takes longer than this: prompts get the least there is.
        return make_policy("fcfs,tpot_s=0.000001", max_batched_tokens=max_batched_tokens)


class TestPriority(FewSchedules):
    def make_policy(self, max_batched_tokens):
        return make_policy("priority", max_batched_tokens=max_batched_tokens)


class TestFairShare(FewSchedules):
    def make_policy(self, max_batched_tokens):
        return make_policy("fair-share", max_batched_tokens=max_batched_tokens)


class TestDeadline(FewSchedules):
    def make_policy(self, max_batched_tokens):
        return make_policy("deadline,ttft_s=3", max_batched_tokens=max_batched_tokens)


class TestLongestPrefix(FewSchedules):
    def make_policy(self, max_batched_tokens):
        return make_policy("longest-prefix", max_batched_tokens=max_batched_tokens)


OURS = [suite for name, suite in globals().items() if name.startswith("Test")]


def test_no_policy_is_left_out():
    assert len(OURS) == len(POLICIES) + 1


@pytest.mark.slow
@pytest.mark.parametrize("suite", OURS)
def test_more_schedules(suite):
    more = suite()
    more.num_schedules = 300
    more.test_schedules()


class ShortestForEver(Batching):
    """Shortest first: whoever is long waits as long as others come."""

    def candidates(self, view):
        return sorted(self.waiting, key=lambda seq: len(seq.tokens))


class NewestFirst(Batching):
    """The latest arrival first: whoever came before a crowd waits as long as the crowd comes."""

    def __init__(self, budget):
        super().__init__(budget, rank=lambda seq: -seq.arrival)


class NeverAges(Batching):
    """Priorities without ageing."""

    def __init__(self, budget):
        super().__init__(budget, rank=lambda seq: seq.priority)


class Overspends(FirstCome):
    """Forgets that decode rows take part of the budget."""

    def plan(self, view):
        view.decode_tokens = 0
        return super().plan(view)


class WantsTheWholePrompt(FirstCome):
    """Admits whom it can prefill in one step only."""

    def candidates(self, view):
        return [seq for seq in self.waiting if len(seq.tokens) <= self.max_batched_tokens]


class ForgetsThePreempted(FirstCome):
    """Does not queue again whom it preempted."""

    def on_preempt(self, seq):
        pass


class RemembersTheAborted(FirstCome):
    """Does not take notice of endings."""

    def on_finish(self, seq):
        pass


class Dice(FirstCome):
    """Draws from an unseeded generator."""

    def candidates(self, view):
        return sorted(self.waiting, key=lambda seq: random.random())


class LetsGoTooEarly(StepLoop):
    """Gives slot and blocks back while a launched step uses them."""

    def _end(self, seq, reason, events):
        super()._end(seq, reason, events)
        self._let_go(seq)


class LosesATurn(StepLoop):
    """Drops the events of every hundredth turn."""

    def step(self, wait_s=0.0):
        events = super().step(wait_s)
        return events if self.stats.steps % 100 != 7 else []


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (ShortestForEver, "test_no_starvation"),
        (NewestFirst, "test_no_starvation"),
        (NeverAges, "test_no_starvation"),
        (Overspends, "test_budget"),
        (WantsTheWholePrompt, "test_idle_machine"),
        (ForgetsThePreempted, "test_schedules"),
        (RemembersTheAborted, "test_aborted_are_forgotten"),
        (Dice, "test_determinism"),
        (LetsGoTooEarly, "test_schedules"),
        (LosesATurn, "test_schedules"),
    ],
)
def test_a_broken_one_does_not_pass(broken, rule):
    class Suite(PolicyConformance):
        loop_type = broken if issubclass(broken, StepLoop) else StepLoop

        def make_policy(self, max_batched_tokens):
            return (
                FirstCome(max_batched_tokens) if issubclass(broken, StepLoop) else broken(max_batched_tokens)
            )

    with pytest.raises((Mismatch, DeviceFault, RuntimeError, ValueError)):
        getattr(Suite(), rule)()
