"""What the choice of drafts costs where they do not pay: counts of steps, at the step times of an H200 on a clock of
their own."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from openinfer.graph import Buckets, StepCosts, StepPace
from openinfer.graph.runner import Drafting, Sampling
from openinfer.graph.runner.trials import Trials
from openinfer.kernels.testing import of_the_day
from openinfer.sampler import SamplingParams
from openinfer.scheduler import Row, Seq, Step

FIELDS = SimpleNamespace(width=lambda name: 16, scatter=lambda *args: None)


@dataclass(frozen=True)
class Times:
    """Microseconds. decode: of steps by drafts. layers: what layers take after a step to make so many drafts; with 0
    they write keys. late: to see the tokens of many steps. prompt: of a chunk beside decode rows. host: of the host
    for a step by its drafts; join: for a row that joins, and where the step's shape has drafts; the device may have
    nothing to do meanwhile. predicted: of decode steps by drafts, and of a chunk. wide: what the prediction adds to a
    chunk in a step with drafts, beyond what they take."""

    decode: tuple[int, ...]
    layers: tuple[int, ...]
    late: int
    prompt: int = 0
    host: tuple[int, ...] = (0, 0, 0)
    join: tuple[int, int] = (0, 0)
    predicted: tuple[int, ...] = ()
    wide: int = 0


DEMO_QWEN = Times((191, 331, 358), (17, 52, 98), 26)  # 32 rows
DEMO_V4 = Times((320, 450, 550), (25, 60, 120), 32)
SHORT_TEXTS = Times((150, 240, 310), (16, 47, 92), 20, prompt=250)  # 8 rows of Qwen3.5's demo
# The same where the host takes longer than the device.
SLOW_HOST = {
    1: Times((100, 190, 230), (12, 40, 80), 16, 100, host=(119, 250, 330), predicted=(115, 214, 309, 150)),
    8: Times((120, 220, 250), (16, 47, 90), 20, 100, host=(150, 287, 357), predicted=(178, 307, 412, 300)),
}


@dataclass
class Device:
    """A runner of `rows` sequences: two steps in flight, layers that draft, states that lag where `lags`. right: the
    chance of the first, the second, ... draft. length: of a text, after which the row gets the next prompt. queue:
    sequences whose prompts are computed one after the other, each in a step. rights: in the place of `right`, by
    adapter."""

    rows: int
    times: Times
    lags: bool = True
    right: tuple[float, ...] = (0.0, 0.0)
    length: int = 1 << 40
    drafts: bool = True
    seed: int = 0
    now: float = 0.0
    busy: float = 0.0  # until then
    tokens: int = 0
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    queue: list[Seq] = field(default_factory=list)
    rights: dict[bytes, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self):
        self.rng, self.flight = np.random.default_rng(self.seed), deque()
        self.seqs = [Seq(n, [1], 10, owner=Sampling(SamplingParams(), 0, ())) for n in range(self.rows)]
        for slot, seq in enumerate(self.seqs, 1):
            seq.slot = slot
        self.left = {seq: int(self.rng.integers(1, min(self.length, 1 << 20) + 1)) for seq in self.seqs}
        self.prompts, self.last = [], None
        most, pace = len(self.times.layers) - 1, StepPace()
        buckets = Buckets.up_to(self.rows, 256, (self.rows,), most)
        if self.times.predicted:
            pace.predictions = {shape: self.prediction(shape) for shape in buckets.segments()}
        self.drafting = Drafting(buckets, None, StepCosts(buckets, pace))
        if not self.drafts:
            self.drafting.worth.choose, self.drafting.places = lambda *args: 0, 0

    def prediction(self, shape):
        found = self.times.predicted[shape.drafts] / 1e6
        chunk = self.times.predicted[-1] + (self.times.wide if shape.drafts else 0)
        found += (shape.longest != 1 + shape.drafts) * chunk / 1e6
        return SimpleNamespace(seconds=lambda kv_tokens, qk_pairs: found)

    def run(self, steps):
        """Microseconds of a token of each row."""
        now, tokens = self.now, self.tokens
        for _ in range(steps):
            self.launch_and_read()
        return (self.now - now) / (self.tokens - tokens) * self.rows

    def launch_and_read(self):
        self.launch()
        if len(self.flight) == 2:
            self.read()
        while self.flight and self.flight[0][-1] <= self.now:
            self.read()

    def launch(self):
        self.step += 1
        drafting, times, drafts = self.drafting, self.times, {}
        self.prompts += [self.queue.pop(0)] if self.queue else []
        others = {*self.prompts, *self.queue}
        decoding = [seq for seq in self.seqs if seq not in others] if others else self.seqs
        if decoding and self.step >= drafting.rest_until:
            self.counts["asked"] += 1
            drafts = drafting.num_drafts(SimpleNamespace(decoding=decoding, step=self.step))
        rows = [Row(seq, 1 + drafts.get(seq, 0), True, None) for seq in decoding]
        rows += [Row(seq, 16, True, 0) for seq in self.prompts]
        changed, self.last = (drafts, self.prompts) != self.last, (drafts, self.prompts)
        step = Step(self.step, rows, changed, len(decoding), (), self.prompts, (), drafts, self.now / 1e6)
        self.now += times.host[max(drafts.values(), default=0)]
        late = drafting.catches_up(changed or drafting.unsettled)
        if changed or drafting.unsettled:
            total, chunks = sum(row.num_tokens for row in rows), bool(self.prompts)
            choose, most = drafting.buckets.choose, drafting.level(step, self.lags)
            self.shape = choose(total, len(rows), drafts=most, chunks=chunks)
            self.plain = choose(total - sum(drafts.values()), len(rows)) if most else self.shape
        self.now += times.join[bool(self.shape.drafts)] * len(self.prompts)
        drafting.write(FIELDS, step)
        level = 2 if self.prompts and self.shape.drafts else self.shape.drafts
        places, spent = drafting.launched(step, self.shape), drafting.spent(step, self.shape, self.plain)
        self.busy = max(self.busy, self.now) + times.decode[level] + late * times.late
        self.busy += len(self.prompts) * times.prompt
        self.flight.append((step, self.shape, spent, self.busy))
        if places or level or self.prompts:
            self.busy += times.layers[places]
        else:
            drafting.unseen += 1
        self.counts.update(late=late, drafting=bool(drafts), wide=bool(level))
        self.prompts = []

    def read(self):
        step, shape, spent, done = self.flight.popleft()
        self.now = max(self.now, done)
        counts, waiting = (
            defaultdict(Counter),
            {row.seq for flown in self.flight for row in flown[0].rows[flown[0].num_decode :]},
        )
        for row in step.rows:
            drafts, right = row.num_tokens - 1 if row.start is None else 0, 0
            adapter = row.seq.owner.adapter
            chances = self.right if adapter is None else self.rights[adapter.digest]
            if row.seq in waiting or self.left[row.seq] <= 0:
                continue
            while right < drafts and self.rng.random() < chances[right]:
                right += 1
            brought = min(right, self.left[row.seq] - 1)
            self.tokens += 1 + brought
            self.left[row.seq] -= 1 + brought
            if drafts:
                counts[row.seq.owner.adapter_digest][drafts, right, brought] += 1
            if not self.left[row.seq]:
                spread = self.length // 2 if self.length < 1 << 20 else 0
                self.left[row.seq] = self.length + int(self.rng.integers(-spread, spread + 1))
                self.prompts.append(row.seq)
        if step.drafts:
            for adapter, of_rows in counts.items():
                self.drafting.saw(of_rows, adapter)
        self.drafting.book(step, shape, spent)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of the device that is made last."""
    devices, made = [], Device.__post_init__
    monkeypatch.setattr(Device, "__post_init__", lambda self: (devices.append(self), made(self))[1])
    at = SimpleNamespace(monotonic=lambda: devices[-1].now / 1e6)
    monkeypatch.setattr("openinfer.graph.runner.drafting.time", at)


