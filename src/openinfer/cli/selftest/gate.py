"""The accuracy gate: teacher-forced log-probabilities of the running engine against a reference's, on every path.

A reference comes from another implementation (see scripts/reference). It holds token sequences and, at the last
positions of each, the ids and log-probabilities of its most likely tokens. The engine is fed the same tokens, so that
one divergence does not spread. Its log-probabilities of those ids are compared with the reference's (see `verdict`).
Without such a reference, `references` makes one: the same engine in numpy.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.cli.selftest.forced_sampling import sampled
from openinfer.graph.runner import Runner
from openinfer.recipes.engine import Recipe
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced, ForcedSeq
from openinfer.recipes.engine.routing import Recorder, routed
from openinfer.recipes.engine.startup import Built, build
from openinfer.recipes.engine.verdict import Check, Reference, Verdict, judge, limits, read

Array = np.ndarray[Any, Any]
LENGTHS = (1, 5, 40, 129, 300)
"""Prompt lengths; FORCED more tokens follow each. The prompts are few, because numpy computes them."""
FORCED, TOP = 16, 64
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512}


class NotReproducible(AssertionError):
    """The same inputs in the same step shapes gave other bits."""


def decode_all(
    engine: Engine,
    sequences: Sequence[Reference],
    *,
    chunk: int,
    runner: Runner | None = None,
    wrong_table: str | None = None,
) -> list[Array]:
    """Prefill each sequence up to its first compared position, then feed the rest one token a step, all rows together.
    Returns `read` of the logits at each compared position: log-probabilities of the reference's top ids, and the arg
    max; [P, K + 1] a sequence. wrong_table: see Forced."""
    forced = Forced(engine, runner, wrong_table)
    rows = [forced.join(n, s.tokens) for n, s in enumerate(sequences, start=1)]
    for row, sequence in zip(rows, sequences, strict=True):
        forced.feed(row, sequence.first, chunk)
    found = _decoded(forced, list(zip(rows, sequences, strict=True)))
    forced.leave()
    return found


def _decoded(forced: Forced, pairs: Sequence[tuple[ForcedSeq, Reference]]) -> list[Array]:
    """Decode the compared positions of sequences that have been prefilled up to them."""
    found: list[list[Array]] = [[] for _ in pairs]
    for step in range(max(len(s.top_ids) for _, s in pairs)):
        live = [n for n, (_, s) in enumerate(pairs) if step < len(s.top_ids)]
        logits = forced.step([(pairs[n][0], 1) for n in live])
        for row, n in zip(logits, live, strict=True):
            found[n].append(read(row, pairs[n][1].top_ids[step]))
    return [np.stack(rows) for rows in found]


def mixed(engine: Engine, sequences: Sequence[Reference]) -> list[Array]:
    """The compared positions of the short sequences, in steps that also prefill the longest, and then its own."""
    forced, (*short, long) = Forced(engine), sequences
    *rows, last = [forced.join(n, s.tokens) for n, s in enumerate(sequences, start=1)]
    for row, sequence in zip(rows, short, strict=True):
        forced.feed(row, sequence.first, 512)
    found: list[list[Array]] = [[] for _ in short]
    steps = max(len(s.top_ids) for s in short)
    chunk = -(-long.first // steps)
    for step in range(steps):
        live = [n for n, s in enumerate(short) if step < len(s.top_ids)]
        part = min(chunk, long.first - last.fed)
        logits = forced.step([*((rows[n], 1) for n in live), *[(last, part)] * bool(part)])
        for row, n in zip(logits, live, strict=False):
            found[n].append(read(row, short[n].top_ids[step]))
    found_long = _decoded(forced, [(last, long)])
    forced.leave()
    return [*(np.stack(one) for one in found), *found_long]


def cached(engine: Engine, sequences: Sequence[Reference], chunk: int, *, wrong: bool = False) -> list[Array]:
    """Each sequence twice: the second takes its prefix from the engine's prefix cache. wrong: what it finds there is
    the state of other tokens, as a control. Raises NotReproducible where nothing is found."""
    found = []
    for sequence in sequences:
        forced, prefix = Forced(engine), sequence.tokens[: sequence.first]
        salt = os.urandom(16)
        first = forced.join(1, prefix, salt, prefix[::-1] if wrong else None)
        forced.feed(first, len(prefix), chunk)
        second = forced.join(2, sequence.tokens, salt)
        if not second.fed:
            raise NotReproducible(f"a prefix of {len(prefix)} tokens is not found; is the prefix cache on?")
        forced.feed(second, sequence.first, chunk)
        found += _decoded(forced, [(second, sequence)])
        forced.leave()
    return found


def preempted(engine: Engine, sequences: Sequence[Reference], chunk: int) -> list[Array]:
    """Each sequence loses row and blocks amid the compared positions, and is computed again in another slot."""
    found = []
    for sequence in sequences:
        forced, half = Forced(engine), len(sequence.top_ids) // 2
        rows: list[Array] = []
        for slot, positions in ((1, range(half)), (2, range(half, len(sequence.top_ids)))):
            row = forced.join(slot, sequence.tokens)
            forced.feed(row, sequence.first + positions.start, chunk)
            for step in positions:
                (logits,) = forced.step([(row, 1)])
                rows.append(read(logits, sequence.top_ids[step]))
            forced.drop(row)
        forced.leave()
        found.append(np.stack(rows))
    return found


def _long(engine: Engine, sequences: Sequence[Reference], blocks: int) -> list[Reference]:
    """The sequences whose prompt fills at least `blocks` blocks of every group."""
    size = max(group.block_size for group in engine.pool.groups)
    return [s for s in sequences if s.first >= blocks * size + 1]


def run(built: Built, references: Sequence[Reference]) -> Iterator[Check]:
    """Run every path of an engine that has the prefix cache on: a verdict each, then the recipe's own checks.
    Raises NotReproducible where a rerun differs in a bit."""
    engine, sequences = built.engine, built.blueprint.comparable(references)
    runner = engine.runner
    largest, allowed = runner.buckets.max_tokens, limits(sequences)
    few, alone = sequences[:5], sequences[1:4]
    decode = partial(decode_all, engine, chunk=largest)
    eager = decode(sequences[:4], runner=runner.eager())
    yield judge("eager, batch 4", allowed, sequences[:4], eager)
    first = decode(sequences)
    yield judge(f"graph, batch {len(sequences)}", allowed, sequences, first)
    again = decode(sequences)
    if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
        raise NotReproducible("a rerun of the same steps gave other log-probabilities")
    yield judge("graph, batch 1", allowed, alone, [decode([s])[0] for s in alone])
    yield judge("graph, 5 rows padded to 8", allowed, few, decode(few))
    wide = tuple(n for n in runner.buckets.decode_rows if n >= 57) or runner.buckets.decode_rows[-1:]
    padded = replace(runner, buckets=replace(runner.buckets, decode_rows=wide))
    yield judge(f"graph, padded to {wide[0]}", allowed, few, decode(few, runner=padded))
    yield judge("chunks of 333", allowed, sequences, decode_all(engine, sequences, chunk=333))
    yield judge("mixed steps", allowed, sequences, mixed(engine, sequences))
    found_again = _long(engine, sequences, 1)
    yield judge("cached prefix", allowed, found_again, cached(engine, found_again, largest))
    yield judge("preempted", allowed, few, preempted(engine, few, largest))
    yield judge("sampled, by the loop", allowed, *sampled(engine, sequences))
    if all(s.experts for s in sequences):
        recorder = Recorder(runner.pack, runner.stream)
        found = decode(sequences, runner=runner.eager(recorder))
        yield routed(sequences, found, recorder.experts(sequences))
    yield from built.blueprint.checks(engine, sequences)


def run_long(built: Built, references: Sequence[Reference]) -> Iterator[Check]:
    """Prompts that fill the model's context, one at a time, and after one another in one batch."""
    engine, sequences = built.engine, built.blueprint.comparable(references)
    largest, allowed = engine.runner.buckets.max_tokens, limits(sequences)
    for sequence in sequences:
        found = decode_all(engine, [sequence], chunk=largest)
        yield judge(f"long, {len(sequence.tokens)} tokens", allowed, [sequence], found)
    yield judge("long, all, chunks of 1000", allowed, sequences, decode_all(engine, sequences, chunk=1000))


