"""Worth: drafts that pay are taken, and drafts that do not pay cost next to nothing, whatever the load and the text."""

from __future__ import annotations

import datetime
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from openinfer.scheduler import InvalidSetup, Worth
from openinfer.scheduler.worth import ADAPTERS

LEVELS = (1, 2, 4)
Cost = Callable[[int, int], float]


def bandwidth(rows: int, drafts: int) -> float:
    """Weights are read once for all tokens, up to 256 of them."""
    return 2.8 + 0.02 * rows * (1 + drafts) if rows * (1 + drafts) < 256 else 0.033 * rows * (1 + drafts)


def compute(rows: int, drafts: int) -> float:
    """Each token costs the same, as on a CPU."""
    return 0.3 + rows * (1 + drafts)


def layered(rows: int, drafts: int) -> float:
    """A head is read for each draft."""
    return bandwidth(rows, drafts) + 0.32 * drafts


def speed(
    cost: Cost,
    rows: int,
    texts: Sequence[float],
    steps: int,
    available: int = 4,
    seed: int = 0,
    delay: int = 1,
) -> float:
    """Time without drafts over time with them, for the same tokens. texts: the chance of a draft in each part of the
    steps. delay: steps that are launched before a chosen number's result is known."""
    rng, worth = random.Random(seed), Worth(LEVELS)
    spent = plain = 0.0
    late = deque[tuple[list[tuple[int, int]], float]]()
    for step in range(steps):
        chance = texts[step * len(texts) // steps]
        level = worth.choose([available] * rows, rows, lambda drafts: cost(rows, drafts))
        if len(late) == delay:
            known, seconds = late.popleft()
            worth.saw(Counter(known))
            worth.spent(rows, sum(accepted for _, accepted in known), seconds, cost(rows, 0))
        taken = min(level, available)
        found = []
        for _ in range(rows if taken else 0):
            right = 0
            while right < taken and rng.random() < chance:
                right += 1
            found.append((taken, right))
        accepted = sum(count for _, count in found)
        late.append((found, cost(rows, level)))
        spent += cost(rows, level)
        plain += cost(rows, 0) * (1 + accepted / rows)
    return plain / spent


TEXTS = ([0.0], [0.2], [0.4], [0.6], [0.8], [0.95], [0.9, 0.0], [0.0, 0.9], [0.9, 0.1] * 6)
TEXTS_OF_TODAY = TEXTS[datetime.date.today().toordinal() % 3 :: 3]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(TEXTS_OF_TODAY, id="of the day"),
        pytest.param(TEXTS, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("cost", [bandwidth, compute, layered])
@pytest.mark.parametrize("rows", [1, 8, pytest.param(32, marks=pytest.mark.slow), 256])
def test_drafts_never_cost_more_than_three_per_cent(
    cost: Cost, rows: int, texts: Sequence[Sequence[float]]
) -> None:
    for text in texts:
        for available in (1, 4):
            assert speed(cost, rows, text, 1200, available) > 0.97, (text, available)


def test_drafts_that_pay_are_taken() -> None:
    assert speed(bandwidth, 1, [0.9], 600) > 3
    assert speed(bandwidth, 8, [0.9], 600) > 2.5
    assert speed(layered, 8, [0.7], 600) > 1.5
    assert speed(compute, 8, [0.9], 600) < 1.01  # they cannot pay there
    assert speed(bandwidth, 8, [0.0, 0.9], 2000) > 1.2  # they are tried again


def test_the_first_trials_leave_room_for_layers_that_draft() -> None:
    """Drafts of layers are made a step before they are verified."""
    for rows in (1, 8, 32):
        assert 0.985 < speed(layered, rows, [0.0], 128, delay=3) < 1.0


def test_a_control_without_books_loses_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openinfer.scheduler.worth.LOSS", 10.0)
    monkeypatch.setattr("openinfer.scheduler.worth.PROBING", 0.5)
    assert speed(compute, 32, [0.1], 600) < 0.9


def test_a_trial_that_brings_tokens_is_repeated_at_once() -> None:
    """So that a text which has become easy is soon drafted again."""
    worth = Worth((1,))
    cost = {0: 1.0, 1: 1.5}.get
    for _ in range(200):
        worth.saw({(1, 0): 1})
        worth.spent(1, 0, 1.5, 1.0)
    plain = 0
    while not worth.choose([1], 1, cost):
        worth.spent(1, 0, 1.0, 1.0)
        plain += 1
    assert 500 < plain < 5000
    worth.saw({(1, 1): 1})
    worth.spent(1, 1, 1.5, 1.0)
    assert worth.choose([1], 1, cost) == 1
    worth.saw({(1, 0): 1})
    worth.spent(1, 0, 1.5, 1.0)
    worth.spent(1, 0, 1.5, 1.0)
    assert worth.choose([1], 1, cost) == 0


def test_the_first_trials_do_not_put_off_the_next_for_long() -> None:
    worth, cost = Worth((1,)), {0: 1.0, 1: 1.3}.get
    waited = [0]
    while len(waited) < 10:
        if worth.choose([1], 1, cost):
            worth.saw({(1, 0): 1})
            worth.spent(1, 0, 1.3, 1.0)
            waited.append(0)
        else:
            worth.spent(1, 0, 1.0, 1.0)
            waited[-1] += 1
    assert waited[:6] == [0] * 6
    assert 400 < max(waited) < 500  # DELAY, and what saves up for a trial


def test_drafts_are_tried_again_when_other_texts_begin() -> None:
    worth, cost = Worth((1,)), {0: 1.0, 1: 1.3}.get
    while worth.choose([1], 1, cost) or worth.idle(cost) < 400:
        if tried := worth.choose([1], 1, cost):
            worth.saw({(1, 0): 1})
        worth.spent(1, 0, cost(tried), 1.0)
    for part, chosen in ((1 / 16, 0), (1.0, 1)):
        worth.joined(part)
        worth.spent(1, 0, 1.0, 1.0)
        assert worth.choose([1], 1, cost) == chosen


@pytest.mark.parametrize(("part", "after"), [(1 / 16, 0.85), (1.0, 0.46)])
def test_new_rows_begin_with_the_same_chances_which_change_sooner(part: float, after: float) -> None:
    worth = taught(base=0.9)
    before = worth.chances[0]
    worth.joined(part)
    assert worth.chances[0] == pytest.approx(before)
    for _ in range(4):
        worth.saw({(1, 0): 1})
    assert worth.chances[0] == pytest.approx(after, abs=0.02)


def test_a_few_wrong_drafts_do_not_stop_those_that_have_paid() -> None:
    worth, cost, wrong = Worth((1,)), {0: 1.0, 1: 1.5}.get, 0
    for _ in range(20):
        worth.saw({(1, 1): 1})
        worth.spent(1, 1, 1.5, 1.0)
    while worth.choose([1], 1, cost):
        worth.spent(1, 0, 1.5, 1.0)
        wrong += 1
    assert wrong == 9  # twice ADVANCE


def test_a_trial_waits_for_the_result_of_the_one_before() -> None:
    worth, cost = Worth((1, 2)), {0: 1.0, 1: 1.3, 2: 1.5}.get
    worth.waiting = True
    assert worth.choose([2], 1, cost) == 0  # the first drafts of all are a trial
    worth.waiting = False
    assert worth.choose([2], 1, cost) == 1
    for _ in range(40):
        worth.saw({(2, 0): 1})
    for _ in range(400):
        worth.spent(1, 0, 1.0, 1.0)
    assert worth.choose([2], 1, cost) == 1
    worth.waiting = True
    assert worth.choose([2], 1, cost) == 0
    for _ in range(40):
        worth.saw({(2, 2): 1})
    assert worth.choose([2], 1, cost) == 2  # they pay


@pytest.mark.parametrize("lost", [0.0, 20.0])
def test_the_steps_until_a_trial_can_be_paid(lost: float) -> None:
    """lost: steps of time that drafts have lost."""
    worth, cost = Worth((1,)), {0: 1.0, 1: 1.5}.get
    for _ in range(100):
        worth.saw({(1, 0): 1})
    for _ in range(1500):
        worth.spent(1, 0, 1.0, 1.0)
    worth.spent(1, 0, 4.0 + lost, 1.0)
    found, steps = worth.idle(cost), 0
    while not worth.choose([1], 1, cost):
        worth.spent(1, 0, 1.0, 1.0)
        steps += 1
    assert found > 100
    assert 0.7 * steps <= found <= steps + 1


def test_a_step_with_drafts_that_seems_short_is_not_taken_for_it() -> None:
    """The step without drafts must run again, so that its cost is corrected."""
    worth = Worth((1, 2))
    for _ in range(200):
        worth.saw({(1, 0): 1})
        worth.spent(1, 0, 1.0, 1.0)
    chosen = 0
    for _ in range(200):
        level = worth.choose([2], 1, {0: 1.5, 1: 1.0, 2: 1.0}.get)
        chosen += level > 0
        worth.spent(1, 0, 1.53 if level else 1.5, 1.5)
    assert chosen < 100


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried only where they seem to pay."""
    monkeypatch.setattr("openinfer.scheduler.worth.START", 0.0)


@pytest.mark.usefixtures("no_start")
def test_a_step_with_drafts_is_believed_to_take_longer_than_one_without() -> None:
    """Half a draft in a step of 64 rows does not pay for the two per cent that it takes at least."""
    worth = Worth((1,))
    assert worth.choose([1], 64, {0: 1.0, 1: 0.9}.get) == 0
    assert worth.choose([1] * 4, 64, {0: 1.0, 1: 0.9}.get) == 1


@pytest.mark.usefixtures("no_start")
def test_drafts_that_bring_what_they_cost_are_left_out() -> None:
    """Of equal rates the fewer drafts: half of these are right."""
    assert Worth((1,)).choose([1], 1, {0: 1.0, 1: 1.5}.get) == 0
    assert Worth((1,)).choose([1], 1, {0: 1.0, 1: 1.4375}.get) == 1


def test_trials_end_where_the_step_without_drafts_seems_long() -> None:
    """With a recurrent state the step after one with drafts has their shape. So trials in a row would keep the step
    without drafts from being run and corrected."""
    worth = Worth((1,))
    for _ in range(30):
        worth.saw({(1, 0): 1})
    plain, after_drafts = 0, False
    for _ in range(200):
        drafts = bool(worth.choose([1], 1, {0: 1.5, 1: 1.4}.get))
        worth.spent(1, 0, 1.4 if drafts or after_drafts else 1.5, 1.5)
        plain += not (drafts or after_drafts)
        after_drafts = drafts
    assert plain > 150


def test_a_step_of_an_unknown_cost_is_tried_once_the_plain_one_is_known() -> None:
    worth, known = Worth((1, 3)), dict[int, float]()
    assert worth.choose([3], 1, known.get) == 0
    known[0] = 1.0
    assert worth.choose([3], 1, known.get) == 1
    known[1] = 1.1
    assert worth.choose([3], 1, known.get) == 1  # first one draft, until its result is known
    worth.saw({(1, 1): 1})
    assert worth.choose([3], 1, known.get) == 3
    assert worth.choose([1], 1, known.get) == 1  # no row has three
    assert worth.choose([], 1, known.get) == 0


def test_steps_of_a_rest_count_as_many() -> None:
    one, other = Worth((1,)), Worth((1,))
    for worth in (one, other):
        worth.spent(1, 0, 2.0, 1.0)
    for _ in range(16):
        one.spent(1, 0, 1.0, 1.0)
    other.spent(1, 0, 1.0, 1.0, 16)
    for name in ("_time", "_loss", "_credit"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.02), name


def test_more_drafts_of_an_unknown_cost_are_tried_where_they_would_pay() -> None:
    """As if each draft cost what the first does."""
    worth = Worth((1, 2))
    for _ in range(64):
        worth.saw({(1, 1): 9, (1, 0): 1})
    assert worth.choose([2], 1, {0: 1.0, 1: 1.3}.get) == 2
    assert worth.choose([2], 1, {0: 1.0, 1: 1.9}.get) == 0
    for _ in range(64):
        worth.saw({(1, 1): 1, (1, 0): 1})
    assert worth.choose([2], 1, {0: 1.0, 1: 1.4}.get) == 1


def test_a_chance_is_of_drafts_that_follow_accepted_ones() -> None:
    worth = Worth((3,))
    for _ in range(200):
        worth.saw({(3, 1): 1})
    first, second, third = worth.chances
    assert first > 0.95
    assert second < 0.05
    assert third == pytest.approx(second)  # never tried


def test_a_draft_that_failed_early_is_tried_again_while_those_before_it_are_right() -> None:
    worth = Worth((1, 2))
    for _ in range(20):
        worth.saw({(2, 1): 1})
    costs = {0: 1.0, 1: 1.2, 2: 1.4}.get
    assert worth.choose([2], 1, costs) == 1
    steps = 0
    while worth.choose([2], 1, costs) == 1 and steps < 5000:
        worth.saw({(1, 1): 1})
        steps += 1
    assert 200 < steps < 1000


@pytest.mark.parametrize("levels", [(), (0, 1), (2, 1), (1, 1)])
def test_impossible_levels_are_refused(levels: Sequence[int]) -> None:
    with pytest.raises(InvalidSetup, match="ascending"):
        Worth(levels)


def test_a_draft_is_worth_its_place_above_a_chance() -> None:
    """Two rows in a step of four: its drafts take a quarter of its time, and bring what the rest brings in theirs."""
    worth, times = Worth((1, 2)), {0: 3.0, 1: 3.5, 2: 4.0}
    assert worth.floor(2, 2, 4, times.get) == pytest.approx((4 + 2 * (0.5 + 0.25)) / 4.0 * 1.0 / 4)
    assert worth.floor(2, 2, 4, {0: 3.0, 2: 2.9}.get) == 0  # they cost nothing
    assert (
        worth.floor(0, 2, 4, times.get)
        == worth.floor(2, 2, 4, {0: 1.0}.get)
        == worth.floor(1, 0, 4, times.get)
        == 0
    )


def taught(**chances: float) -> Worth:
    """By adapter, or `base`: of ten rows, how many had right drafts."""
    worth = Worth((1, 2, 4))
    for adapter, chance in chances.items():
        for _ in range(100):
            right = round(10 * chance)
            counts = {(4, 4): right, (4, 0): 10 - right}
            worth.saw(counts, None if adapter == "base" else adapter)
    return worth


def test_rows_count_with_the_chances_of_their_adapter() -> None:
    worth, costs = taught(base=0.5, good=0.9, poor=0.0), {0: 1.0, 1: 1.4, 2: 1.5, 4: 1.7}.get
    for _ in range(2):  # what one taught is no other's
        assert worth.choose({"good": [4]}, 1, costs) == 4
        assert worth.choose({"poor": [4]}, 1, costs) == 0
    assert worth.choose({"good": [4] * 7, "poor": [4]}, 8, costs) == 4
    assert worth.choose({"good": [1] * 7, "poor": [4]}, 8, costs) == 1  # four drafts of the other are wrong
    assert worth.choose({"good": [4], "poor": [4] * 7}, 8, costs) == 0
    few, many = (worth.floor(4, {"good": n, "poor": 8 - n}, 8, costs) for n in (1, 7))
    assert 0 < few < many < worth.floor(4, {"good": 8}, 8, costs)


def test_an_adapter_begins_with_the_chances_of_the_model() -> None:
    worth = taught(base=0.9)
    for _ in range(100):
        worth.saw({(4, 1): 1})  # a second draft is wrong
    assert worth.chances_of("new") == pytest.approx(worth.chances)
    for _ in range(9):
        worth.saw({(1, 0): 1}, "new")
    assert worth.chances_of("new")[0] < 0.3 < 0.9 < worth.chances[0]
    for _ in range(50):
        worth.saw({(1, 1): 1}, "new")
    assert worth.chances_of("new")[0] > 0.9
    assert worth.chances_of("new")[1] == pytest.approx(worth.chances[1], rel=0.1)


def test_a_new_adapter_is_tried_at_once_and_another_is_not() -> None:
    """While few of its rows were tried, though the model's drafts and those of others do not pay."""
    worth, costs = taught(base=0.0, poor=0.0), {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.0}.get
    worth.spent(1, 0, 1.3, 1.0)
    assert worth.choose({"poor": [4]}, 1, costs) == worth.choose([4], 1, costs) == 0
    tried = 0
    while worth.choose({"new": [4], "poor": [4]}, 2, costs):
        worth.saw({(1, 0): 1}, "new")
        worth.spent(2, 0, 1.3, 1.0)
        tried += 1
    assert 4 < tried < 10
    for adapter in range(100):  # all draw on the same credit
        lost = 0
        while worth.choose({adapter: [4]}, 1, costs):
            worth.spent(1, 0, 1.3, 1.0)
            lost += 1
        assert lost <= 7 * (adapter == 0)


def test_the_chances_of_the_adapters_used_last_are_kept() -> None:
    worth = taught(base=0.5, kept=0.9, gone=0.9)
    for adapter in range(ADAPTERS - 1):
        worth.saw({(1, 0): 1}, adapter)
        worth.choose({"kept": [4]}, 1, {0: 1.0, 1: 1.4}.get)
    assert worth.chances_of("kept")[0] > 0.85
    assert worth.chances_of("gone") == pytest.approx(worth.chances)
    for adapter in range(3 * ADAPTERS):
        worth.chances_of(adapter)
    assert len(worth._adapters) == ADAPTERS


def test_steps_of_a_rest_that_did_not_run_are_taken_back() -> None:
    one, other = Worth((1,)), Worth((1,))
    for worth, steps in ((one, (64, -56)), (other, (8,))):
        worth.spent(1, 0, 2.0, 1.0)
        for count in steps:
            worth.spent(1, 0, 1.0, 1.0, count)
    for name in ("_loss", "_credit"):
        assert getattr(one, name) == pytest.approx(getattr(other, name)), name
    assert one._time == pytest.approx(other._time, abs=4)