@pytest.mark.parametrize(("times", "lags"), [(DEMO_QWEN, True), (DEMO_V4, False)])
def test_where_nothing_is_accepted_few_steps_are_more_than_plain(times, lags):
    device = Device(32, times, lags)
    for drafting, wide, asked in ((8, 12, 60), (5, 6, 40), (5, 6, 40)):
        device.counts.clear()
        assert device.run(1024) < 1.015 * times.decode[0]
        assert 0 < device.counts["drafting"] <= drafting
        assert device.counts["wide"] <= wide
        assert device.counts["asked"] <= asked  # the choice takes host time
        assert device.counts["late"] <= 38


def test_texts_of_a_few_tokens_are_hardly_slower_with_drafts():
    """Nearly every step has a prompt. Beside it drafts bring a larger part of the step's tokens, and save no more."""
    shared = {"right": (0.97, 0.7), "length": 17}
    times = [Device(8, SHORT_TEXTS, drafts=drafts, **shared).run(3000) for drafts in (False, True)]
    assert times[1] < 1.03 * times[0]
    always = Device(8, SHORT_TEXTS, **shared)
    always.drafting.worth.choose = lambda *args: 2
    assert always.run(3000) > 1.06 * times[0]


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize(
    ("rows", "length", "join"), of_the_day([(8, 17, 0), (1, 17, 0), (8, 17, 150), (1, 33, 300), (8, 33, 150)])
)  # fmt: skip
def test_work_of_the_host_for_other_steps_is_not_taken_for_the_cost_of_plain_ones(
    rows, length, join, predicted
):
    """The host prepares the next step while one runs, and plain steps among plain ones are rare here."""
    times = replace(SLOW_HOST[rows], join=(join, join), **{} if predicted else {"predicted": ()})
    lost = np.zeros(2)  # one run or another falls into a bad spell
    for seed in range(4):
        runs = []
        for drafts in (False, True):
            device = Device(rows, times, right=(0.97, 0.7), length=length, drafts=drafts, seed=seed)
            runs.append(np.array([device.run(1500) for _ in range(2)]))
        assert device.counts["drafting"] > 0
        lost += (runs[1] / runs[0] - 1) / 4
    assert max(lost) < 0.03


