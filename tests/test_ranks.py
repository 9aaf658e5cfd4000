"""Several ranks: what is refused, and what happens when a rank is lost."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openinfer.kernels import RankLost
from openinfer.recipes.engine import Options, SetupError, UnsupportedModel
from openinfer.recipes.engine.devices import devices_of
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.published import config_json

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
SMALL: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20}


def followers() -> list[int]:
    """Processes of ranks above 0 that this process has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "follower_process"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def until_lost(step: Callable[[], Any]) -> None:
    """Call `step` until it raises; 20 s at most."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        step()


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")  # a lost engine drops its sequences
@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "idle"])
def test_a_rank_that_is_killed_ends_the_engine(busy):
    engine = build(RECIPE, TINY, tensor_parallel_size=2, **SMALL).engine
    (pid,) = followers()
    session = Session(engine)
    if busy:
        session.submit([5, 6, 7], 500, ignore_eos=True)
        session.step()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL"):
        until_lost(session.step if busy else engine.stats)
    assert time.monotonic() < began + 10
    engine.close()
    del session, engine
    gc.collect()
    assert gone([pid])


def test_four_ranks_give_the_golden_tokens_and_leave_no_process(tiny):
    """Two of them have the same key-value head. All prompts at once; the suite of test_recipes has two ranks."""
    engine = build(RECIPE, TINY, tensor_parallel_size=4, **SMALL).engine
    pids = followers()
    assert len(pids) == 3
    session = Session(engine)
    for index in range(tiny.num_prompts):
        session.submit(tiny.prompt(index), len(tiny.greedy(index)), ignore_eos=True)
    session.finish()
    for index, outcome in session.outcomes.items():
        assert outcome.tokens == tiny.greedy(index)
    engine.close()
    assert gone(pids)


def test_a_rank_that_cannot_start_is_named(monkeypatch):
    """Its GPU does not exist."""
    monkeypatch.setattr("openinfer.recipes.engine.startup.devices_of", lambda options: ["cpu", "cuda:99"])
    with pytest.raises(SetupError, match=r"rank 1 of 2 ended with exit code 1: .*CUDA"):
        build(RECIPE, TINY, tensor_parallel_size=2, **SMALL)
    assert gone(followers())


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({}, 3, "num_attention_heads is 32; 3 ranks cannot share it"),
        ({"vocab_size": 151900}, 4, "vocab_size is 151900; 4 ranks cannot share it in multiples of 16"),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, 2, "num_key_value_heads is 3; 2 ranks"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(changes, ranks, why):
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        Config.parse({**config_json("4B"), **changes}).of_rank(0, ranks)


def test_ranks_share_every_part():
    """With 4 key-value heads on 8 ranks, pairs have the same one."""
    for size, kv_heads in (("0.6B", 8), ("8B", 8), ("32B", 4)):
        whole = Config.parse({**config_json(size), "num_key_value_heads": kv_heads})
        for ranks in (2, 4, 8):
            parts = [whole.of_rank(rank, ranks) for rank in range(ranks)]
            assert sum(part.num_heads for part in parts) == whole.num_heads
            assert sum(part.intermediate_size for part in parts) == whole.intermediate_size
            heads = [part.first_kv_head for part in parts]
            assert sorted(set(heads)) == list(range(0, kv_heads, parts[0].num_kv_heads))
            assert heads == sorted(heads)


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ({"device": "cpu"}, ["cpu", "cpu"]),
        ({"device": "cuda"}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda", "device_ids": "3,1"}, ["cuda:3", "cuda:1"]),
    ],
)
def test_devices(flags, devices):
    assert devices_of(Options(tensor_parallel_size=2, **flags)) == devices


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"device": "cuda:1"}, "--device cuda:1 with several ranks: name their GPUs by --device-ids"),
        ({"device": "cuda", "device_ids": "0"}, "--device-ids 0: name 2 different GPUs"),
        ({"device": "cuda", "device_ids": "1,1"}, "--device-ids 1,1: name 2 different GPUs"),
        ({"device": "cuda", "device_ids": "0,x"}, "--device-ids 0,x: name 2 different GPUs"),
    ],
)
def test_devices_that_cannot_be(flags, why):
    with pytest.raises(SetupError, match=re.escape(why)):
        devices_of(Options(tensor_parallel_size=2, **flags))


def test_no_ranks_are_refused():
    with pytest.raises(SetupError, match="--tensor-parallel-size 0: it must be at least 1"):
        build(RECIPE, TINY, tensor_parallel_size=0, **SMALL)
