"""Whether a row's logits are the same bits alone and in company, in one chunk and in many: the promise of
--batch-invariant."""

from __future__ import annotations

from typing import Any

import numpy as np

from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced

Array = np.ndarray[Any, Any]

DECODED = 4
"""Tokens that are fed one at a time after the prompt."""


def differences(engine: Engine, length: int, seed: int = 7) -> dict[str, list[float]]:
    """The largest difference of any logit between a run and the sequence alone in one chunk.
    Returns, by the name of the run, a difference for the prompt's last token and one for each decoded token. The engine
    must be idle, and the caller must close it afterwards."""
    rng = np.random.default_rng(seed)
    vocab, most = engine.info.vocab_size, engine.runner.buckets.max_tokens
    tokens: list[int] = rng.integers(0, vocab, length + DECODED).tolist()
    others = min(63, engine.runner.buckets.max_rows - 1)
    alone = _logits(engine, tokens, min(length, most), 0, rng)
    runs = {f"chunks of {chunk}": (chunk, 0) for chunk in (1, 7, 64, 300) if chunk < length}
    runs |= {
        f"beside {count} others": (min(length, most), count) for count in sorted({1, 7, others}) if count
    }
    runs[f"chunks of 33 beside {others} others"] = (33, others)
    return {
        name: np.abs(_logits(engine, tokens, chunk, count, rng) - alone).max(axis=1).tolist()
        for name, (chunk, count) in runs.items()
    }


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
            forced.feed(other, length, 64)
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