NO_TRIALS = SimpleNamespace(took=lambda *args, **more: None, joined=lambda: None, drafts=True, rest=0)


def us_of_a_token(times, trials=None, **options):
    device = Device(1, times, right=(0.98, 0.6), **options)
    device.drafting.trials = trials or device.drafting.trials
    device.run(2000)
    return device.run(3000)


@pytest.mark.parametrize(("join", "lost"), [(600, 1.04), (1200, 1.2)])
def test_what_drafts_cost_where_rows_join_is_seen(join, lost):
    """The steps with drafts seem to pay by themselves."""
    times = Times((114, 160, 200), (12, 40, 80), 16, 100, (100, 150, 160), (300, join), (114, 160, 200, 150))
    off = us_of_a_token(times, length=22, drafts=False)
    assert us_of_a_token(times, length=22) < 1.02 * off
    assert us_of_a_token(times, NO_TRIALS, length=22) > lost * off


def test_trials_hardly_slow_drafts_that_pay():
    times = Times((114, 150, 180), (12, 40, 80), 16, 100, (100, 150, 160), (300, 300), (114, 150, 180, 150))
    off, on = (us_of_a_token(times, length=200, drafts=drafts) for drafts in (False, True))
    assert on < 0.88 * off
    assert on < 1.01 * us_of_a_token(times, NO_TRIALS, length=200)


