"""Worth: how many drafts pay, by the cost of the step and by how often drafts were accepted."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from .errors import InvalidSetup

PRIOR = 0.5
"""The chance of a row's first draft before one was seen. The first trials are under way before their results are
known, so a higher chance costs more where drafts are wrong."""
REMEMBERED = 64
"""Tried rows over which a chance is averaged."""
FORGOTTEN = 256
"""Rows with fewer drafts over which a chance is forgotten. A few early failures would keep rows from it for ever."""
LIKE_BEFORE = 3.0
"""Rows that have to contradict before a draft's chance is halfway between that of the draft before it and its own."""
FEW = 2 * LIKE_BEFORE
"""Tried rows below which START counts."""
PROBING = 0.002
"""The part of the time that may be lost on drafts that do not pay, because the text may have changed."""
DELAY = 300
"""The most steps by which losses put off the next trial. The first trials would put it off by a thousand, for a text
that may have changed."""
START = 2.0
"""Plain steps of time that trials may lose while few rows were tried, and again where all rows are new. Where the first
draft of one row is wrong, or a cost is predicted too high, drafts are tried again within the first answer. A new answer
may be of another text."""
LOSS = 0.012
"""The part of the time that drafts may lose."""
STEPS = 1024
"""Steps over which losses are counted."""
CHEAPEST = 1.02
"""The least ratio of a step with drafts to a step without that is believed. Where the ratio seems smaller, the estimate
of the step without drafts is too high. Only running such steps corrects it."""
LEAST = 0.1
"""Drafts of which the last is accepted less often are not tried: its gain is lost in the noise of the costs."""
ADVANCE = 150
"""Steps of time that losses may draw on at the start."""
ADAPTERS = 256
"""Adapters (LoRA) of which something is kept, those used last. No step has so many."""
Available = Mapping[Any, Sequence[int]]
"""By the adapter of rows."""
Cost = Callable[[int], float | None]
"""Seconds of a step with this number of drafts a row; None: not known yet."""


