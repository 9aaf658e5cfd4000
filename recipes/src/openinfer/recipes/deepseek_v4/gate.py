"""The accuracy gate: teacher-forced log-probabilities of the running engine against a reference's, on every path.

A reference (made by another implementation, see scripts/deepseek_v4_reference.py) holds token sequences and, at the
last positions of each, the ids and log-probabilities of its most likely tokens. The engine is fed the same tokens, so
one divergence does not spread, and its log-probabilities of those ids are compared.

What a right engine may deviate is what the reference's own bf16 run deviates from its float32 run, over all
positions of the reference, times 1.5: two bf16 runs are sqrt(2) times as far from each other as one is from float32.
That holds for the regret too. A run prefers one token to the reference's best only if its errors of the two differ by
more than what lies between them, and among hundreds of positions there are such near ties. So a regret is held against
how far the reference's own errors of its best token and of another likely one are apart (99th percentile), not against
its own regret, an extreme of a few near ties that may be 0 by luck. A fault of one position alone is a regret of nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.recipes.deepseek_v4.batch import TABLES
from openinfer.recipes.deepseek_v4.choices import Choices, Witness
from openinfer.recipes.deepseek_v4.forced import Forced
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.runner import Runner
from openinfer.tensor import Tensor

Array = np.ndarray[Any, Any]

REGRET_NAT = 0.20
MEAN_NAT = 0.06
P99_NAT = 0.20
OWN_DEVIATION_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference sequence: its tokens, and for each of the last `len(top_ids)` positions the reference's most likely
    next tokens [P, K], most likely first, their log-probabilities in its own bf16 run, and in its float32 run; `actq`:
    in a float32 run that rounds activations as the published code does."""

    tokens: list[int]
    top_ids: Array
    bf16: Array
    fp32: Array
    actq: Array | None = None

    @property
    def first(self) -> int:
        """The first position that is compared."""
        return len(self.tokens) - len(self.top_ids)

    def rounded(self) -> Reference:
        """What an engine that rounds activations is compared with: the run that does so. What may lie between them is
        1.5 times what the rounding itself does. Raises ValueError where there is no such run."""
        if self.actq is None:
            raise ValueError(
                "this reference has no run that rounds activations; use --activation-quantization off"
            )
        order = np.argsort(-self.actq, axis=1, kind="stable")
        ids, actq, fp32 = (np.take_along_axis(x, order, 1) for x in (self.top_ids, self.actq, self.fp32))
        return Reference(self.tokens, ids, actq, fp32)


def load_reference(path: Path) -> list[Reference]:
    """Read what scripts/deepseek_v4_reference.py wrote."""
    with np.load(path, allow_pickle=False) as data:
        return [
            Reference(
                data[f"s{n}.tokens"].tolist(),
                data[f"s{n}.top_ids"],
                data[f"s{n}.bf16"],
                data[f"s{n}.fp32"],
                data[f"s{n}.actq"],
            )
            for n in range(int(data["count"]))
        ]


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


def decode_all(
    forced: Forced, sequences: Sequence[Reference], *, chunk: int, pad_rows: int = 0
) -> list[Array]:
    """Prefill each sequence up to its first compared position, then feed the rest one token a step, all rows together.
    Logits [P, V] of each sequence are given as log-probabilities of its reference's top ids [P, K] and the arg max."""
    found: list[list[Array]] = [[] for _ in sequences]
    for n, sequence in enumerate(sequences):
        forced.join(n + 1, len(sequence.tokens))
        forced.feed(n + 1, sequence.tokens[: sequence.first], chunk)
    for step in range(max(len(s.top_ids) for s in sequences)):
        live = [n for n, s in enumerate(sequences) if step < len(s.top_ids)]
        logits = forced.step(
            [(n + 1, [sequences[n].tokens[sequences[n].first + step]]) for n in live], pad_rows
        )
        for row, n in zip(logits, live, strict=True):
            found[n].append(_read(row, sequences[n].top_ids[step]))
    forced.leave()
    return [np.stack(rows) for rows in found]


def _read(logits: Array, top_ids: Array) -> Array:
    """Log-probabilities of top_ids, and last whether the arg max is which of them (-1: none)."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logprobs = wide - (peak + np.log(np.exp(wide - peak).sum()))
    chosen = np.flatnonzero(top_ids == int(wide.argmax()))
    return np.append(logprobs[top_ids], chosen[0] if len(chosen) else -1)


def judge(path: str, allowed: Deviation, sequences: Sequence[Reference], found: Sequence[Array]) -> Verdict:
    """Compare what decode_all gave for these sequences with the reference's bf16 run."""
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


