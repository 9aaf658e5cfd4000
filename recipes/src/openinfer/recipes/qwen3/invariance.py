"""Whether a row's logits are the same bits alone and in company, in one chunk and in many: what --batch-invariant
is for.

python -m openinfer.recipes.qwen3.invariance MODEL_DIR --batch-invariant       exit code 1 if any differ
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.recipes.qwen3.engine import Qwen3Engine
from openinfer.recipes.qwen3.gate import Forced
from openinfer.recipes.qwen3.recipe import RECIPE

Array = np.ndarray[Any, Any]

DECODED = 4
"""Tokens that are fed one at a time after the prompt."""


def differences(engine: Qwen3Engine, length: int, seed: int = 7) -> dict[str, list[float]]:
    """The largest difference of any logit from the run that is alone and in one chunk, at the prompt's last token and
    each decoded one, by what else was done. The engine must be idle and is to be closed afterwards."""
    rng = np.random.default_rng(seed)
    vocab, most = engine.info.vocab_size, engine.runner.buckets.mixed_tokens[-1]
    tokens: list[int] = rng.integers(0, vocab, length + DECODED).tolist()
    others = min(63, engine.runner.buckets.mixed_rows[-1] - 1)
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


def _logits(
    engine: Qwen3Engine, tokens: list[int], chunk: int, others: int, rng: np.random.Generator
) -> Array:
    """float32 [1 + DECODED, V]: after the prompt, and after each token that follows it. The others decode meanwhile."""
    forced, vocab, mine = Forced(engine.runner), engine.info.vocab_size, 1 + others // 2
    company = [slot for slot in range(1, others + 2) if slot != mine]
    for slot in (mine, *company):
        forced.join(slot, len(tokens) + 8)
    for slot in company:
        forced.feed(slot, rng.integers(0, vocab, int(rng.integers(1, 40))).tolist(), 64)
    prompt = tokens[:-DECODED]
    found: list[Array] = []
    parts = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
    for part in [*parts, *([token] for token in tokens[-DECODED:])]:
        items = [(slot, rng.integers(0, vocab, 1).tolist()) for slot in company]
        # Decode rows come first in a step; among them the row stands in the middle.
        at = others // 2 if len(part) == 1 else others
        items.insert(at, (mine, part))
        found.append(forced.step(items)[at].copy())
    forced.leave()
    return np.stack(found[-1 - DECODED :])


def main() -> int:
    """Build an engine with these flags, print, and return 1 if any logit differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--length", type=int, default=400, help="tokens of the prompt; default: %(default)s")
    RECIPE.add_arguments(parser)
    args = parser.parse_args()
    spec = RECIPE.engine_spec(args.model_dir, args)
    engine: Any = spec.build()
    try:
        found = differences(engine, args.length)
    finally:
        engine.close()
    for name, values in found.items():
        print(f"{'same' if max(values) == 0 else 'DIFFERENT':>9} {name}: at most {max(values):.3g}")
    return 1 if any(map(max, found.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
