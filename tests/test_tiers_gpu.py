"""Tiers on GPUs, with one rank and two: log-probabilities after a load, and after sleep, are near those computed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.frontend.contract import Sleep, WakeUp
from openinfer.tensor import check, driver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

GOLDENS = Path(__file__).parent / "goldens"
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(10, 480) for _ in range(300)] for _ in range(5)]
CACHE = {"qwen3-tiny": 4 << 20, "qwen3_5-tiny": 8 << 20, "deepseek_v4-tiny": 8 << 20}
"""Bytes that hold one or two of the prompts."""


def ask(run: Any) -> tuple[list[dict[int, float]], list[int]]:
    """The likeliest first tokens of each prompt, and its cached tokens."""
    ids = []
    for prompt in PROMPTS:
        ids.append(run.submit(prompt, 6, ignore_eos=True, logprobs=10))
        run.finish()
    run.engine.check()
    firsts = [run.outcomes[i].logprobs[0] for i in ids]
    tops = [dict(zip(first.top_token_ids, first.top_logprobs, strict=True)) for first in firsts]
    return tops, [run.outcomes[i].cached for i in ids]


def error(one: dict[int, float], other: dict[int, float]) -> float:
    both = one.keys() & other.keys()
    return float(np.mean([abs(one[token] - other[token]) for token in both])) if len(both) >= 5 else 9.0


@pytest.mark.parametrize("ranks", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("model", CACHE)
def test_a_prefix_comes_back_from_host_memory_and_disk(
    session: Any, model: str, ranks: int, tmp_path: Path
) -> None:
    if int(check(driver().cuDeviceGetCount(), "cuDeviceGetCount")) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    flags: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "max_model_len": 320, "max_num_seqs": 2,
        "tensor_parallel_size": ranks,
    }  # fmt: skip
    alike = model == "deepseek_v4-tiny"  # all ranks hold its cache
    if alike:  # a rounded activation that flips moves a log-probability by more than the limit
        flags["activation_quantization"] = "off"
    own = {"kv_cache_memory_bytes": CACHE[model] // (1 if alike else ranks)}
    tiers = {"kv_offload_gb": 0.2, "kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.2}
    run = session(GOLDENS / model, **flags, **own, **tiers, enable_sleep_mode=True)
    until = time.monotonic() + 10
    while not run.engine._cache.tiers._host.has_room and time.monotonic() < until:
        time.sleep(0.01)
    computed, _ = ask(run)
    loaded, cached = ask(run)
    assert min(cached) >= 256
    assert max(map(error, computed, loaded)) < 0.12
    assert error(computed[0], loaded[1]) > 0.3  # negative control: another prompt
    run.engine.control(Sleep())
    run.engine.control(WakeUp())
    after, cached = ask(run)
    assert max(map(error, computed, after)) < 0.12
    stats = run.engine.stats()
    assert stats.offload_blocks["from_host"] > 0
    assert stats.offload_blocks["failed"] == 0
    assert stats.compiles_after_ready == 0
