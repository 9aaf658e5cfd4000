"""PolicyConformance: the rules that every policy must keep, as tests to subclass."""

import random
from collections.abc import Sequence
from typing import Any

from ..drafters import Drafter
from ..errors import SchedulerError
from ..events import Scheduled, Tokens
from ..loop import StepLoop
from ..policy import Policy
from ..runner import Step
from ..sequence import Seq
from .fake_runner import VOCABULARY, DeviceFault, FakeRunner
from .schedule import Mismatch, RandomDrafts, Schedule
from .simple_pool import SimplePool


class _Recorder(FakeRunner):
    """Keeps the shape of every step, and refuses steps over the budget."""

    def __init__(self, block_sizes: Sequence[int], max_tokens: int, lone_tokens: Sequence[int]) -> None:
        super().__init__(block_sizes)
        self.max_tokens, self.lone_tokens = max_tokens, lone_tokens
        self.shapes: list[list[tuple[int, int]]] = []

    def launch(self, step: Step[Any]) -> None:
        self.shapes.append([(row.seq.id, row.num_tokens) for row in step.rows])
        tokens = sum(row.num_tokens for row in step.rows)
        lone = tokens in self.lone_tokens and len(step.rows) == 1 and not step.num_decode
        if tokens > self.max_tokens and not lone:
            raise Mismatch(f"step {step.index} has {tokens} tokens, the budget is {self.max_tokens}")
        super().launch(step)


class PolicyConformance:
    """Subclass it in a test module, and pytest runs the rules on your policy:

        class TestMine(PolicyConformance):
            def make_policy(self, max_batched_tokens):
                return MyPolicy(max_batched_tokens)

    The rules: every request yields the tokens that it yields alone, each once. All blocks and slots come back. Random
    schedules check this with drafts, loads, aborts, preemptions, stalls and small pools. Steps keep the budget. No
    request starves. Equal workloads give equal steps. An idle machine admits every request that fits. Aborted requests
    are forgotten. A broken rule raises Mismatch, or an error of the loop or the fake device.
    """

    num_schedules = 60
    """Number of random schedules that test_schedules plays."""
    patience = 1500
    """Turns within which every request must be admitted. A turn is one second of the clock."""
    loop_type: type[StepLoop[Any, Any]] = StepLoop

    def make_policy(self, max_batched_tokens: int) -> Policy:
        """A new policy for steps of at most max_batched_tokens tokens, which is at least the loop's max_rows."""
        raise NotImplementedError("return your policy here")

    def test_schedules(self) -> None:
        """On random schedules, every request yields the tokens that it yields alone, and all blocks come back."""
        for seed in range(self.num_schedules):
            schedule = Schedule.generate(seed)
            try:
                schedule.play(
                    make_policy=lambda schedule: self.make_policy(schedule.max_batched_tokens),
                    loop_type=self.loop_type,
                )
            except (Mismatch, DeviceFault, SchedulerError) as error:
                error.add_note(f"in {schedule}")
                raise

    def test_budget(self) -> None:
        """No step has more tokens than max_batched_tokens, drafts included, but a lone chunk of View.lone_tokens."""
        for budget in (6, 7, 24):
            for drafts in (0, 3):
                for lone_tokens in ((), (12,), (8, 12)):
                    _Play(self, budget, seed=budget, drafts=drafts, lone_tokens=lone_tokens).run()

    def test_determinism(self) -> None:
        """The same arrivals give the same steps."""
        first, second = (_Play(self, 24, seed=5).run() for _ in range(2))
        if first != second:
            index = next(
                (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second)
            )
            raise Mismatch(f"two equal runs differ from step {index + 1} on")

    def test_no_starvation(self) -> None:
        """On a machine that is never idle every request is admitted, whatever its length, tenant and priority."""
        probes = [(14, "crowd", 0), (3, "other", 0), (3, "crowd", 3)]
        for index, (length, tenant, priority) in enumerate(probes):
            play = _Play(self, 24, seed=index)
            play.crowd(turns=3)
            while play.loop.stats.waiting > 2:
                play.turn()
            probe = play.submit_probe(length, tenant, priority)
            play.clock += 0.5  # nearly all requests that wait with the probe arrive later
            play.crowd(self.patience, until=probe)

    def test_idle_machine(self) -> None:
        """An idle machine serves a request of any size that fits."""
        for length in (1, 23, 30):
            play = _Play(self, 6, seed=length)
            play.submit_probe(length, "", 0)
            play.finish()

    def test_aborted_are_forgotten(self) -> None:
        """The policy does not name a request after its abort."""
        play = _Play(self, 8, seed=1)
        seqs = [play.submit_probe(6, f"tenant {i % 2}", i % 3) for i in range(8)]
        for turn in range(4):
            play.turn()
            for seq in (seqs[turn], seqs[7 - turn]):
                play.loop.abort(seq.id)
        play.finish()


