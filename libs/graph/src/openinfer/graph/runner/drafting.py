"""Drafting: how many drafts a row has in a step, and which tokens a host's drafter proposes for it."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.costs import StepCosts
from openinfer.graph.rows import Rows
from openinfer.graph.runner.model import Constraint
from openinfer.graph.runner.trials import Trials
from openinfer.graph.runner.verifying import DraftCounts, kept_tokens, write_drafts
from openinfer.scheduler import Drafter, Seq, Step, View, Worth
from openinfer.scheduler.worth import ADAPTERS

if TYPE_CHECKING:
    from openinfer.graph.runner.sampling import Sampling


REST = 64
"""The most steps for which the choice rests while Worth allows no drafts, because it takes host time."""
RUN = 16
"""The most steps of a rest that are noted together."""
UNSURE = 256
"""The most choices that wait for the cost of plain steps. With drafts in each step no other would show that cost. A
load in which rows join in each step has no even ones."""
LONG = 4.0
"""Prompts that take more than this many plain decode steps are long. Drafts change a small part of such a step, less
than a prediction is wrong by: they are taken to cost what they cost without prompts, and Trials do not see the step."""


class Spent(NamedTuple):
    """Seconds of a step that is launched, as predicted. decode: of its decode rows, 0 without any. plain: of these
    without drafts. prompts: of its prompts; None: of long ones (LONG). steps: those that this one stands for; 0:
    another one stands for it."""

    decode: float
    plain: float
    prompts: float | None
    steps: int


@dataclass(slots=True)
class _Run:
    """Steps of a rest that are alike. The host has little time for each, so they are noted together."""

    shape: Shape
    spent: Spent
    first: float
    """Seconds of the first one, which has the work for what changed in it."""
    steps: int = 0
    """Steps behind it."""
    seconds: float = 0.0
    """Their seconds."""


@dataclass(slots=True)
class Proposal:
    """A sequence's drafter, and the tokens that it proposed last for the positions from `position` on."""

    drafter: Drafter | None
    position: int = 0
    tokens: Sequence[int] = ()

    def renew(self, tokens: Sequence[int], count: int, constraint: Constraint | None) -> None:
        """Propose what a grammar forces, or ask the drafter where it forces nothing; neither if the sequence has
        no more tokens than before. The drafter: None if layers of the model draft."""
        if len(tokens) == self.position:
            return
        self.position = len(tokens)
        self.tokens = () if constraint is None else constraint.forced()[:count]
        if not self.tokens and self.drafter is not None:
            self.tokens = self.drafter.propose(tokens, count)


class NoDrafts:
    """The Drafting of an engine whose rows never have drafts. Instruments may set `costs` and `worth`, to no effect."""

    layers = unsettled = weighs = False
    max_drafts = unseen = 0

    def __init__(self, buckets: Buckets | None = None) -> None:
        self.buckets, self.counts, self.costs = buckets or Buckets((1,), (1,), (1,)), DraftCounts(), None
        self.worth = Worth((1,))

    def write(self, *args: Any, **kwargs: Any) -> None:
        """See Drafting, as of the others."""

    saw = book = spent = write

    def level(self, *args: Any, **kwargs: Any) -> int:
        return 0

    catches_up = launched = level


