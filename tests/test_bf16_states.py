"""Recurrent states kept in bfloat16: half the bytes, nearly the same logits, and tokens that depend on nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_rows import last_logits

from openinfer.cli import main
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import SetupError
from openinfer.recipes.qwen3_5 import RECIPE
from openinfer.tensor import bfloat16, float32

TINY = Path(__file__).parent / "goldens" / "qwen3_5-tiny"
BF16 = {"mamba_ssm_cache_dtype": "bfloat16"}
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 2})


def published_with(folder: Path, dtype: str) -> Path:
    """The golden with another mamba_ssm_dtype."""
    shutil.copytree(TINY, folder)
    raw = json.loads((TINY / "config.json").read_text())
    raw["text_config"]["mamba_ssm_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_logits_are_nearly_those_of_float32(place: Any, golden_of: Any) -> None:
    """Nearer than a run in bf16, of which the golden has the distance."""
    golden = golden_of(TINY.name)
    exact, rounded = (place(RECIPE, TINY, [65, 5], **flags) for flags in ({}, BF16))
    assert (exact.state.dtype, rounded.state.dtype) == (float32, bfloat16)
    for index, facts in enumerate(golden.facts["prompts"]):
        prompt = golden.prompt(index)
        difference = last_logits(rounded, prompt) - last_logits(exact, prompt)
        assert np.sqrt(np.mean(difference**2)) < facts["bf16_rms_diff"]
        assert difference.any() == (len(prompt) > 1)  # an output is of the state before it is rounded


def tokens_of(run: Any, prompts: list[list[int]], at_once: bool) -> list[list[int]]:
    asked = []
    for prompt in prompts:
        asked.append(run.submit(prompt, 16, ignore_eos=True))
        if not at_once:
            run.finish()
    run.finish()
    return [run.outcomes[one].tokens for one in asked]


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 33},
    "few states": {"max_num_seqs": 4, "kv_cache_memory_bytes": 5 << 20},
    "preemption": {"scheduling_policy": "openinfer.recipes.engine.testing.restless:fcfs"},
    "ngram": {"speculative_config": NGRAM},
    "mtp": {"speculative_config": MTP},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("way", of_the_day(list(WAYS), 2))
def test_tokens_are_those_of_a_request_alone(way: str, session: Any) -> None:
    """The state is rounded after each token, so steps, cached prefixes and drafts change nothing. (It is rounded to
    another value where the last bits of products differ, as they do with the rows of a step.)"""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 200, 150).tolist()
    prompts = [shared + rng.integers(3, 200, 20 + 9 * n).tolist() for n in range(4)]
    common = {**BF16, "max_model_len": 512, "batch_invariant": True}
    alone, run = session(TINY, **common, enable_prefix_caching=False), session(TINY, **common, **WAYS[way])
    want = tokens_of(alone, prompts, at_once=False)
    assert tokens_of(run, prompts, at_once=True) == want
    assert tokens_of(run, prompts, at_once=False) == want  # from snapshots
    assert run.engine.stats().prefix_hit_tokens >= 128


def test_the_key_is_honoured_and_the_flag_overrides_it(session: Any, tmp_path: Path, capsys: Any) -> None:
    half = published_with(tmp_path / "half", "bfloat16")
    runs = [
        session(TINY),
        session(TINY, **BF16),
        session(half),
        session(half, mamba_ssm_cache_dtype="float32"),
    ]
    states = [run.engine.runner.model.state for run in runs]
    assert [state.dtype for state in states] == [float32, bfloat16, bfloat16, float32]
    sizes = [run.engine.pool.groups[1].block_bytes for run in runs]
    assert sizes[0] - sizes[1] == states[0][0].nbytes // 2 > 0
    assert (sizes[2], sizes[3]) == (sizes[1], sizes[0])
    with pytest.raises(
        SetupError, match="--mamba-ssm-cache-dtype float16: auto, float32, bfloat16 are possible"
    ):
        session(TINY, mamba_ssm_cache_dtype="float16")
    assert main(["check", str(published_with(tmp_path / "other", "float16"))]) == 1
    assert (
        "mamba_ssm_dtype is 'float16'; states are kept in 'float32' or 'bfloat16'" in capsys.readouterr().out
    )
