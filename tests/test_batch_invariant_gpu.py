"""--batch-invariant on a GPU, at published shapes cut to some layers: a request has the same bits alone, in a batch of
64, in other chunks, after a prefix hit, after preemption and with drafts. What each run found:

    python -m pytest -q -s -m gpu tests/test_batch_invariant_gpu.py -k "Qwen3.5-4B] or Qwen3-30B-A3B] or draft"
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import invariance
import pytest

from openinfer.recipes import deepseek_v3, deepseek_v4, qwen3, qwen3_5
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.startup import build

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEMO = Path(__file__).parents[1] / "demo"
FLAGS: dict[str, Any] = {
    "device": "cuda", "load_format": "dummy", "max_num_seqs": 64, "max_num_batched_tokens": 512,
    "max_model_len": 1024, "kv_cache_memory_bytes": 8 << 30, "batch_invariant": True,
    "scheduling_policy": "openinfer.recipes.engine.testing.restless:fcfs",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
}  # fmt: skip
MODELS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "Qwen3.5-4B": (qwen3_5, "4B", 8, {}),
    "Qwen3.5-4B-bf16-states": (qwen3_5, "4B", 8, {"mamba_ssm_cache_dtype": "bfloat16"}),
    "Qwen3.5-35B-A3B": (qwen3_5, "35B-A3B", 4, {"kv_cache_dtype": "fp8"}),
    "Qwen3-30B-A3B": (qwen3, "30B-A3B", 4, {}),
    "Qwen3-30B-A3B-FP8": (qwen3, "30B-A3B-FP8", 4, {}),
    "V3": (deepseek_v3, "DeepSeek-V3", 4, {}),
    "V4-Flash": (deepseek_v4, "Flash", 5, {"activation_quantization": "on"}),
}
"""A size, how many of its layers, and flags."""


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    family, size, layers, flags = MODELS[request.param]
    config = json.loads(json.dumps(family.RECIPE.published()[size]))
    config.get("text_config", config)["num_hidden_layers"] = layers
    if family is deepseek_v4:
        config = config_json(size, layers=layers)
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = build(family.RECIPE, tmp_path, **FLAGS, **flags).engine
    yield made
    made.close()


def test_a_request_has_the_same_bits_on_every_path(engine: Engine, request: pytest.FixtureRequest) -> None:
    found: dict[str, str] = {}
    for name, run in invariance.differences(engine, 700).items():
        different = [n for n, one in enumerate(run) if one]
        found[name] = f"the logits of token {different[0]} differ by {max(run):.2g}" if different else "equal"
    found |= invariance.drafts(engine, 600, 24)
    print(f"\n{request.node.name}", *(f"  {name}: {said}" for name, said in found.items()), sep="\n")
    assert {*found.values()} == {"equal"}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert (stats.compiles_after_ready, stats.allocations_after_ready) == (0, 0)


def test_layers_that_draft_change_no_bit() -> None:
    path, method = DEMO / "qwen3_5", '{"method": "mtp", "num_speculative_tokens": 2}'
    flags = {**FLAGS, "load_format": "safetensors", "dtype": "bfloat16", "speculative_config": method}
    made = build(qwen3_5.RECIPE, path, **flags).engine
    found = invariance.drafts(made, 60, 24)
    made.close()
    assert {*found.values()} == {"equal"}, found
