"""Whole engines with tiers: a prefix that left the device's memory comes back, and gives the tokens that it gave."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import recipes
from openinfer.frontend.contract import ResetPrefixCache
from openinfer.kvpool import InvalidTiers
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.startup import build

GOLDENS = Path(__file__).parent / "goldens"
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(10, 480) for _ in range(300)] for _ in range(5)]
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {"kv_cache_memory_bytes": 4 << 20},
    "qwen3_5-tiny": {"kv_cache_memory_bytes": 8 << 20},
    "deepseek_v4-tiny": {"kv_cache_memory_bytes": 8 << 20, "activation_quantization": "off"},
}
"""A cache that holds one or two of the prompts."""


def ask(run: Any, prompts: list[list[int]], at_once: int = 1) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of each prompt."""
    ids = []
    for prompt in prompts:
        ids.append(run.submit(prompt, 6, ignore_eos=True))
        if len(run.open) >= at_once:
            run.finish()
    run.finish()
    run.engine.check()
    return [run.outcomes[i].tokens for i in ids], [run.outcomes[i].cached for i in ids]


@pytest.fixture(params=SMALL)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PLAIN: dict[str, list[list[int]]] = {}


@pytest.fixture
def plain(session: Any, model: str) -> list[list[int]]:
    """Tokens of an engine without tiers, asked once a model."""
    if model not in PLAIN:
        flags = {key: value for key, value in SMALL[model].items() if key != "kv_cache_memory_bytes"}
        PLAIN[model] = ask(session(GOLDENS / model, max_model_len=320, max_num_seqs=2, **flags), PROMPTS)[0]
    return PLAIN[model]


def test_a_prefix_comes_back_from_host_memory(session: Any, model: str, plain: list[list[int]]) -> None:
    run = session(GOLDENS / model, max_model_len=320, max_num_seqs=2, kv_offload_gb=0.2, **SMALL[model])
    first, second = ask(run, PROMPTS), ask(run, PROMPTS, at_once=4)
    assert first[0] == second[0] == plain
    assert min(second[1]) >= 256
    stats = run.engine.stats()
    assert stats.offload_blocks["from_host"] > 0
    assert stats.offload_blocks["failed"] == stats.offload_blocks["dropped"] == 0
    assert stats.prefix_loaded_tokens >= 3 * 256
    assert stats.offload_bytes["host"] > 0
    assert stats.offload_bytes["disk"] == 0


