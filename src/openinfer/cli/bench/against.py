"""Two ledgers of `bench ops` beside each other: which ops got slower or faster, the largest change of a step first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openinfer.frontend.errors import FlagError

WORTH = 1.03
"""A smaller change is noise, whatever the repeats say."""

Entries = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """An op and shape whose time changed. us: medians. calls: of one step."""

    key: str
    calls: int
    before_us: float
    after_us: float

    @property
    def slower(self) -> bool:
        """Whether it is a regression."""
        return self.after_us > self.before_us

    @property
    def step_us(self) -> float:
        """Microseconds that a step changes by."""
        return self.calls * (self.after_us - self.before_us)

    def __str__(self) -> str:
        word = "slower" if self.slower else "faster"
        return (
            f"{self.after_us / self.before_us:6.2f} x  {self.before_us:9.2f} -> {self.after_us:9.2f} us  "
            f"{self.step_us:+10.1f} us a step  {word}: {self.calls} x {self.key}"
        )


def changes(before: Entries, after: Entries) -> list[Change]:
    """The entries of both whose times differ by WORTH, and whose repeats do not overlap between the quartiles."""
    found = [
        Change(key, new["calls_a_step"], before[key]["us"], new["us"])
        for key, new in after.items()
        if key in before and _differ(before[key], new)
    ]
    return sorted(found, key=lambda change: -abs(change.step_us))


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    ratio = after["us"] / before["us"]
    if 1 / WORTH < ratio < WORTH:
        return False
    slow, fast = (after, before) if ratio > 1 else (before, after)
    return _quartile(slow, 1) > _quartile(fast, 3)


def _quartile(entry: Mapping[str, Any], number: int) -> float:
    ordered: Sequence[float] = sorted(entry["repeats"]["us"])
    return ordered[(len(ordered) - 1) * number // 4]


def report(before: Entries, after: Entries) -> tuple[str, bool]:
    """The changes as text, and whether there is a regression. Raises FlagError for ledgers without a common op."""
    if not set(before) & set(after):
        raise FlagError(
            "the ledgers have no op and shape in common: they are of two models, or of other flags; measure both alike"
        )
    found = changes(before, after)
    slower = sum(change.slower for change in found)
    new, gone = sorted(set(after) - set(before)), sorted(set(before) - set(after))
    both = len(set(after) & set(before))
    lines = [f"{both} ops in both ledgers: {slower} slower, {len(found) - slower} faster"]
    lines += map(str, found)
    lines += [f"only in the new ledger: {key}" for key in new] + [
        f"only in the old ledger: {key}" for key in gone
    ]
    return "\n".join(lines), slower > 0