class _Play:
    """A small machine with the policy. Its clock advances by one second a turn."""

    def __init__(
        self,
        suite: PolicyConformance,
        budget: int,
        *,
        seed: int,
        drafts: int = 0,
        lone_tokens: Sequence[int] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.clock = 0.0
        self.pool = SimplePool([(4, 33)])
        self.num_free = self.pool.num_free
        self.runner = _Recorder([4], budget, lone_tokens)
        self.loop = suite.loop_type(
            self.runner,
            self.pool,
            suite.make_policy(budget),
            max_rows=4,
            max_model_len=32,
            lone_tokens=lone_tokens,
            speculation=RandomDrafts(seed, drafts, budget) if drafts else None,
            clock=lambda: self.clock,
        )
        self.num_submitted = 0
        self.prefix = [self.random.randrange(VOCABULARY) for _ in range(8)]

    def submit_probe(self, length: int, tenant: str, priority: int) -> Seq[None]:
        return self.submit([self.random.randrange(VOCABULARY) for _ in range(length)], tenant, priority)

    def submit(self, tokens: list[int], tenant: str, priority: int = 0) -> Seq[None]:
        self.num_submitted += 1
        seq = Seq[None](self.num_submitted, tokens, 2, priority=priority, tenant=tenant, arrival=self.clock)
        self.loop.submit(seq)
        return seq

    def turn(self) -> list[Seq[None]]:
        admitted = []
        for event in self.loop.step(1.0):
            if isinstance(event, Tokens):
                for position, seq in event.emitting():
                    seq.tokens.extend(event.payload[position])
            elif isinstance(event, Scheduled):
                admitted.append(event.seq)
        self.loop.check()
        self.clock += 1.0
        return admitted

    def run(self) -> list[list[tuple[int, int]]]:
        """Serve a random crowd. Returns the shape of each step."""
        rng = self.random
        for _ in range(30):
            for _ in range(rng.randint(0, 3)):
                self.submit_probe(rng.randint(1, 29), f"{rng.randrange(3)}", rng.randrange(3))
            self.turn()
        self.finish()
        return self.runner.shapes

    def crowd(self, turns: int, until: Seq[None] | None = None) -> None:
        """Keep 12 short requests with a common prefix waiting, for some turns or until one request is admitted."""
        for _ in range(turns):
            while self.loop.stats.waiting < 12:
                self.submit([*self.prefix, self.random.randrange(VOCABULARY)], "crowd")
            if until in self.turn():
                return
        if until is not None:
            raise Mismatch(f"a request waited for {turns} turns while {self.num_submitted} others ran")

    def finish(self) -> None:
        for _ in range(400):
            if not self.loop.has_work:
                break
            self.turn()
        if self.loop.has_work:
            raise Mismatch(f"{len(self.loop.live)} requests are not served though nothing is in their way")
        if self.pool.num_free != self.num_free:
            raise Mismatch(f"{self.num_free - self.pool.num_free} blocks were not given back")


class DrafterConformance:
    """Subclass it in a test module, and pytest runs the rules on your drafter:

        class TestMine(DrafterConformance):
            def make_drafter(self):
                return MyDrafter()

    The rules: a proposal has at most as many tokens as the caller asks for. All its tokens occur in the vocabulary,
    which is 0..num_tokens - 1. The drafter changes no token of the sequence. Equal sequences get equal proposals,
    whether the drafter has seen them grow or not. A broken rule raises Mismatch.
    """

    num_tokens = 7
    """Size of the vocabulary of the random sequences."""

    def make_drafter(self) -> Drafter:
        """A new drafter, for one sequence."""
        raise NotImplementedError("return your drafter here")

    def test_proposals_are_short_and_in_the_vocabulary(self) -> None:
        """At most `count` tokens, each of the vocabulary."""
        for seed in range(30):
            rng = random.Random(seed)
            drafter, tokens = self.make_drafter(), [rng.randrange(self.num_tokens)]
            for _ in range(60):
                count, before = rng.randint(0, 9), list(tokens)
                found = list(drafter.propose(tokens, count))
                if len(found) > count or not set(found) <= set(range(self.num_tokens)):
                    raise Mismatch(f"after {tokens} it was asked for {count} tokens and gave {found}")
                if tokens != before:
                    raise Mismatch(f"the drafter changed the sequence {before} to {tokens}")
                tokens += [rng.randrange(self.num_tokens) for _ in range(rng.randint(0, 3))]

    def test_equal_sequences_get_equal_proposals(self) -> None:
        """A drafter that has seen a sequence grow proposes as one that sees it first."""
        for seed in range(30):
            rng = random.Random(seed)
            grown, tokens = self.make_drafter(), [rng.randrange(self.num_tokens)]
            for _ in range(40):
                old, new = grown.propose(tokens, 5), self.make_drafter().propose(tokens, 5)
                if list(old) != list(new):
                    raise Mismatch(f"after {tokens} one drafter proposes {list(old)}, a new one {list(new)}")
                tokens += [rng.randrange(self.num_tokens) for _ in range(rng.randint(1, 3))]