def of_three(plain, draft, layer):
    """Times of a model with at most three drafts, each of which makes the step longer, and the layers behind it."""
    decode, layers = [plain + draft * n for n in range(4)], [30, *(layer * n for n in (1, 2, 3))]
    predicted = (plain, *(a + b for a, b in zip(decode[1:], layers[1:], strict=True)), plain)
    return Times(tuple(decode), tuple(layers), 60, plain, (200,) * 4, (300, 300), predicted)


PUBLISHED = {  # one H200, bf16, 8,192 tokens: a dense model, a mixture
    "27B, 1 row": (1, of_three(13020, 250, 1440)),
    "27B, 16 rows": (16, of_three(17600, 200, 400)),
    "35B-A3B, 1 row": (1, of_three(3520, 600, 400)),
    "35B-A3B, 16 rows": (16, of_three(10200, 800, 400)),
}


def forced(device, level):
    """The device, with so many drafts in all steps."""
    device.drafting.trials, device.drafting.places = NO_TRIALS, level
    device.drafting.worth.choose = lambda *args: level
    return device


def us_of_a_first_answer(rows, times, chance, fixed=None):
    """Of 200 tokens by an engine that has just started, in the mean. fixed: always so many drafts."""
    found = []
    for seed in range(12 if rows == 1 else 2):
        device = Device(rows, times, right=(chance,) * 3, length=200, seed=seed)
        device.left = dict.fromkeys(device.seqs, 200)
        if fixed is not None:
            forced(device, fixed)
        while device.tokens < 200 * rows:
            device.launch_and_read()
        found.append(device.now / device.tokens * rows)
    return sum(found) / len(found)


@pytest.mark.parametrize("chance", of_the_day([0.0, 0.6, 0.8, 0.95], 2))
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_drafts_is_found_within_the_first_answer(name, chance):
    rows, times = PUBLISHED[name]
    best = min(us_of_a_first_answer(rows, times, chance, fixed) for fixed in range(4))
    assert best > (0.95 if chance else 0.97) * us_of_a_first_answer(rows, times, chance)


def dear(steps, predicted):
    """Times of a mixture in which a draft costs much, and more than that by the prediction."""
    layers = (30, 400, 800, 1200)
    decode = (steps[0], *(a - b for a, b in zip(steps[1:], layers[1:], strict=True)))
    return Times(decode, layers, 60, steps[0], (200,) * 4, (300, 300), (*predicted, steps[0]))


MIXTURE = {  # 35B-A3B with 1,024 tokens, by rows
    1: dear((2750, 3930, 4790, 5660), (2610, 4350, 5210, 6140)),
    16: dear((9280, 12280, 16470, 18130), (9610, 16400, 19960, 22570)),
}


@pytest.mark.parametrize("chance", [0.0, 0.8, 0.95])
@pytest.mark.parametrize("rows", MIXTURE)
def test_drafts_that_seem_too_dear_are_tried_within_the_first_answer(rows, chance, monkeypatch):
    times = MIXTURE[rows]
    best = min(us_of_a_first_answer(rows, times, chance, fixed) for fixed in range(4))
    assert best > (0.93 if chance else 0.97) * us_of_a_first_answer(rows, times, chance)
    if chance:
        monkeypatch.setattr("openinfer.scheduler.worth.START", 0.0)
        assert best < 0.75 * us_of_a_first_answer(rows, times, chance)


def test_a_control_that_tries_the_other_way_at_once_does_not_find_it(monkeypatch):
    monkeypatch.setattr("openinfer.graph.runner.trials.CLEAR", 0.0)
    rows, times = PUBLISHED["27B, 1 row"]
    assert us_of_a_first_answer(rows, times, 0.95, 3) < 0.9 * us_of_a_first_answer(rows, times, 0.95)


def us_of_answers(device, chance):
    """Of answers of 200 tokens to prompts of which each is a step of its own, from when all have begun."""
    device.left, device.queue = dict.fromkeys(device.seqs, 1 << 30), [*device.seqs]
    device.right = (chance,) * 3
    while device.queue:
        device.launch_and_read()
    now, tokens = device.now, device.tokens
    while device.tokens < tokens + 200 * device.rows:
        device.launch_and_read()
    return (device.now - now) / (device.tokens - tokens) * device.rows