class NotReproducible(AssertionError):
    """The same inputs in the same step shapes gave other bits."""


def run(runner: Runner, sequences: Sequence[Reference]) -> Iterable[Verdict | Choices]:
    """Every path of an engine, a verdict each. Raises NotReproducible where a rerun differs in a bit."""
    sequences = comparable(runner, sequences)
    largest, allowed = runner.buckets.mixed_tokens[-1], limits(sequences)
    eager = Forced(runner, eager=True)
    few = sequences[:4]
    yield judge("eager, batch 4", allowed, few, decode_all(eager, few, chunk=largest))
    forced = Forced(runner)
    first = decode_all(forced, sequences, chunk=largest)
    yield judge(f"graph, batch {len(sequences)}", allowed, sequences, first)
    if runner.model.quantized:
        yield rounds(sequences, first)
    again = decode_all(forced, sequences, chunk=largest)
    if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
        raise NotReproducible("a rerun of the same steps gave other log-probabilities")
    alone = sequences[1:4]
    yield judge("graph, batch 1", allowed, alone, [decode_all(forced, [s], chunk=largest)[0] for s in alone])
    few = sequences[:5]
    yield judge("graph, 5 rows padded to 8", allowed, few, decode_all(forced, few, chunk=largest))
    yield judge("graph, padded to 64", allowed, few, decode_all(forced, few, chunk=largest, pad_rows=57))
    yield judge("chunks of 333", allowed, sequences, decode_all(forced, sequences, chunk=333))
    yield judge("mixed steps", allowed, sequences, mixed(forced, sequences))
    long = [s for s in sequences if s.first >= PAGE]
    yield judge("cached prefix", allowed, long, cached(forced, long, largest))
    yield from choices(runner, sequences[-1])


def comparable(runner: Runner, sequences: Sequence[Reference]) -> Sequence[Reference]:
    """The references that this engine is to be compared with."""
    return [s.rounded() for s in sequences] if runner.model.quantized else sequences


def rounds(sequences: Sequence[Reference], found: Sequence[Array]) -> Verdict:
    """Whether the engine rounds activations at all: the mean is half of what rounding moves the reference by, its limit
    what lies between the engine and the run that does not round. (In bf16 other codes are rounded to, so that an engine
    is no nearer to the rounded run than to the plain one: how values are rounded is for the ops' tests.)"""
    moved = np.mean([np.abs(s.bf16 - s.fp32).mean() for s in sequences])
    away = np.mean([np.abs(f[:, :-1] - s.fp32).mean() for f, s in zip(found, sequences, strict=True)])
    limit = Deviation(0.0, float(away), np.inf)
    return Verdict("rounding is there", len(sequences), Deviation(0.0, float(moved) / 2, 0.0), limit, 0.0, 0)


def choices(runner: Runner, sequence: Reference, steps: int = 4) -> Iterable[Choices]:
    """The indexer's and the router's choices in a prompt's chunks and in a few decode steps after it."""
    model = runner.model
    witness = Witness(runner.pack, runner.stream, quantized=model.quantized)
    forced = Forced(runner, eager=True, pack=witness)
    forced.join(1, len(sequence.tokens))
    forced.feed(1, sequence.tokens[: sequence.first], runner.buckets.mixed_tokens[-1])
    for token in sequence.tokens[sequence.first : sequence.first + steps]:
        forced.step([(1, [token])])
    forced.leave()
    yield from (witness.entries, witness.experts)


