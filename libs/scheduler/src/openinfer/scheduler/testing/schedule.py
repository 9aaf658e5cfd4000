"""Schedule: a random workload, played on a StepLoop and compared with the sequential oracle."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ..errors import Rejected
from ..events import Event, Finished, Scheduled, Tokens
from ..loop import StepLoop
from ..policies.batching import FirstCome
from ..policy import Policy, View
from ..pool import Pool
from ..sequence import FinishReason, Seq
from .fake_runner import VOCABULARY, FakeRunner, Sampled, generate
from .simple_pool import PoolShape, SimplePool
from .tier import FakeTier

MakePool = Callable[[Sequence[PoolShape], FakeTier], Pool]
Loop: TypeAlias = StepLoop[Any, Sampled]


class Mismatch(AssertionError):
    """The loop's events differ from those of a request that is alone."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, the turn of its submission, and the actions of its client."""

    turn: int
    prompt: list[int]
    max_tokens: int
    abort_turn: int | None
    """Turn in which the client aborts."""
    stop_after: int | None
    """Output tokens after which the host finds a stop string."""


class _Drafts(NamedTuple):
    """Drafts of decode rows, in three of five schedules."""

    most: int
    """Limit of the drafts of a row."""
    acceptance: float
    """Part of the drafts that is right."""


class _Loads(NamedTuple):
    """Blocks that another process has, in two of five schedules."""

    part: float
    """Part of the requests whose blocks it has."""
    delay: int
    """Limit of the polls that a load takes."""
    failures: float
    """Part of the blocks that do not come."""

    def shaken(self, arrival: Arrival) -> Arrival:
        """The request, with an early abort in one of three cases if the schedule has loads."""
        rng = random.Random(f"shaken {arrival}")
        if self.part and rng.random() < 0.3:
            return replace(arrival, abort_turn=arrival.turn + rng.randint(1, 8))
        return arrival