def negative_controls(built: Built, references: Sequence[Reference]) -> Iterator[Check]:
    """Verdicts on engines that are wrong on purpose: each must fail, by its log-probabilities or by a check of its
    recipe. The model is put right again after each."""
    engine, sequences = built.engine, built.blueprint.comparable(references)
    stream, chunk, allowed = engine.runner.stream, engine.runner.buckets.max_tokens, limits(sequences)
    blueprint = built.blueprint
    for control in blueprint.controls(engine.runner.model):
        if not blueprint.notices(control.name):
            continue
        some = [s for s in sequences if s.first >= control.min_tokens][:5]
        if not some:
            continue  # no prompt would show it
        kept = [(tensor, np.array(tensor.numpy())) for tensor, _ in control.changes]
        for tensor, array in control.changes:
            tensor.copy_from(np.ascontiguousarray(array, tensor.dtype), stream)
        verdict = judge(f"control: {control.name}", allowed, some, decode_all(engine, some, chunk=chunk))
        yield _noticed(built, sequences, verdict)
        for tensor, array in kept:
            tensor.copy_from(array, stream)
        stream.synchronize()
    long = _long(engine, sequences, 2)[:2]
    for table in engine.runner.model.tables:
        if table is not None and blueprint.notices(table):
            wrong = decode_all(engine, long, chunk=chunk, wrong_table=table)
            verdict = judge(f"control: {table} that repeat a page", allowed, long, wrong)
            yield _noticed(built, sequences, verdict, table)
    yield judge("control: another's cached prefix", allowed, long, cached(engine, long, chunk, wrong=True))


