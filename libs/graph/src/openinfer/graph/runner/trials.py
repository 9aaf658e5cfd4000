"""Trials: whether drafts save time, by what steps with and without them took."""

from dataclasses import dataclass, field

SPAN = 32
"""Steps of a span."""
UNDER_WAY = 4
"""Steps at the start of a span that do not count, because they were chosen before it."""
HELD_UP = 16.0
"""A step counts as at most this many times its worth: something else held it up."""
PART = 0.004
"""The part of the time that spans of the worse way may lose."""
LEAST, MOST = 8, 256
"""Spans until the other way is tried again."""
FEW = 0.1
"""The part of a span's steps with drafts that may say more than that drafts of one text are wrong."""
CLEAR = 0.95
"""Drafts whose first span took less than this part of its worth pay, for now. To try the other way then costs an answer
that has just begun more than it can show."""


@dataclass(slots=True)
class Trials:
    """Compares spans of steps with drafts and spans without, and lets the better way go on.

    The cost of a step with drafts leaves out what they cost elsewhere. Steps of prompts take longer, the host has more
    to do, and rows end with drafts under way. The time of a span has all of it. It is divided by the span's worth: what
    its prompts and tokens would take without drafts, as predicted. So spans may have other rows.
    """

    drafts: bool = True
    """Whether steps may have drafts. A span in which few of them have any is of neither way."""
    _ratios: dict[bool, float] = field(default_factory=dict)
    """Time over worth, with drafts and without."""
    _seen: bool = False  # a span with drafts, since the ways were compared
    _told: bool = False  # such spans had right drafts or rows that joined
    _trying: bool = False  # the other way
    _first: bool = True  # the ways were not compared yet
    _left: int = 0  # spans of this way
    _steps: int = 0
    _drafted: int = 0
    _more: int = 0  # steps with right drafts or rows that joined
    _seconds: float = 0.0
    _worth: float = 0.0

    @property
    def rest(self) -> int:
        """Steps that surely have no drafts; 0: the next one may have some."""
        return 0 if self.drafts else max(SPAN * self._left - self._steps, 1)

    def took(self, seconds: float, worth: float, drafted: bool, steps: int = 1, more: bool = False) -> None:
        """A step took so long, or some steps in sum. drafted: with drafts. more: some of them were right, or a row
        joined."""
        self._steps += steps
        if self._steps > UNDER_WAY:
            self._drafted += drafted
            self._more += more
            self._worth += worth
            self._seconds += min(seconds, HELD_UP * worth)
        if self._steps >= SPAN:
            self._end()

    def joined(self) -> None:
        """A row joins. That the drafts of a text before were wrong says nothing about it."""
        if not (self.drafts or self._trying or self._told):
            self.drafts = self._first = True
            self._ratios.pop(True, None)
            self._left = 0
            self._begin()

    def _begin(self) -> None:
        self._steps = self._drafted = self._more = 0
        self._seconds = self._worth = 0.0

    def _end(self) -> None:
        many = 2 * self._drafted > SPAN
        if many or not self._drafted:
            ratio = self._seconds / self._worth
            self._ratios[many] = (ratio + self._ratios.get(many, ratio)) / 2
            if many:
                self._told = (self._seen and self._told) or self._more > FEW * SPAN
                self._seen = True
        self._begin()
        self._left -= 1
        if self._left > 0 or (self.drafts and not self._seen):
            return
        on, off = self._ratios.get(True, 1.0), self._ratios.get(False, 1.0)
        clear = self._first and on < CLEAR
        self._first = False
        if clear or (self._trying and len(self._ratios) == 2):
            self.drafts, self._trying, self._seen = on <= off, False, False
            self._left = min(max(round((max(on, off) / min(on, off) - 1) / PART), LEAST), MOST)
        else:
            self.drafts, self._trying, self._left = not self.drafts, True, 1
