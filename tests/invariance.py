"""Whether a row's logits are the same bits alone and in company, in one chunk and in many, after a prefix hit, after
preemption, and with drafts: the promise of --batch-invariant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced, ForcedSeq
from openinfer.recipes.engine.testing import Planted, Session

Array = np.ndarray[Any, Any]

DECODED = 4
"""Tokens that are fed one at a time after the prompt."""
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "seed": 3, "logprobs": 1},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.4, "logprobs": 0},
)


def differences(engine: Engine, length: int, seed: int = 7) -> dict[str, list[float]]:
    """The largest difference of any logit between a run and the sequence alone in one chunk.
    Returns, by the name of the run, a difference for the prompt's last token and one for each decoded token. The engine
    must be idle, and the caller must close it afterwards."""
    rng = np.random.default_rng(seed)
    vocab, most = engine.info.vocab_size, engine.runner.buckets.max_tokens
    tokens: list[int] = rng.integers(0, vocab, length + DECODED).tolist()
    others = min(63, engine.runner.buckets.max_rows - 1)
    alone = _logits(engine, tokens, min(length, most), 0, rng)
    runs = {f"chunks of {chunk}": (chunk, 0) for chunk in (1, 7, 64, 300) if length // 100 < chunk < length}
    runs |= {f"beside {n} others": (most - n, n) for n in sorted({1, min(7, others), others}) if n}
    runs[f"chunks of 33 beside {others} others"] = (min(33, most - others), others)
    found = {name: _logits(engine, tokens, chunk, count, rng) for name, (chunk, count) in runs.items()}
    found |= {"cached prefix": _cached(engine, tokens, most), "preempted": _preempted(engine, tokens, most)}
    return {name: np.abs(one - alone).max(axis=1).tolist() for name, one in found.items()}


def _logits(engine: Engine, tokens: list[int], chunk: int, others: int, rng: np.random.Generator) -> Array:
    """float32 [1 + DECODED, V]: after the prompt, and after each token that follows it. The others decode meanwhile."""
    forced, vocab, mine = Forced(engine), engine.info.vocab_size, 1 + others // 2
    row = forced.join(mine, tokens)
    prompt = len(tokens) - DECODED
    counts = [min(chunk, prompt - start) for start in range(0, prompt, chunk)] + [1] * DECODED
    company = []
    for slot in range(1, others + 2):
        if slot != mine:
            length = int(rng.integers(1, 40))
            other = forced.join(slot, rng.integers(0, vocab, length + len(counts)).tolist())
            forced.feed(other, length, min(64, engine.runner.buckets.max_tokens))
            company.append(other)
    found: list[Array] = []
    for count in counts:
        items = [(other, 1) for other in company]
        # Decode rows come first in a step; among them the row stands in the middle.
        at = others // 2 if count == 1 else others
        items.insert(at, (row, count))
        found.append(forced.step(items)[at].copy())
    forced.leave()
    return np.stack(found[-1 - DECODED :])


def _decoded(forced: Forced, row: ForcedSeq, upto: int, chunk: int, count: int) -> list[Array]:
    """The logits after `upto` tokens of a sequence, and after each of the `count` that follow."""
    first = forced.feed(row, upto, chunk)
    assert first is not None
    return [first[0].copy(), *(forced.step([(row, 1)])[0].copy() for _ in range(count))]


def _cached(engine: Engine, tokens: list[int], chunk: int) -> Array:
    """_logits of a sequence whose prefix is in the cache."""
    forced, salt, prompt = Forced(engine), os.urandom(16), len(tokens) - DECODED
    forced.feed(forced.join(1, tokens[: prompt - 1], salt), prompt - 1, chunk)
    row = forced.join(2, tokens, salt)
    assert row.fed > 0, f"no prefix of {prompt - 1} tokens is found again"
    found = _decoded(forced, row, prompt, chunk, DECODED)
    forced.leave()
    return np.stack(found)


def _preempted(engine: Engine, tokens: list[int], chunk: int) -> Array:
    """_logits of a sequence that loses its blocks twice: in its prompt, and in its answer."""
    forced, prompt, half = Forced(engine), len(tokens) - DECODED, DECODED // 2
    row = forced.join(1, tokens)
    forced.feed(row, prompt // 2, 1 + prompt // 3)
    forced.drop(row)
    row = forced.join(2, tokens)
    found = _decoded(forced, row, prompt, chunk, half)
    forced.drop(row)
    found += _decoded(forced, forced.join(1, tokens), prompt + half, chunk, DECODED - half)[1:]
    forced.leave()
    return np.stack(found)


def drafts(engine: Engine, length: int, most: int, seed: int = 8) -> dict[str, str]:
    """By the name of a request: "equal", or the first token of its answer that, or whose log-probabilities, differ
    between the request alone without drafts and all of them at once, with n-gram drafts of which some are right. Raises
    AssertionError where none was accepted or none rejected."""
    rng, session = np.random.default_rng(seed), Session(engine)
    vocab, rows = engine.info.vocab_size, engine.runner.buckets.max_rows
    shared = rng.integers(0, vocab, length).tolist()
    asked = {}
    for n in range(min(8, rows)):
        options = {**OPTIONS[n % len(OPTIONS)], "ignore_eos": True}
        asked[f"{n}: {options}"] = [*shared, *rng.integers(0, vocab, n).tolist()], most, options
    wanted = [
        session.outcomes_of([(prompt, most, {**options, "disable_spec_decode": True})])[0]
        for prompt, most, options in asked.values()
    ]
    answers = [prompt + want.tokens for (prompt, *_), want in zip(asked.values(), wanted, strict=True)]
    drafting = engine.runner.drafting
    drafting.make_drafter, drafting.costs = lambda: Planted(answers), None
    company = [
        (rng.integers(0, vocab, int(rng.integers(1, 40))).tolist(), most, {"ignore_eos": True})
        for _ in range(rows - len(asked))
    ]
    before = engine.stats()
    found = session.outcomes_of([*asked.values(), *company])
    stats = engine.stats()
    accepted = stats.accepted_draft_tokens - before.accepted_draft_tokens
    assert 0 < accepted < stats.draft_tokens - before.draft_tokens, (before, stats)
    said = {}
    for name, want, got in zip(asked, wanted, found, strict=False):
        pairs = zip(want.tokens, got.tokens, want.logprobs, got.logprobs, strict=True)
        other = (f"token {n} differs" for n, (a, b, c, d) in enumerate(pairs) if a != b or c != d)
        said[name] = next(other, "equal")
    return said
