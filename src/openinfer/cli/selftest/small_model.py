"""The accuracy gate on any checkpoint, without torch: the engine on the GPU against the same engine in numpy."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.recipes.engine import Recipe
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.verdict import Reference

Array = np.ndarray[Any, Any]

LENGTHS = (1, 5, 40, 129, 300)
"""Prompt lengths; FORCED more tokens follow each. The prompts are few, because numpy computes them."""
FORCED, TOP = 16, 64
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512}


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
