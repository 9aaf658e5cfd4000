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

from openinfer.kernels import apply_writes
from openinfer.recipes.deepseek_v4.batch import MAX_STOP_IDS, TABLES
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.runner import Runner
from openinfer.recipes.deepseek_v4.weights import Sparse
from openinfer.tensor import Tensor

Array = np.ndarray[Any, Any]

REGRET_NAT = 0.20
MEAN_NAT = 0.06
P99_NAT = 0.20
OWN_DEVIATION_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference sequence: its tokens, and for each of the last `len(top_ids)` positions the reference's most likely
    next tokens [P, K], most likely first, their log-probabilities in its own bf16 run, and in its float32 run."""

    tokens: list[int]
    top_ids: Array
    bf16: Array
    fp32: Array

    @property
    def first(self) -> int:
        """The first position that is compared."""
        return len(self.tokens) - len(self.top_ids)


def load_reference(path: Path) -> list[Reference]:
    """Read what scripts/deepseek_v4_reference.py wrote."""
    with np.load(path, allow_pickle=False) as data:
        return [
            Reference(
                data[f"s{n}.tokens"].tolist(),
                data[f"s{n}.top_ids"],
                data[f"s{n}.bf16"],
                data[f"s{n}.fp32"],
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


class Forced:
    """Feeds chosen tokens through an engine's recorded steps, below its scheduler. Slots are the caller's to choose;
    pages are handed out in order, the same ids in both groups. The engine must be idle, and is to be closed
    afterwards."""

    def __init__(self, runner: Runner, *, eager: bool = False) -> None:
        self._runner, self._eager = runner, eager
        self._next_page = 1
        self._lengths: dict[int, int] = {}
        cache = runner.model.cache
        self._num_pages = min(cache.window.shape[0], cache.csa_entries.shape[0])

    def join(self, slot: int, max_len: int, shared: Sequence[int] = ()) -> list[int]:
        """Start a sequence of at most max_len tokens; the pages in `shared` hold its beginning already. Returns its
        pages."""
        rows = self._runner.model.rows
        fresh = -(-max_len // PAGE) - len(shared)
        pages = [*shared, *range(self._next_page, self._next_page + fresh)]
        self._next_page += fresh
        if self._next_page > self._num_pages:
            raise MemoryError("the cache has too few pages for this gate")
        self._lengths[slot] = len(shared) * PAGE
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, self._lengths[slot])
        rows.write("stop_ids", slot, [-1] * MAX_STOP_IDS)
        for table in TABLES:
            rows.write(table, slot, pages)
        return pages

    def step(self, items: Sequence[tuple[int, Sequence[int]]], pad_rows: int = 0) -> Array:
        """Feed tokens to slots; returns the logits after each one's last token, float32 [len(items), V]. `pad_rows`
        makes the step at least that many rows."""
        runner, rows, n = self._runner, self._runner.model.rows, len(items)
        lengths = [len(tokens) for _, tokens in items]
        total = sum(lengths)
        tokens, num_rows, longest = runner.buckets.choose(
            max(total, pad_rows) if total == n else total, max(n, pad_rows)
        )
        starts = np.full(num_rows + 1, total, np.int32)
        starts[: n + 1] = np.concatenate([[0], np.cumsum(lengths)])
        slots = np.zeros(num_rows, np.int32)
        slots[:n] = [slot for slot, _ in items]
        prompt = np.full(tokens, -1, np.int32)
        prompt[:total] = np.concatenate([np.asarray(ids, np.int32) for _, ids in items])
        rows.write("slots", 0, slots)
        rows.write("q_starts", 0, starts)
        rows.write("prompt", 0, prompt)
        self.upload()
        if self._eager:
            runner.model.forward(runner.pack, tokens, num_rows, longest)
        else:
            runner.graphs.launch(("forward", tokens, num_rows, longest))
        runner.stream.synchronize()
        for slot, ids in items:
            self._lengths[slot] += len(ids)
            rows.set("seq_lens", slot, self._lengths[slot])
        return runner.model.buffers.logits[:n].numpy()

    def upload(self) -> None:
        """Bring the batch state on the device up to date."""
        rows = self._runner.model.rows
        for _ in rows.uploads(self._runner.stream):
            apply_writes(self._runner.pack, words=rows.words, writes=rows.writes)

    def feed(self, slot: int, tokens: Sequence[int], chunk: int) -> Array | None:
        """Feed tokens to one slot, `chunk` at a time; the logits after the last."""
        logits = None
        for start in range(0, len(tokens), chunk):
            logits = self.step([(slot, tokens[start : start + chunk])])
        return logits

    def leave(self) -> None:
        """End all sequences and take the pages back."""
        for slot in self._lengths:
            self._runner.model.rows.set("alive", slot, 0)
        self._lengths.clear()
        self._next_page = 1


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


def run(runner: Runner, sequences: Sequence[Reference]) -> Iterable[Verdict]:
    """Every path of an engine, a verdict each. Raises NotReproducible where a rerun differs in a bit."""
    largest, allowed = runner.buckets.mixed_tokens[-1], limits(sequences)
    eager = Forced(runner, eager=True)
    few = sequences[:4]
    yield judge("eager, batch 4", allowed, few, decode_all(eager, few, chunk=largest))
    forced = Forced(runner)
    first = decode_all(forced, sequences, chunk=largest)
    yield judge(f"graph, batch {len(sequences)}", allowed, sequences, first)
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


def negative_controls(runner: Runner, sequences: Sequence[Reference]) -> Iterable[Verdict]:
    """Verdicts on models that are wrong on purpose: each must fail. The model is put right again after each."""
    forced, chunk, allowed = Forced(runner), runner.buckets.mixed_tokens[-1], limits(sequences)
    model, few = runner.model, sequences[:5]
    long = [s for s in sequences if s.first >= 2 * PAGE][:2]
    mixture = model.weights.layers[1].mixture
    sparse = next(e for la in model.weights.layers if isinstance(e := la.attention.entries, Sparse))
    wrong: list[tuple[str, Sequence[Reference], list[tuple[Tensor, Array]]]] = [
        ("rotation backwards", few, [
            (table, table.numpy() * np.array([1, -1], np.float32)[:, None])
            for table in (model.cos_sin, model.compress_cos_sin)
        ]),
        ("gate and up swapped in one layer's experts", few, [
            (tensor, np.roll(tensor.numpy(), tensor.shape[1] // 2, axis=1))
            for tensor in (mixture.gate_up.weight, mixture.gate_up.scales)
            if tensor is not None
        ]),
        ("a compressor's positions shifted", long, [
            (ape, np.roll(ape.numpy(), 1, axis=0)) for ape in (sparse.compressor.ape,)
        ]),
    ]  # fmt: skip
    for name, some, changes in wrong:
        kept = [(tensor, tensor.numpy().copy()) for tensor, _ in changes]
        for tensor, array in changes:
            tensor.copy_from(np.ascontiguousarray(array, tensor.dtype), runner.stream)
        yield judge(f"control: {name}", allowed, some, decode_all(forced, some, chunk=chunk))
        for tensor, array in kept:
            tensor.copy_from(array, runner.stream)
        runner.stream.synchronize()
    for table in TABLES:
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