class Worth:
    """Chooses the number of drafts that brings most tokens a second, and keeps books of what drafts lose.

    Drafts are tried out, and chances and costs are estimates. So drafts can lose time: a step with drafts takes longer
    than a step without, and may bring no more tokens. The books count the difference. While drafts have lost more than
    LOSS of the time of the last STEPS steps, no row has any.

    Chances are known by adapter (LoRA), because drafts that are right for the model may be wrong for an adapter of it.
    Its digest, for example, names it: what it taught lasts while it is unloaded. None: the model without adapters.

    levels: the numbers of drafts to choose from, ascending, from 1 on. Raises InvalidSetup for others.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        if not levels or levels[0] < 1 or list(levels) != sorted(set(levels)):
            raise InvalidSetup(f"levels {list(levels)}: give numbers from 1 on, ascending")
        self._levels = tuple(levels)
        self._base = [0.0] * levels[-1], [0.0] * levels[-1]  # rows by place, the last ones: tried, and right
        self._prior = PRIOR  # the chance before new rows
        self._adapters: dict[Hashable, tuple[list[float], list[float]]] = {}  # the one used last is last
        self._asked = [self._base]  # of those that drafts were last chosen for
        self._time = self._loss = 0.0
        self._credit = 0.0  # seconds that trials of drafts may lose
        self._new = 0.0  # the part of the rows that joined since a step was booked
        self.waiting = False
        """Whether drafts are under way whose result is not known. No trial begins then, so one step is a trial."""

    @property
    def chances(self) -> Sequence[float]:
        """The chance of the first, second, ... draft of a row, where those before it are accepted. One that was hardly
        tried is about as likely as the one before it."""
        return self.chances_of(None)

    def chances_of(self, adapter: Hashable) -> Sequence[float]:
        """As `chances`, of rows with an adapter. Drafts that were hardly tried follow the chances of the model without:
        the first has its, and a later one falls from the one before it as there."""
        base = [self._prior] * self._levels[-1] if adapter is None else self.chances
        before, chance, found = base[0], base[0], list[float]()
        for tried, right, like in zip(*self._of(adapter), base, strict=True):
            chance = (right + LIKE_BEFORE * min(chance * like / before, 1.0)) / (tried + LIKE_BEFORE)
            before = like
            found.append(chance)
        return found

    def _of(self, adapter: Hashable) -> tuple[list[float], list[float]]:
        if adapter is None:
            return self._base
        none = [0.0] * self._levels[-1]
        found = self._adapters[adapter] = self._adapters.pop(adapter, (none, none.copy()))
        if len(self._adapters) > ADAPTERS:
            del self._adapters[next(iter(self._adapters))]
        return found

    def choose(self, available: Sequence[int] | Available, rows: int, cost: Cost) -> int:
        """The most drafts of a row in the next step, 0 or a level.

        available: drafts that each row with any could have. Rows have no fewer for their adapter, because that makes no
        step shorter. rows: all rows of the step, those of prompts too. A step of an unknown cost is taken, so that the
        cost gets known. Above the first level it must pay if each draft costs what it costs at the level before, which
        must have been tried.
        """
        plain = cost(0)
        if not available or plain is None or self._overdrawn(plain) > 0:
            return 0
        groups = available if isinstance(available, Mapping) else {None: available}
        self._asked = [self._of(adapter) for adapter in groups]
        tried = [max(places) for places in zip(*(of[0] for of in (self._base, *self._asked)), strict=True)]
        found = [(counts, self.chances_of(adapter)) for adapter, counts in groups.items()]
        best, best_rate, draft, before = 0, rows / plain, 0.0, 0
        for level in self._levels:
            likely = max(math.prod(chances[:level]) for _, chances in found)
            if likely < LEAST or (before and not tried[before - 1]):
                break
            before = level
            known = cost(level)
            if known is None and level == self._levels[0]:
                return level
            seconds = max(plain + level * draft if known is None else known, CHEAPEST * plain)
            rate = (rows + sum(_expected(counts, chances[:level]) for counts, chances in found)) / seconds
            if rate > best_rate:
                best, best_rate = level, rate
            draft = (seconds - plain) / level
            if level >= max(map(max, groups.values())):
                break
        if self.waiting and not (best and tried[0]):
            return 0
        return best or (self._levels[0] if self._short_of(plain, cost) <= 0 else 0)

    def floor(self, level: int, decoding: int | Mapping[Any, int], rows: int, cost: Cost) -> float:
        """The chance of a draft, if those before it are right, below which it is not worth its place in a step of
        `level` drafts a row: it brings fewer tokens than the step as a whole in the time of its token. decoding: rows
        with drafts, by adapter if rows have one. rows, cost: see choose."""
        plain, seconds = cost(0), cost(level)
        if not level or not decoding or plain is None or seconds is None:
            return 0.0
        counts = decoding if isinstance(decoding, Mapping) else {None: decoding}
        brings = rows + sum(_expected([level] * n, self.chances_of(one)[:level]) for one, n in counts.items())
        return max(brings / seconds * (seconds - plain) / (level * sum(counts.values())), 0.0)

    def idle(self, cost: Cost) -> int:
        """After `choose` has answered 0 with no drafts under way: about how many steps without drafts until its answer
        can be another. cost: see choose."""
        plain = cost(0)
        if plain is None:
            return 0
        overdrawn, short = self._overdrawn(plain) / plain, self._short_of(plain, cost) / plain
        if overdrawn > 0:  # both the loss and the time that it is a part of fade
            return math.ceil(STEPS * math.log1p(overdrawn / (LOSS * (STEPS + ADVANCE))))
        return max(math.ceil(short / PROBING), 0)

    def _overdrawn(self, plain: float) -> float:
        """Seconds by which drafts have lost more than they may."""
        return self._loss - LOSS * (self._time + ADVANCE * plain)

    def _short_of(self, plain: float, cost: Cost) -> float:
        """Seconds by which a trial of the first level costs more than the credit; 0 where its cost is not known."""
        least, credit = cost(self._levels[0]), self._credit
        if self._few:
            credit += START * plain
        return 0.0 if least is None else max(least, CHEAPEST * plain) - plain - credit

    @property
    def _few(self) -> bool:
        return any(tried[0] < FEW for tried, _ in self._asked)

    def saw(self, counts: Mapping[tuple[int, int], int], adapter: Hashable = None) -> None:
        """Rows had drafts. counts: of rows by (drafts, accepted ones). A draft counts after accepted ones only."""
        drafted, found = sum(rows for (drafts, _), rows in counts.items() if drafts), self._of(adapter)
        for place in range(self._levels[-1]):
            tried = sum(rows for (drafts, right), rows in counts.items() if place < drafts and place <= right)
            accepted = sum(rows for (_, right), rows in counts.items() if place < right)
            kept = REMEMBERED / (REMEMBERED + tried) if tried else FORGOTTEN / (FORGOTTEN + drafted)
            found[0][place] = found[0][place] * kept + tried
            found[1][place] = found[1][place] * kept + accepted

    def joined(self, part: float) -> None:
        """This part of the rows is new. Their text may be another: their chances begin as those before, which count as
        one row."""
        self._new = min(self._new + part, 1.0)
        kept = 1 - part * (1 - 1 / max(self._base[0][0], 1.0))
        self._prior += (1 - kept) * (self.chances[0] - self._prior)
        for places in self._base:
            places[:] = [rows * kept for rows in places]

    def spent(self, rows: int, accepted: int, seconds: float, plain: float, steps: int = 1) -> None:
        """A step is over. rows: all of it. accepted: drafts of its decode rows. seconds: its cost; plain: without
        drafts. steps: the number of such steps, none of which had drafts if there are more than one; below 0: so many
        that were noted did not run."""
        if seconds != plain:  # a shape with drafts
            seconds = max(seconds, CHEAPEST * plain)
        worth = plain * (1 + accepted / rows)  # the time that its tokens take without drafts
        kept = (1 - 1 / STEPS) ** steps
        self._time = self._time * kept + steps * worth
        # Drafts that paid may lose as much as at the start: a few wrong ones in a row say little about the text.
        self._loss = max(self._loss * kept + seconds - worth, -LOSS * ADVANCE * plain)
        debt = START if self._few else PROBING * DELAY
        # A trial that brings tokens pays for the next, so drafts that begin to be right are soon seen.
        credit = max(self._credit + steps * PROBING * plain + worth - seconds, -debt * plain)
        self._credit = min(credit + START * self._new * plain, PROBING * STEPS * plain)
        self._new = 0.0


def _expected(available: Sequence[int], chances: Sequence[float]) -> float:
    """Drafts that are accepted, of rows with up to as many as there are chances."""
    found, chance = 0.0, 1.0
    for place, one in enumerate(chances):
        chance *= one
        found += chance * sum(count > place for count in available)
    return found