@dataclass(slots=True)
class Drafting:
    """scheduler.Speculation of an engine.

    buckets: the shapes of its steps. make_drafter: a drafter for a sequence that starts; None: layers of the model
    draft, for every row. Given later, its drafts take the place of those of the layers, which still run (a benchmark
    chooses the acceptance so). costs: of steps; None: drafts cost nothing.

    A proposal covers every position that the next step can reach, because the step before is still under way: up to
    max_drafts + 1 tokens from that one, and max_drafts from the next.
    """

    buckets: Buckets
    make_drafter: Callable[[], Drafter] | None
    costs: StepCosts | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    unseen: int = 0
    """Plain decode steps, the last ones, whose tokens these layers have not seen."""
    rest_until: int = 0
    """See scheduler.Speculation."""
    weighs: bool = False
    """Whether these layers say how sure they are."""
    floor: float = 0.0
    """Of the drafts that layers make after the next step; see Worth.floor."""
    _sent: float = 0.0  # the floor that the device has
    _unsure: int = 0  # choices that have waited, one after the other, for the cost of plain steps
    _under_way: int = 0  # steps with drafts that are not read yet
    _asked: int = 0  # the last step for which drafts were chosen, or none
    _adapters: Set[bytes | None] = frozenset()  # of that step's rows, by their digests
    _rested: float = 0.0  # Spent.plain of that step, which stands for those of the rest; 0: not known
    _brought: int = 0  # tokens of drafts since the last call of `book`
    _collected_at: float = 0.0  # time.monotonic() then
    # Of the steps that were launched: shape and rows of the last, and since when they have its drafts, or are like it.
    _kind: tuple[Shape, int] | None = None
    _level_since: int = 0
    _alike_since: int = 0
    layers: bool = field(init=False)
    """Whether layers of the model draft."""
    places: int = field(init=False)
    """Drafts that layers of the model make of a row after the next step."""
    made: int = 0
    """Drafts that they made after the last step that was launched."""
    lagging: set[int] = field(default_factory=set)
    """Slots whose state lags behind by drafts of their last step (model.States)."""
    unsettled: bool = False
    """Whether the next step may have another shape than the last, though its rows and drafts are the same."""
    chunks: tuple[int, int] = (0, 0)
    """Tokens and rows of the last step's prompts. The next step is expected to have as many."""
    worth: Worth = field(init=False)
    trials: Trials = field(default_factory=Trials)
    _key: Hashable = None  # the adapter whose steps they compare; (): several in a step
    _others: dict[Hashable, Trials] = field(default_factory=dict)
    # Of the last step of a rest, by shape and decode rows.
    _known: tuple[Shape, int, Spent | None] | None = None
    _run: _Run | None = None

    def __post_init__(self) -> None:
        self.worth, self.places = Worth(self.buckets.draft_levels), self.buckets.draft_levels[0]
        self.layers = self.make_drafter is None

    @property
    def max_drafts(self) -> int:
        return self.buckets.max_drafts

    def saw(self, counts: Mapping[tuple[int, int, int], int], adapter: bytes | None = None) -> None:
        """A step with drafts has been read. counts: the number of rows by (drafts, right ones, tokens they brought).
        adapter: the digest of that of these rows."""
        worth: Counter[tuple[int, int]] = Counter()
        for (num_drafts, right, brought), rows in counts.items():
            self.counts.add(num_drafts, right, rows)
            self._brought += rows * brought
            worth[num_drafts, brought] += rows
        self.worth.saw(worth, adapter)

    def catches_up(self, changed: bool) -> bool:
        """Whether layers that draft must see now what they have not seen. They must where the next step has other rows
        or drafts (`changed`), where drafts follow it, and where no more can be kept."""
        found = self.unseen > 0 and (
            changed or self.places > 0 or self.unseen >= kept_tokens(self.buckets.max_tokens)
        )
        self.unseen = 0 if found else self.unseen
        return found

    def spent(self, step: "Step[Sampling]", shape: Shape, plain: Shape) -> Spent | None:
        """The predicted seconds of a step of a shape, which is `plain` without drafts. None: not known yet. Steps of a
        rest that are alike get the same object."""
        costs, num_decode, known = self.costs, step.num_decode, self._known
        if costs is None:
            return None
        rests = self._asked < step.index < self.rest_until
        if rests and known is not None and known[0] is shape and known[1] == num_decode:
            return known[2]
        alone, without = costs.decode(num_decode or 1, 0, (0, 0)), costs.seconds(plain)
        seconds, found = without if shape == plain else costs.seconds(shape), None
        if not (alone is None or without is None or seconds is None):
            prompts: float | None = without - (alone if num_decode else 0.0)
            decode, steps = alone + seconds - without, 0 if rests else max(self.rest_until - step.index, 1)
            if without - alone > LONG * alone:
                level = max(step.drafts.values(), default=1) if shape.drafts else 0
                decode, prompts = costs.decode(num_decode or 1, level, (0, 0)) or decode, None
            found = Spent(decode, alone, prompts, steps) if num_decode else Spent(0.0, 0.0, prompts, steps)
        if not rests:
            self._rested = 0.0 if found is None else found.plain
        self._known = (shape, num_decode, found) if rests else None
        return found

    def book(self, step: "Step[Sampling]", shape: Shape, spent: Spent | None) -> None:
        """Note what a step that was read has cost, and what its drafts brought. spent: when it was launched."""
        now = time.monotonic()
        seconds = now - max(step.launched_at, self._collected_at)
        self._collected_at, run = now, self._run
        if spent is not None and not spent.steps:
            if run is None or run.spent is not spent:
                self._settle()
                self._run = _Run(shape, spent, seconds)
            else:
                run.steps += 1
                run.seconds += seconds
                if run.steps == RUN:
                    self._settle()
            return
        self._settle()
        brought, self._brought = self._brought, 0
        self._under_way -= bool(step.drafts)
        # A plain step beside drafts has host work for them in its time, and they could always be on.
        if self.costs is not None and (shape.drafts or self._level_since < step.index):
            self.costs.took(shape, seconds, self._alike_since < step.index)
        if spent is not None:
            if spent.prompts is not None:
                worth = spent.prompts + spent.plain * (1 + brought / max(step.num_decode, 1))
                self.trials.took(seconds, worth, bool(step.drafts), more=bool(brought or step.joined))
            if spent.plain:
                self.worth.spent(len(step.rows), brought, spent.decode, spent.plain, spent.steps)

    def _settle(self) -> None:
        """Note the steps of a rest since the last call."""
        run, self._run = self._run, None
        if run is None:
            return
        steps, prompts = 1 + run.steps, run.spent.prompts
        if prompts is not None:
            self.trials.took(run.first + run.seconds, steps * (prompts + run.spent.plain), False, steps)
        if run.steps and self.costs is not None:
            self.costs.took(run.shape, run.seconds / run.steps, True, run.steps)

    def launched(self, step: "Step[Sampling]", shape: Shape) -> int:
        """A step is launched. The drafts that layers of the model make after it."""
        kind = shape, len(step.rows)
        if self._kind is None or shape.drafts != self._kind[0].drafts:
            self._level_since = step.index
        if kind != self._kind or step.joined:
            self._alike_since = step.index
        self._kind = kind
        self.made = self.places
        return self.made

    def level(self, step: "Step[Sampling]", may_lag: bool) -> int:
        """The drafts of a step's shape: the most of a row, or 1 if a row must catch up. may_lag: the model has States.
        Called for each step whose rows or drafts have changed, and for a step that follows an unsettled one."""
        most, prompts = max(step.drafts.values(), default=0), step.rows[step.num_decode :]
        self.chunks, self.unsettled = (sum(row.num_tokens for row in prompts), len(prompts)), False
        if may_lag and (most or self.lagging):
            slots = {row.seq.slot for row in step.rows}
            most = most or int(not self.lagging.isdisjoint(slots))
            self.lagging.difference_update(step.left, slots)
            self.lagging.update(seq.slot for seq in step.drafts)
            self.unsettled = most > 0 and not step.drafts  # with drafts the same rows keep the shape
        if step.joined:
            self.worth.joined(len(step.joined) / len(step.rows))
            self.trials.joined()
        left, plain = self.rest_until - step.index - 1, self._rested
        if left > 0 and (step.joined or self._has_others(step)):  # drafts may pay for the rows that go on
            self.rest_until -= left
            if plain and step.index > self._asked:
                self.worth.spent(1, 0, plain, plain, -left)
        return most

    def _has_others(self, step: "Step[Sampling]") -> bool:
        """Whether the rows that go on have other adapters than those for which drafts were chosen."""
        adapters = {row.seq.owner.adapter_digest for row in step.rows if row.emits}
        return bool(adapters) and adapters != self._adapters

    def _compare(self, key: Hashable) -> None:
        """Go on with the Trials of steps whose rows have this adapter. Those of one say nothing about another."""
        if key != self._key:
            self._others[self._key], self._key = self.trials, key
            self.trials = self._others.pop(key, Trials())
            if len(self._others) > ADAPTERS:
                del self._others[next(iter(self._others))]

    def num_drafts(self, view: View) -> "Mapping[Seq[Sampling], int]":
        """See scheduler.Speculation."""
        self._settle()
        rows = len(view.decoding)
        # A right draft saves its part of a step of all rows, those of prompts too, which decode later.
        sharing = rows + self.chunks[1]
        cost, made = self._cost(rows, self.chunks), self.layers and self.made > 0
        self.worth.waiting = made or self._under_way > 0
        adapters = Counter([seq.owner.adapter_digest for seq in view.decoding])
        self._adapters = adapters.keys()
        self._compare(next(iter(adapters)) if len(adapters) == 1 else ())
        most = self.worth.choose({one: [self.max_drafts] * n for one, n in adapters.items()}, sharing, cost)
        if self.layers:
            self.places = most
            self.floor = self.worth.floor(most, adapters, sharing, cost) if self.weighs else 0.0
        self._asked = self.rest_until = view.step
        if not (most or made):
            if not self.worth.waiting:
                rest = self.trials.rest or self.worth.idle(cost)
                if rest and self.chunks[1] and self.trials.drafts:  # it goes on when these prompts have ended
                    rest = self.worth.idle(self._cost(rows, (0, 0)))
                self.rest_until += min(rest, REST)
            return {}  # no drafter is asked
        if self.layers:
            ready = {seq: self._available(seq, self.made) for seq in view.decoding}
            return self._fitting(ready, rows, self.made)
        found = {seq: self._available(seq, self.max_drafts) for seq in view.decoding}
        available: defaultdict[bytes | None, list[int]] = defaultdict(list)
        for seq, count in found.items():
            if count > 0:
                available[seq.owner.adapter_digest].append(count)
        return self._fitting(found, rows, self.worth.choose(available, sharing, cost))

    def _cost(self, rows: int, chunks: tuple[int, int]) -> Callable[[int], float | None]:
        """Seconds of a step by its drafts, for Worth. The part of its prompts is left out. A token that a draft brings
        saves a part of a later decode step, and no part of a prompt."""
        costs = self.costs
        if costs is None:
            return lambda level: 1.0
        if not self.trials.drafts:
            return lambda level: None
        if costs.sure(rows):
            self._unsure = 0
        elif self._unsure < UNSURE:
            self._unsure += 1
            return lambda level: None
        prompts = 0.0
        if chunks[1]:
            alone, beside = costs.decode(rows, 0, chunks=(0, 0)), costs.decode(rows, 0, chunks=chunks)
            if alone is None or beside is None:
                return lambda level: None
            prompts = beside - alone
            if prompts > LONG * alone:
                chunks, prompts = (0, 0), 0.0
        known: dict[int, float | None] = {}

        def cost(level: int) -> float | None:
            if level not in known:  # Worth asks for the same again
                found = costs.decode(rows, level, chunks=chunks)
                known[level] = None if found is None else found - prompts
            return known[level]

        return cost

    def _fitting(
        self, found: "Mapping[Seq[Sampling], int]", rows: int, most: int
    ) -> "dict[Seq[Sampling], int]":
        """At most `most` drafts a row, and room for a prompt's token."""
        wanted: dict[Seq[Sampling], int] = {}
        room = self.buckets.max_tokens - 1 - rows
        for seq, available in found.items():
            count = min(available, most, room)
            if count > 0:
                wanted[seq] = count
                room -= count
        return wanted

    def _available(self, seq: "Seq[Sampling]", most: int) -> int:
        sampling: Sampling = seq.owner
        if sampling.draftless:
            return 0
        if self.layers and self.make_drafter is None and sampling.constraint is None:
            return most
        proposal = sampling.proposal
        if proposal is None:
            drafter = None if self.make_drafter is None else self.make_drafter()
            proposal = sampling.proposal = Proposal(drafter)
        proposal.renew(seq.tokens, 2 * self.max_drafts + 1, sampling.constraint)
        # The tokens of the step under way come first, all of its drafts if they are right.
        left = len(proposal.tokens) - (seq.bound - seq.confirmed)
        return most if self.layers else min(left, most)

    def write(self, rows: Rows, step: "Step[Sampling]") -> None:
        """Write the proposals of the step's rows with drafts. Called for each step that is launched."""
        # It is an estimate, so small changes are not sent.
        if self.weighs and abs(self.floor - self._sent) > 0.1 * self._sent:
            rows.set("draft_floor", 0, self.floor)
            self._sent = self.floor
        if not step.drafts:
            return
        self._under_way += 1
        made = [(seq.slot, seq.owner.proposal) for seq in step.drafts]
        write_drafts(rows, [(slot, one.position, one.tokens) for slot, one in made if one and one.tokens])