@pytest.mark.parametrize(
    "model", ["qwen3-tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SMALL)[1:])]
)
def test_ranks_have_their_parts_of_a_prefix_again(
    session: Any, model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    """From host memory, then from the disk of an engine before. DeepSeek-V4's ranks hold its cache alike."""
    flags = SMALL[model] | {"kv_offload_gb": 0.2, "kv_offload_disk_gb": 0.2, "tensor_parallel_size": 2}
    if model != "deepseek_v4-tiny":
        flags["kv_cache_memory_bytes"] //= 2  # of a rank
    sizes = {"max_model_len": 320, "max_num_seqs": 2, "kv_offload_dir": str(tmp_path)}
    run = session(GOLDENS / model, **sizes, **flags)
    first, second = ask(run, PROMPTS), ask(run, PROMPTS, at_once=4)
    assert first[0] == second[0] == plain
    assert min(second[1]) >= 256
    stats = run.engine.stats()
    assert stats.offload_blocks["from_host"] > 0 == stats.offload_blocks["failed"]
    run.engine.close()
    run = session(GOLDENS / model, **sizes, **flags)
    fresh, deadline = 500, time.monotonic() + 20
    while not run.engine.stats().offload_bytes["disk"] and time.monotonic() < deadline:
        fresh += 1
        ask(run, [[fresh] * 20])
    tokens, cached = ask(run, PROMPTS[1:4])
    assert tokens == plain[1:4]
    assert max(cached) >= 256


def test_a_prefix_comes_back_from_the_disk_after_a_restart(
    session: Any, model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    flags = {"kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.2, **SMALL[model]}
    run = session(GOLDENS / model, max_model_len=320, max_num_seqs=2, **flags)
    assert ask(run, [*PROMPTS, PROMPTS[0]])[0] == [*plain, plain[0]]
    run.engine.close()
    run = session(GOLDENS / model, max_model_len=320, max_num_seqs=2, **flags)
    while not run.engine.stats().offload_bytes["disk"]:
        run.step()  # the files are looked through by a thread
        run.engine.pool.poll(0.01)
        ask(run, [[5] * 20])
    tokens, cached = ask(run, PROMPTS[1:4])
    assert tokens == plain[1:4]
    assert max(cached) >= 256
    assert run.engine.stats().offload_blocks["from_disk"] > 0


def test_a_reset_forgets_every_tier(session: Any) -> None:
    run = session(GOLDENS / "qwen3-tiny", max_model_len=320, kv_offload_gb=0.2, **SMALL["qwen3-tiny"])
    ask(run, PROMPTS)
    run.engine.control(ResetPrefixCache())
    assert run.engine.stats().offload_bytes["host"] == 0
    assert ask(run, PROMPTS)[1] == [0] * 5


def test_requests_that_are_aborted_while_they_load_lose_no_block(session: Any) -> None:
    run = session(GOLDENS / "qwen3-tiny", max_model_len=320, max_num_seqs=4, kv_offload_gb=0.2,
                  **SMALL["qwen3-tiny"])  # fmt: skip
    want, rng = ask(run, PROMPTS)[0], random.Random(1)
    for turn in range(60):
        number = run.submit(PROMPTS[turn % 5], 6, ignore_eos=True)
        if rng.random() < 0.3:
            run.engine.abort(number)
        for _ in range(rng.randrange(3)):
            run.step()
    run.finish()
    run.engine.check()
    for number in range(5, 65):
        found = run.outcomes[number].tokens
        assert found == want[number % 5][: len(found)]
    assert run.engine.pool.num_free == run.engine.pool.num_total


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_offload_gb": 1.0, "enable_prefix_caching": False}, "leave out --no-enable-prefix-caching"),
        ({"kv_offload_dir": "kv"}, "--kv-offload-dir and --kv-offload-disk-gb need each other"),
        ({"kv_offload_disk_gb": 1.0}, "--kv-offload-dir and --kv-offload-disk-gb need each other"),
        ({"kv_offload_gb": -1.0}, "must be more than 0"),
        ({"kv_offload_gb": 0.0}, "must be more than 0"),
        ({"kv_offload_gb": float("nan")}, "must be more than 0"),
        ({"kv_offload_gb": 1e9}, "less than a million"),
        ({"kv_offload_dir": "", "kv_offload_disk_gb": 1.0}, "--kv-offload-dir is empty"),
        ({"kv_offload_gb": 0.000001}, "have no room for a block of group 'kv'"),
        ({"kv_offload_dir": "/dev/null/kv", "kv_offload_disk_gb": 1.0}, "cannot be used"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags: dict[str, Any], words: str) -> None:
    path = GOLDENS / "qwen3-tiny"
    with pytest.raises((SetupError, InvalidTiers), match=words):
        build(recipes.find(path), path, device="cpu", **flags)


def test_a_restarted_engine_scores_a_prompt_that_the_disk_has(session: Any, tmp_path: Path) -> None:
    flags = {"kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.2, **SMALL["qwen3-tiny"]}
    scores = []
    for _ in range(2):
        run = session(GOLDENS / "qwen3-tiny", max_model_len=320, **flags)
        fresh, deadline = 500, time.monotonic() + 20
        ask(run, [[fresh] * 20])
        while scores and not run.engine.stats().offload_bytes["disk"]:
            fresh += 1  # what a thread has found on the disk is taken note of when a prompt is looked up
            ask(run, [[fresh] * 20])
            assert time.monotonic() < deadline, "the disk's blocks are not found again"
        number = run.submit(PROMPTS[0], 2, prompt_logprobs=0)
        run.finish()
        ask(run, PROMPTS[1:])
        scores.append([one.logprob for one in run.outcomes[number].prompt_logprobs])
        run.engine.close()
    assert len(scores[0]) == len(scores[1]) == len(PROMPTS[0]) - 1
    assert scores[0] == scores[1]


@pytest.mark.parametrize("other", ["dtype", "weights"])
def test_an_engine_with_other_numbers_does_not_read_the_folder(
    session: Any, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are other ones where the file was changed, though size and time are the same."""
    caplog.set_level(logging.INFO)
    flags = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_disk_gb": 0.2, **SMALL["qwen3-tiny"]}
    path = shutil.copytree(GOLDENS / "qwen3-tiny", tmp_path / "model")
    run = session(path, max_model_len=320, **flags)
    ask(run, PROMPTS)
    run.engine.close()
    if other == "weights":
        weights = path / "model.safetensors"
        before, data = weights.stat(), bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 0x80
        weights.write_bytes(data)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    run = session(path, max_model_len=320, **flags, **({"dtype": "bfloat16"} if other == "dtype" else {}))
    assert "has blocks of other models or versions" in caplog.text
    ask(run, PROMPTS)
    assert run.engine.stats().offload_blocks["from_disk"] == 0