def negative_controls(runner: Runner, sequences: Sequence[Reference]) -> Iterable[Verdict]:
    """Verdicts on models that are wrong on purpose: each must fail. The model is put right again after each. (What is
    wrong with entries alone is less than what rounding does: an engine that rounds is not asked.)"""
    sequences = comparable(runner, sequences)
    forced, chunk, allowed = Forced(runner), runner.buckets.mixed_tokens[-1], limits(sequences)
    model, few = runner.model, sequences[:5]
    long = [s for s in sequences if s.first >= 2 * PAGE][:2]
    wrong: list[tuple[str, Sequence[Reference], list[tuple[Tensor, Array]]]] = [
        ("rotation backwards", few, [
            (table, table.numpy() * np.array([1, -1], np.float32)[:, None])
            for table in (model.cos_sin, model.compress_cos_sin)
        ]),
        ("gate and up swapped in shared experts", few, [
            (tensor, np.roll(tensor.numpy(), tensor.shape[0] // 2, axis=0))
            for layer in model.weights.layers
            for tensor in (layer.mixture.shared_gate_up.weight, layer.mixture.shared_gate_up.scales)
            if tensor is not None
        ]),
    ]  # fmt: skip
    if not model.quantized:
        compressors = [e.compressor for la in model.weights.layers if (e := la.attention.entries) is not None]
        smaller = [(c.norm, c.norm.numpy() * np.float32(0.25)) for c in compressors]
        wrong.append(("entries of the wrong size", long, smaller))
    for name, some, changes in wrong:
        kept = [(tensor, tensor.numpy().copy()) for tensor, _ in changes]
        for tensor, array in changes:
            tensor.copy_from(np.ascontiguousarray(array, tensor.dtype), runner.stream)
        yield judge(f"control: {name}", allowed, some, decode_all(forced, some, chunk=chunk))
        for tensor, array in kept:
            tensor.copy_from(array, runner.stream)
        runner.stream.synchronize()
    for table in TABLES[:1] if model.quantized else TABLES:
        lost = [_with_pages_lost(runner, s, chunk, table) for s in long]
        yield judge(f"control: {table} that repeat a page", allowed, long, lost)


def _with_pages_lost(runner: Runner, sequence: Reference, chunk: int, table: str) -> Array:
    """The compared positions with the first page of one group wherever another was. (Their order alone says little: the
    entries that a token sees are a set.)"""
    forced = Forced(runner)
    pages = forced.join(1, len(sequence.tokens))
    forced.feed(1, sequence.tokens[: sequence.first], chunk)
    runner.model.rows.write(table, 1, pages[:1] * len(pages))
    rows = []
    for step, top_ids in enumerate(sequence.top_ids):
        (row,) = forced.step([(1, [sequence.tokens[sequence.first + step]])])
        rows.append(_read(row, top_ids))
    forced.leave()
    return np.stack(rows)


def mixed(forced: Forced, sequences: Sequence[Reference]) -> list[Array]:
    """The compared positions of the short sequences run in steps that also prefill the longest, and the longest's own
    after that."""
    *short, long = sequences
    found: list[list[Array]] = [[] for _ in sequences]
    for n, sequence in enumerate(sequences):
        forced.join(n + 1, len(sequence.tokens))
    for n, sequence in enumerate(short):
        forced.feed(n + 1, sequence.tokens[: sequence.first], 512)
    steps = max(len(s.top_ids) for s in short)
    chunk = -(-long.first // steps)
    for step in range(steps):
        live = [n for n, s in enumerate(short) if step < len(s.top_ids)]
        items: list[tuple[int, Sequence[int]]] = [
            (n + 1, [short[n].tokens[short[n].first + step]]) for n in live
        ]
        part = long.tokens[step * chunk : min((step + 1) * chunk, long.first)]
        logits = forced.step([*items, (len(sequences), part)] if part else items)
        for row, n in zip(logits, live, strict=False):
            found[n].append(_read(row, short[n].top_ids[step]))
    for step in range(len(long.top_ids)):
        (row,) = forced.step([(len(sequences), [long.tokens[long.first + step]])])
        found[-1].append(_read(row, long.top_ids[step]))
    forced.leave()
    return [np.stack(rows) for rows in found]


def cached(forced: Forced, sequences: Sequence[Reference], chunk: int) -> list[Array]:
    """Each sequence twice: the second takes the first's whole pages as its prefix."""
    found = []
    for sequence in sequences:
        whole = sequence.first // PAGE * PAGE
        pages = forced.join(1, len(sequence.tokens))
        forced.feed(1, sequence.tokens, chunk)
        forced.join(2, len(sequence.tokens), pages[: whole // PAGE])
        forced.feed(2, sequence.tokens[whole : sequence.first], chunk)
        rows = []
        for step, top_ids in enumerate(sequence.top_ids):
            (row,) = forced.step([(2, [sequence.tokens[sequence.first + step]])])
            rows.append(_read(row, top_ids))
        found.append(np.stack(rows))
        forced.leave()
    return found