PROMPTS = {"prompt": 691_000, "wide": 38_700}  # of 8,192 tokens: forty decode steps


@pytest.mark.parametrize("chance", [0.0, 0.6, 0.8, 0.95])
def test_long_prompts_do_not_hide_what_drafts_bring(chance):
    """Neither in the cost of drafts nor in spans, and no rest that begins beside a prompt goes on after it."""
    rows, times = PUBLISHED["27B, 16 rows"]
    times = replace(times, predicted=(*times.predicted[:-1], 666_000), **PROMPTS)
    fixed = [forced(Device(rows, times), level) for level in range(4)]
    best, device = min(us_of_answers(device, chance) for device in fixed), Device(rows, times)
    for _ in range(2):  # what the first requests taught serves the next
        assert best > (0.95 if chance else 0.98) * us_of_answers(device, chance)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_whose_drafts_are_wrong_does_not_hide_that_the_next_ones_are_right(name):
    """In the mean, with what the first one taught."""
    (rows, times), ratios = PUBLISHED[name], []
    for seed in range(6 if rows == 1 else 2):
        fixed = [forced(Device(rows, times, seed=seed), level) for level in range(4)]
        device, plain = Device(rows, times, seed=seed), fixed[0]
        assert us_of_answers(plain, 0.0) > 0.97 * us_of_answers(device, 0.0)
        ratios.append(min(us_of_answers(one, 0.8) for one in fixed) / us_of_answers(device, 0.8))
    assert sum(ratios) / len(ratios) > 0.88


def test_wrong_drafts_of_one_text_are_no_verdict_on_the_next(monkeypatch):
    """On a new engine, whose steps with drafts take longer than predicted."""
    rows, times = PUBLISHED["27B, 1 row"]
    plain, *with_drafts, prompt = times.predicted
    times = replace(times, predicted=(plain, *(0.85 * us for us in with_drafts), prompt))

    def us_of_the_second(device):
        us_of_answers(device, 0.0)
        return us_of_answers(device, 0.8)

    best = us_of_the_second(forced(Device(rows, times), 3))
    assert best > 0.85 * us_of_the_second(Device(rows, times))
    monkeypatch.setattr(Trials, "joined", lambda trials: None)
    assert best < 0.55 * us_of_the_second(Device(rows, times))


def us_by_turn(name, turns, fixed=None):
    """Of answers of rows with these adapters, one after the other in a turn's rows, loaded anew in each turn."""
    (rows, times), found = PUBLISHED[name], []
    for seed in range(2 if PUBLISHED[name][0] > 1 else 6):
        device = Device(rows, times, seed=seed, rights={b"good": (0.9,) * 3, b"poor": (0.05,) * 3})
        if fixed is not None:
            forced(device, fixed)
        found.append([])
        for turn in turns:
            for seq, digest in zip(device.seqs, turn * rows, strict=False):
                seq.owner.adapter = digest and SimpleNamespace(digest=digest)
            found[-1].append(us_of_answers(device, 0.9))
    return np.sum(found, axis=0)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("27B, 16 rows", [[b"poor"], [b"good"]]),
        ("35B-A3B, 16 rows", [[b"poor"], [b"good"]]),
        ("35B-A3B, 16 rows", [[b"good", b"poor"], [b"poor"], [b"poor"] * 3 + [b"good"]]),
        ("35B-A3B, 1 row", [[None], [b"poor"]]),
    ],
)
def test_each_adapter_has_the_drafts_that_pay_for_it(name, turns):
    """Whatever others taught: chances, that drafts do not pay, and how long to rest."""
    best = np.min([us_by_turn(name, turns * 3, fixed) for fixed in range(4)], axis=0)
    assert min(best / us_by_turn(name, turns * 3)) > 0.95
