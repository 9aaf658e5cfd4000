"""Verdicts of the accuracy gate: how far a run is from a reference's, and how far it may be.

The limit is 1.5 times the deviation of the reference's own bf16 run from its float32 run, over all positions of the
reference. The reason: two right bf16 runs are sqrt(2) times as far from each other as one is from float32.

The regret has a limit of the same kind. A run prefers another token to the reference's best only if its errors of the
two tokens differ by more than their log-probabilities do. Among hundreds of positions there are near ties where that
happens. So the regret is compared with the difference between the reference's own errors of its best token and of
another likely token (99th percentile).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

REGRET_NAT = 0.20
MEAN_NAT = 0.06
P99_NAT = 0.20
OWN_DEVIATION_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference sequence. It has results for its last P = `len(top_ids)` positions.

    tokens: the sequence.
    top_ids: the reference's most likely next tokens, most likely first, [P, K].
    bf16, fp32: log-probabilities of `top_ids` in its bf16 run and in its float32 run, [P, K].
    actq: the same in a float32 run that rounds activations as the published code does."""

    tokens: list[int]
    top_ids: Array
    bf16: Array
    fp32: Array
    actq: Array | None = None
    experts: Mapping[str, Array] = field(default_factory=dict)
    """The experts of each mixture at these positions, ascending, [P, mixtures, chosen], by run ("bf16", "fp32",
    "actq"). Empty for a dense model."""
    layers: Mapping[str, Array] = field(default_factory=dict)
    """Outputs of layers for given inputs, for the recipe's own checks. Empty where the reference has none of them."""

    @property
    def first(self) -> int:
        """The first position that is compared."""
        return len(self.tokens) - len(self.top_ids)

    def rounded(self) -> "Reference":
        """The reference for an engine that rounds activations: its bf16 run is replaced by the run that rounds.
        So the limits become 1.5 times the effect of the rounding itself. Raises ValueError where no run rounds."""
        if self.actq is None:
            raise ValueError("this reference has no run that rounds activations; make it anew")
        order = np.argsort(-self.actq, axis=1, kind="stable")
        ids, actq, fp32 = (np.take_along_axis(x, order, 1) for x in (self.top_ids, self.actq, self.fp32))
        experts = {**self.experts, "bf16": self.experts["actq"]} if self.experts else {}
        return replace(self, top_ids=ids, bf16=actq, fp32=fp32, actq=None, experts=experts)


def load_reference(path: Path) -> list[Reference]:
    """Read a reference.npz of scripts/reference."""
    with np.load(path, allow_pickle=False) as data:
        return [_reference(data, f"s{n}.") for n in range(int(data["count"]))]


def _reference(data: Mapping[str, Array], at: str) -> Reference:
    tokens, ids, bf16, fp32 = (data[at + name] for name in ("tokens", "top_ids", "bf16", "fp32"))
    experts, layers = _parts(data, at + "experts_"), _parts(data, at + "layer_")
    return Reference(tokens.tolist(), ids, bf16, fp32, data.get(at + "actq"), experts, layers)


def _parts(data: Mapping[str, Array], at: str) -> dict[str, Array]:
    return {name.removeprefix(at): data[name] for name in data if name.startswith(at)}


class Check(Protocol):
    """One result of a gate, a dataclass: it passed or not, and can be printed and kept."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def path(self) -> str: ...

    @property
    def passed(self) -> bool: ...

    def as_dict(self) -> dict[str, Any]: ...


class Deviation(NamedTuple):
    """The deviation of one run from another, in nat, or the limit of it."""

    regret: float
    mean: float
    p99: float


def limits(sequences: Sequence[Reference]) -> Deviation:
    """The limits for the deviation of a run from the reference's bf16 run.
    `sequences` must be all of the reference, also for a path that runs fewer of them."""
    own = np.concatenate([s.bf16 - s.fp32 for s in sequences])
    apart = np.abs(own[:, 1:] - own[:, :1])
    found = (np.quantile(apart, 0.99), np.abs(own).mean(), np.quantile(np.abs(own), 0.99))
    floors = (REGRET_NAT, MEAN_NAT, P99_NAT)
    return Deviation(*(max(x, OWN_DEVIATION_FACTOR * float(y)) for x, y in zip(floors, found, strict=True)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a run is from the reference. Not gated: the maximum, and the positions with a regret above REGRET_NAT."""

    path: str
    positions: int
    found: Deviation
    limits: Deviation
    maximum: float
    regretted: int

    @property
    def passed(self) -> bool:
        return all(value <= limit for value, limit in zip(self.found, self.limits, strict=True))

    def as_dict(self) -> dict[str, Any]:
        parts = {"found": self.found._asdict(), "limits": self.limits._asdict()}
        return {**asdict(self), **parts, "passed": self.passed}

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
    """Compare the results of a path for these sequences, one `read` a position, with the reference's bf16 run."""
    ours = np.abs(np.concatenate([f[:, :-1] - s.bf16 for s, f in zip(sequences, found, strict=True)]))
    ours = np.where(np.isfinite(ours), ours, np.inf)
    regrets = np.array([
        row[0] - row[int(choice)]  # a choice outside the top ids counts as their last, a lower bound
        for s, f in zip(sequences, found, strict=True)
        for row, choice in zip(s.bf16, f[:, -1], strict=True)
    ])  # fmt: skip
    deviation = Deviation(float(regrets.max()), float(ours.mean()), float(np.quantile(ours, 0.99)))
    regretted = int((regrets > REGRET_NAT).sum())
    return Verdict(path, len(ours), deviation, allowed, float(ours.max()), regretted)


def read(logits: Array, top_ids: Array) -> Array:
    """Log-probabilities of top_ids, then the index of the arg max among them (-1: it is not among them)."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logprobs = wide - (peak + np.log(np.exp(wide - peak).sum()))
    chosen = np.flatnonzero(top_ids == int(wide.argmax()))
    return np.append(logprobs[top_ids], chosen[0] if len(chosen) else -1)