@dataclass(frozen=True, slots=True)
class Schedule:
    """A workload and its sizes, derived from a seed."""

    seed: int
    groups: list[PoolShape]
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    max_chunk_tokens: int
    depth: int
    slowness: int
    """Limit of the polls that a result is late."""
    stall_rate: float
    drafts: _Drafts
    loads: _Loads
    lone_tokens: Sequence[int]
    """See StepLoop; none in one of three schedules."""
    arrivals: list[Arrival]

    @classmethod
    def generate(cls, seed: int) -> "Schedule":
        """A schedule with small sizes, so that a few dozen turns meet every case: small pools, small chunks, shared
        prefixes, follow-ups of earlier requests, aborts, stop strings, late results."""
        rng = random.Random(seed)
        max_model_len = rng.randint(12, 48)
        sizes = rng.choice([[2], [4], [4], [3], [2, 4], [4, 6]])
        roomy = rng.choice([1.0, 1.3, 2.0, 5.0])
        max_rows = rng.randint(1, 6)
        prompts: list[list[int]] = []
        for _ in range(rng.randint(1, 12)):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, max_model_len * 2 // 3))]
            if prompts and rng.random() < 0.6:
                earlier = rng.choice(prompts)
                kept = earlier[: rng.randint(1, len(earlier))]
                if rng.random() < 0.5:
                    kept = earlier + generate(earlier, max_model_len)[0]
                prompt = (kept + prompt[:3])[: max_model_len - 1]
            prompts.append(prompt)
        choose = random.Random(f"drafts {seed}").choice
        drafts = _Drafts(choose([0, 0, 1, 2, 4]), choose([0.0, 0.3, 0.6, 0.9, 1.0]))
        choose = random.Random(f"loads {seed}").choice
        loads = _Loads(choose([0.0, 0.0, 0.0, 0.5, 1.0]), choose([0, 2, 15]), choose([0.0, 0.0, 0.3, 1.0]))
        groups = [
            PoolShape(size, 1 + int(-(-max_model_len // size) * roomy) + rng.randint(0, 2)) for size in sizes
        ]
        limits = max_rows, max_model_len, rng.randint(max_rows, 24), rng.randint(1, 16)
        device = rng.choice([1, 2, 2, 2, 3]), rng.choice([0, 1, 4]), rng.choice([0.0, 0.0, 0.2])
        lone_tokens = random.Random(f"lone {seed}").choice([(), (), (9,), (9, 12), (12,), (12, 20)])
        arrivals = []
        for prompt in prompts:
            turn, max_tokens = rng.randint(0, 40), rng.randint(1, max_model_len)
            abort_turn, stop_after = (rng.randint(1, n) if rng.random() < 0.2 else None for n in (80, 8))
            arrivals.append(loads.shaken(Arrival(turn, prompt, max_tokens, abort_turn, stop_after)))
        return cls(seed, _windowed(seed, groups), *limits, *device, drafts, loads, lone_tokens, arrivals)

    def play(
        self,
        make_pool: MakePool = SimplePool,
        *,
        make_policy: "Callable[[Schedule], Policy] | None" = None,
        loop_type: type[Loop] = StepLoop,
        after_step: Callable[[Loop], object] = StepLoop.check,
    ) -> Loop:
        """Run it to the end, with `after_step` after each turn. Returns the loop. Raises Mismatch or DeviceFault.
        Exceptions of the parts under test pass through."""
        rng = random.Random(self.seed)
        runner = FakeRunner(
            [shape.block_size for shape in self.groups],
            windows=[shape.window for shape in self.groups],
            depth=self.depth,
            delay=lambda index: rng.randint(0, self.slowness),
            stall=lambda index, seq: rng.random() < self.stall_rate,
            accept=lambda index, seq, count: sum(rng.random() < self.drafts.acceptance for _ in range(count)),
        )
        pool, most = make_pool(self.groups, self._tier(runner)), self.max_batched_tokens
        policy = make_policy(self) if make_policy else FirstCome(most, self.max_chunk_tokens)
        loop = loop_type(
            runner,
            pool,
            policy,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
            max_queued=len(self.arrivals),
            depth=self.depth,
            lone_tokens=self.lone_tokens,
            speculation=RandomDrafts(self.seed, self.drafts.most, most) if self.drafts.most else None,
        )
        requests = [_Request(loop, number, arrival) for number, arrival in enumerate(self.arrivals)]
        num_free = pool.num_free
        turn = 0
        while loop.has_work or any(request.arrival.turn >= turn for request in requests):
            for request in requests:
                request.act(turn)
            _observe(loop.step(0.0))
            after_step(loop)
            turn += 1
            if turn > 5000:
                raise Mismatch(f"no end after {turn} turns: {loop.stats}")
        for request in requests:
            request.compare(self.groups[0].window)
        if pool.num_free != num_free:
            raise Mismatch(f"{num_free - pool.num_free} blocks were not given back")
        return loop

    def _tier(self, runner: FakeRunner) -> FakeTier:
        """The blocks of another process: for some requests, the first blocks of prompt and output, or all of them."""
        rng = random.Random(f"tier {self.seed}")
        sequences = []
        for arrival in self.arrivals:
            if rng.random() < self.loads.part:
                output = generate(arrival.prompt, self.max_model_len, self.groups[0].window)[0]
                whole = [*arrival.prompt, *output][: self.max_model_len - 1]
                sequences.append(whole[: rng.randint(1, len(whole))] if rng.random() < 0.5 else whole)
        return FakeTier(
            runner,
            sequences,
            delay=lambda: rng.randint(0, self.loads.delay),
            fails=lambda: rng.random() < self.loads.failures,
        )


def _windowed(seed: int, groups: list[PoolShape]) -> list[PoolShape]:
    """Give some groups windows, in two of five schedules, mostly with few more blocks than one sequence needs."""
    rng = random.Random(f"windows {seed}")
    if rng.random() < 0.6:
        return groups
    if len(groups) == 1 and rng.random() < 0.7:
        groups = [*groups, groups[0]]
    chosen = range(len(groups)) if rng.random() < 0.2 else [rng.randrange(len(groups))]
    for group in chosen:
        size, window = groups[group].block_size, rng.randint(1, 9)
        least = -(-window // size) + 2
        groups[group] = PoolShape(size, least + rng.choice([0, 0, 1, 2, 4, 10]), window)
    return groups


def _observe(events: "Sequence[Event[_Request, Sampled]]") -> None:
    for event in events:
        if isinstance(event, Tokens):
            for position, seq in event.emitting():
                tokens = event.payload[position]
                if len(tokens) != event.num_tokens(position):
                    raise Mismatch(f"request {seq.id} has {tokens}, told are {event.num_tokens(position)}")
                for token in tokens:
                    seq.owner.on_token(token)
        else:
            event.seq.owner.on_event(event)


class _Request:
    """A client: it submits, aborts, stops, and records its events."""

    def __init__(self, loop: Loop, number: int, arrival: Arrival) -> None:
        self.arrival, self._loop, prompt = arrival, loop, list(arrival.prompt)
        self.seq = Seq(number, prompt, arrival.max_tokens, arrival=float(arrival.turn), owner=self)
        self._output: list[int] = []
        self._reasons: list[FinishReason] = []
        self._scheduled = self._aborted = self._rejected = False

    def act(self, turn: int) -> None:
        if turn == self.arrival.turn:
            try:
                self._loop.submit(self.seq)
            except Rejected:
                self._rejected = True
        if turn == self.arrival.abort_turn and turn >= self.arrival.turn:
            self._aborted |= self._loop.abort(self.seq.id)
        if self.arrival.stop_after is not None and len(self._output) >= self.arrival.stop_after:
            self._aborted |= self._loop.abort(self.seq.id)

    def on_token(self, token: int) -> None:
        if not self._scheduled or self._reasons or self._aborted:
            raise Mismatch(f"request {self.seq.id} is told {token} out of place")
        self._output.append(token)
        self.seq.tokens.append(token)

    def on_event(self, event: "Scheduled[_Request] | Finished[_Request]") -> None:
        if self._reasons or (isinstance(event, Scheduled) and self._scheduled):
            raise Mismatch(f"request {self.seq.id} is told {event} out of place")
        if isinstance(event, Scheduled):
            self._scheduled = True
        else:
            self._reasons.append(event.reason)

    def compare(self, window: int | None) -> None:
        if self._rejected:
            return
        output, reason = generate(self.arrival.prompt, self.seq.max_len, window)
        if self._reasons == [FinishReason.ABORT] and self._aborted:
            output = output[: len(self._output)]
        elif self._reasons != [reason] or self._aborted:
            raise Mismatch(f"request {self.seq.id} ended with {self._reasons}, alone it is {reason}")
        if self._output != output:
            raise Mismatch(f"request {self.seq.id} yields {self._output}, alone it is {output}")


class RandomDrafts:
    """Up to `most` drafts a row. It changes between none, one number for all rows, and one each. It rests at times.

    The tokens of all decode rows stay below max_tokens, so that prompts get one token at least.
    """

    def __init__(self, seed: int, most: int, max_tokens: int) -> None:
        self._random = random.Random(f"speculation {seed}")
        self._most, self._max_tokens = most, max_tokens
        self._mood = self.rest_until = 0

    def num_drafts(self, view: View) -> Mapping[Seq[Any], int]:
        rng, most = self._random, self._most
        if rng.random() < 0.2:
            self._mood = rng.choice([-1, 0, most, most])
        if not self._mood and rng.random() < 0.1:
            self.rest_until = view.step + rng.randint(1, 4)
        room = self._max_tokens - 1 - len(view.decoding)
        drafts = {}
        for seq in view.decoding:
            count = min(rng.randint(0, most) if self._mood < 0 else self._mood, room)
            if count > 0:
                drafts[seq] = count
                room -= count
        return drafts