def _noticed(
    built: Built, sequences: Sequence[Reference], verdict: Verdict, wrong_table: str | None = None
) -> Check:
    """The verdict on a wrong engine; or, if it passed, the first check of the recipe that fails."""
    if verdict.passed:
        for check in built.blueprint.checks(built.engine, sequences, wrong_table):
            if not check.passed:
                return replace(check, path=f"{verdict.path}, {check.path}")
    return verdict


def references(recipe: Recipe[Any], folder: Path, seed: int = 0, **flags: Any) -> list[Reference]:
    """References of seeded tokens, made by the engine on the CPU in bf16 and in float32.

    flags: the engine's flags, except device, dtype and sizes."""
    runs: list[list[Array]] = []
    sequences: list[list[int]] = []
    for dtype in ("bfloat16", "float32"):
        built = build(recipe, folder, **{**flags, **SMALL, "device": "cpu", "dtype": dtype,
                                         "kv_cache_memory_bytes": 1 << 30})  # fmt: skip
        if not sequences:
            rng, vocab = np.random.default_rng(seed), built.blueprint.config.vocab_size
            sequences = [rng.integers(0, vocab, n + FORCED).tolist() for n in LENGTHS]
        runs.append(logprobs(Forced(built.engine), sequences))
        built.engine.close()
        del built
        gc.collect()  # the weights of one run go before those of the other come
    return [_reference(*one) for one in zip(sequences, *runs, strict=True)]


def logprobs(forced: Forced, sequences: Sequence[list[int]]) -> list[Array]:
    """Log-probabilities [FORCED, V] of the last FORCED positions of each sequence, all rows together."""
    rows = [forced.join(n, tokens) for n, tokens in enumerate(sequences, start=1)]
    for row, tokens in zip(rows, sequences, strict=True):
        forced.feed(row, len(tokens) - FORCED, SMALL["max_num_batched_tokens"])
    steps = [forced.step([(row, 1) for row in rows]).astype(np.float64) for _ in range(FORCED)]
    forced.leave()
    logits = np.stack(steps, 1)
    peak = logits.max(-1, keepdims=True)
    return list(logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True)))


def _reference(tokens: list[int], bf16: Array, fp32: Array) -> Reference:
    ids = np.argsort(-bf16, axis=1, kind="stable")[:, :TOP].astype(np.int32)
    return Reference(tokens, ids, np.take_along_axis(bf16, ids, 1), np.take_along_axis(fp32, ids, 1))
