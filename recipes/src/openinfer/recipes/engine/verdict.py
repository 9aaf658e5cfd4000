"""Verdicts of the accuracy gate: how far a run is from a reference's, and how far it may be.

What a right engine may deviate is 1.5 times what the reference's own bf16 run deviates from its float32 run, over all
positions of the reference: two bf16 runs are sqrt(2) times as far from each other as one is from float32. That holds
for the regret too. A run prefers one token to the reference's best only if its errors of the two differ by more than
what lies between them, and among hundreds of positions there are such near ties. So a regret is held against how far
the reference's own errors of its best token and of another likely one are apart (99th percentile).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

REGRET_NAT = 0.20
MEAN_NAT = 0.06
P99_NAT = 0.20
OWN_DEVIATION_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference sequence: its tokens, and for each of the last `len(top_ids)` positions the reference's most likely
    next tokens [P, K], most likely first, their log-probabilities in its own bf16 run, and in its float32 run. `actq`:
    in a float32 run that rounds activations as the published code does."""

    tokens: list[int]
    top_ids: Array
    bf16: Array
    fp32: Array
    actq: Array | None = None
    experts: Mapping[str, Array] = field(default_factory=dict)
    """By run ("bf16", "fp32", "actq"): the experts of each mixture at these positions, ascending, [P, mixtures,
    chosen]. Empty for a dense model."""
    layers: Mapping[str, Array] = field(default_factory=dict)
    """What layers make of given inputs, where the reference has it: for the recipe's own checks."""

    @property
    def first(self) -> int:
        """The first position that is compared."""
        return len(self.tokens) - len(self.top_ids)

    def rounded(self) -> Reference:
        """What an engine that rounds activations is compared with: the run that does so. What may lie between them is
        1.5 times what the rounding itself does. Raises ValueError where there is no such run."""
        if self.actq is None:
            raise ValueError("this reference has no run that rounds activations; make it anew")
        order = np.argsort(-self.actq, axis=1, kind="stable")
        ids, actq, fp32 = (np.take_along_axis(x, order, 1) for x in (self.top_ids, self.actq, self.fp32))
        experts = {**self.experts, "bf16": self.experts["actq"]} if self.experts else {}
        return replace(self, top_ids=ids, bf16=actq, fp32=fp32, actq=None, experts=experts)


def load_reference(path: Path) -> list[Reference]:
    """Read what scripts/reference wrote."""
    with np.load(path, allow_pickle=False) as data:
        return [
            Reference(
                data[f"s{n}.tokens"].tolist(),
                data[f"s{n}.top_ids"],
                data[f"s{n}.bf16"],
                data[f"s{n}.fp32"],
                data.get(f"s{n}.actq"),
                _parts(data, f"s{n}.experts_"),
                _parts(data, f"s{n}.layer_"),
            )
            for n in range(int(data["count"]))
        ]


def _parts(data: Mapping[str, Array], at: str) -> dict[str, Array]:
    """The arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(at): data[name] for name in data if name.startswith(at)}


class Check(Protocol):
    """What a gate yields: it passed or not, can be printed and kept. A frozen dataclass is one with three lines."""

    @property
    def path(self) -> str: ...

    @property
    def passed(self) -> bool: ...

    def renamed(self, path: str) -> Check: ...

    def as_dict(self) -> dict[str, Any]: ...


class Deviation(NamedTuple):
    """How far a run is from another, in nat; or how far it may be."""

    regret: float
    mean: float
    p99: float


def limits(sequences: Sequence[Reference]) -> Deviation:
    """What a run may deviate from the reference's bf16 run; from all its sequences, whichever a path runs."""
    own = np.concatenate([s.bf16 - s.fp32 for s in sequences])
    apart = np.abs(own[:, 1:] - own[:, :1])
    found = (np.quantile(apart, 0.99), np.abs(own).mean(), np.quantile(np.abs(own), 0.99))
    floors = (REGRET_NAT, MEAN_NAT, P99_NAT)
    return Deviation(*(max(x, OWN_DEVIATION_FACTOR * float(y)) for x, y in zip(floors, found, strict=True)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a run is from the reference. Printed and not gated: the largest deviation, and at how many positions the
    regret is above REGRET_NAT."""

    path: str
    positions: int
    found: Deviation
    limits: Deviation
    maximum: float
    regretted: int

    def renamed(self, path: str) -> Verdict:
        return replace(self, path=path)

    @property
    def passed(self) -> bool:
        return all(value <= limit for value, limit in zip(self.found, self.limits, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "found": self.found._asdict(),
            "limits": self.limits._asdict(),
            "passed": self.passed,
        }

    def __str__(self) -> str:
        deviations = ", ".join(
            f"{name} {value:.3f} (<= {limit:.3f})"
            for name, value, limit in zip(self.found._fields, self.found, self.limits, strict=True)
        )
        return (
            f"{'pass' if self.passed else 'FAIL'} {self.path:28s} {self.positions:4d} positions: {deviations}, "
            f"max {self.maximum:.3f}, {self.regretted} above {REGRET_NAT}"
        )


def judge(path: str, allowed: Deviation, sequences: Sequence[Reference], found: Sequence[Array]) -> Verdict:
    """Compare what a path gave for these sequences with the reference's bf16 run."""
    ours = np.abs(np.concatenate([f[:, :-1] - s.bf16 for s, f in zip(sequences, found, strict=True)]))
    ours = np.where(np.isfinite(ours), ours, np.inf)
    regrets = np.array([
        row[0] - row[int(choice)]  # not among the reference's top ids: as bad as the last of them, at least
        for s, f in zip(sequences, found, strict=True)
        for row, choice in zip(s.bf16, f[:, -1], strict=True)
    ])  # fmt: skip
    return Verdict(
        path,
        len(ours),
        Deviation(float(regrets.max()), float(ours.mean()), float(np.quantile(ours, 0.99))),
        allowed,
        float(ours.max()),
        int((regrets > REGRET_NAT).sum()),
    )


def read(logits: Array, top_ids: Array) -> Array:
    """Log-probabilities of top_ids, and last which of them is the arg max (-1: none)."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logprobs = wide - (peak + np.log(np.exp(wide - peak).sum()))
    chosen = np.flatnonzero(top_ids == int(wide.argmax()))
    return np.append(logprobs[top_ids], chosen[0] if len(chosen) else -1)
