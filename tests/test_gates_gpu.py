"""The accuracy gate of every recipe on a GPU, by the tiny models: their head sizes are the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import recipes
from openinfer.cli.selftest import gate
from openinfer.recipes.deepseek_v4.choices import Choices
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.verdict import Check, Verdict, limits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

GOLDENS = Path(__file__).parent / "goldens"
FLAGS = {
    "device": "cuda",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {},
    "qwen3_5-tiny": {},
    "deepseek_v4-tiny": {"activation_quantization": "off"},
}


def right(verdict: Check, mean_of_one_prompt: float) -> bool:
    """As the gate has it, but for what its statistics are too small here. The 99th percentile of two dozen positions
    moves by some hundredths with another build of the kernels. The cached prefix is compared at eight positions of one
    prompt, whose own bf16 run deviates more than the others."""
    if not isinstance(verdict, Verdict):
        return verdict.passed
    found, allowed = verdict.found, verdict.limits
    cached = verdict.path == "cached prefix"
    mean = mean_of_one_prompt if cached else allowed.mean
    return (
        found.mean <= mean and found.regret <= allowed.regret and (cached or found.p99 <= 1.25 * allowed.p99)
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_path_passes_and_every_control_fails(name, references, golden_of):
    golden = golden_of(name)
    built = build(recipes.find(golden.path), golden.path, **FLAGS, **MODELS[name])
    sequences = references(golden)
    found = list(gate.run(built, sequences))
    one = max(limits(sequences).mean, limits(sequences[-1:]).mean)
    assert [str(verdict) for verdict in found if not right(verdict, one)] == []
    assert any(isinstance(verdict, Choices) for verdict in found) == (name == "deepseek_v4-tiny")
    controls = list(gate.negative_controls(built, sequences))
    assert [str(verdict) for verdict in controls if verdict.passed] == []
    assert built.engine.stats().compiles_after_ready == 0
    built.engine.close()
