"""Several ranks: what is refused, and what happens when a rank is lost."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openinfer.kernels import CpuPack, RankLost
from openinfer.kernels.authoring import mapped
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v4 import RECIPE as DEEPSEEK_V4
from openinfer.recipes.deepseek_v4.config import Config as DeepseekConfig
from openinfer.recipes.engine import Options, SetupError, UnsupportedModel, follower_process, startup
from openinfer.recipes.engine.devices import devices_of
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.published import config_json
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.recipes.qwen3_5.config import Config as HybridConfig
from openinfer.recipes.qwen3_5.published import config_json as hybrid_json
from openinfer.recipes.qwen3_5.weights import Format as HybridFormat
from openinfer.recipes.qwen3_5.weights import Weights as HybridWeights
from openinfer.tensor import Arena, Device, Tensor, bfloat16

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
MIXTURES = [
    (QWEN3_5, "qwen3_5-moe-tiny", HybridConfig, {}),
    (DEEPSEEK_V4, "deepseek_v4-tiny", DeepseekConfig, {"activation_quantization": "off"}),
]
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
    assert Path(f"/proc/{pid}/comm").read_text() == "rank 1 of 2\n"
    assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C in a terminal reaches it"
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


def test_no_process_stays_where_one_cannot_be_started(monkeypatch):
    started, popen = [], subprocess.Popen

    def only_one(*args, **kwargs):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", only_one)
    with pytest.raises(BlockingIOError):
        build(RECIPE, TINY, tensor_parallel_size=4, **SMALL)
    assert started[0].poll() == -signal.SIGKILL


def test_a_rank_that_hangs_behind_a_full_ring_is_ended(monkeypatch):
    monkeypatch.setattr("openinfer.recipes.engine.followers.CLOSE_TIMEOUT_S", 0.2)
    engine = build(RECIPE, TINY, tensor_parallel_size=2, **SMALL).engine
    (pid,) = followers()
    os.kill(pid, signal.SIGSTOP)
    leader = engine.runner.leader
    monkeypatch.setattr(leader._writer, "_timeout_s", 0.1)
    for send in (
        lambda: leader.command("x" * 400_000),
        lambda: leader.command("x" * 999),
        lambda: leader.launch(()),
    ):
        with pytest.raises(RankLost, match="takes no messages"):
            until_lost(send)
    engine.close()
    assert gone([pid])


def test_a_rank_whose_leader_is_gone_before_its_first_word_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert follower_process.main() == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
def test_a_rank_that_is_killed_holds_up_no_tier(tmp_path):
    """Copies that it never makes are not waited for, and nothing half made reaches the disk."""
    tiers = {"kv_offload_gb": 0.1, "kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.1}
    engine = build(
        RECIPE, TINY, tensor_parallel_size=2, **{**SMALL, "kv_cache_memory_bytes": 1 << 20}, **tiers
    ).engine
    (pid,) = followers()
    session = Session(engine)
    for first in range(4):
        session.submit([first] * 200, 100, ignore_eos=True)
    for _ in range(5):
        session.step()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL"):
        until_lost(session.step)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() < began + 10
    del session, engine
    gc.collect()


def golden_tokens(engine, golden, count: int | None = None) -> bool:
    """Whether the engine gives the first `count` golden tokens of two prompts at once; None: all."""
    session = Session(engine)
    expected = [golden.greedy(n)[:count] for n in range(2)]
    asked = [
        session.submit(golden.prompt(n), len(tokens), ignore_eos=True) for n, tokens in enumerate(expected)
    ]
    session.finish()
    return [session.outcomes[one].tokens for one in asked] == expected


@pytest.mark.parametrize(
    ("recipe", "name", "ranks"),
    of_the_day([(RECIPE, "qwen3-tiny", 4), (RECIPE, "qwen3-tiny-untied", 2), (RECIPE, "qwen3-tiny", 2),
                (QWEN3_5, "qwen3_5-tiny", 2)], 2),
)  # fmt: skip
def test_ranks_give_the_golden_tokens_and_leave_no_process(recipe, name, ranks, golden_of):
    """Two of four have the same key-value head. The two mixtures on two ranks are below, beside their faults. Four
    ranks cannot share the other models."""
    golden = golden_of(name)
    engine = build(recipe, golden.path, tensor_parallel_size=ranks, **SMALL).engine
    pids = followers()
    assert len(pids) == ranks - 1
    assert golden_tokens(engine, golden)
    engine.close()
    assert gone(pids)


class Faulty:
    """The pack of rank 0 with a fault; it comes to all exchanges, so that no rank waits."""

    def __init__(self, inner: Any, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def bind(self, op: Any, args: Any) -> Any:
        return functools.partial(self.run, op, args)

    def run(self, op: Any, args: Any) -> None:
        if self.fault == "experts off by one" and op.name in ("route", "route_topk"):
            args = replace(args, first_expert=args.first_expert + 1)
        if self.fault == "no sum" and getattr(args, "ranks", 1) > 1 and op.name != "gather_columns":
            self.inner.run(op, mapped(args, Tensor, lambda t: Tensor.from_numpy(t.numpy().copy())))
            args = replace(args, ranks=1)
        self.inner.run(op, args)


@pytest.mark.parametrize(
    ("recipe", "name", "config", "flags"), of_the_day(MIXTURES), ids=[m[1] for m in MIXTURES]
)
def test_a_fault_of_one_rank_changes_tokens(recipe, name, config, flags, golden_of, monkeypatch):
    """The comparison with goldens, and its negative controls: few tokens show each."""
    golden, own, pack = golden_of(name), config.of_rank, Faulty(CpuPack(), "none")

    def faulty(communicator, **way):
        pack.inner = CpuPack(communicator, **way)
        return pack

    monkeypatch.setattr(startup, "CpuPack", faulty)
    flags = {**SMALL, **flags, "tensor_parallel_size": 2, "enable_prefix_caching": False}
    engine = build(recipe, golden.path, **flags).engine
    assert golden_tokens(engine, golden)
    for pack.fault in ("experts off by one", "no sum"):
        assert not golden_tokens(engine, golden, 8), pack.fault
    pack.fault = "none"
    assert golden_tokens(engine, golden, 8)
    engine.close()
    other = lambda self, rank, ranks, **deals: own(self, ranks - 1 - rank, ranks, **deals)  # noqa: E731
    monkeypatch.setattr(config, "of_rank", other)
    engine = build(recipe, golden.path, **flags).engine
    assert not golden_tokens(engine, golden, 8), "another rank's part"
    engine.close()


def test_rounded_activations_of_two_ranks_are_near_those_of_one(golden_of):
    """At the likeliest tokens of both halves of the vocabulary, of which each rank has one. Control: not rounded."""
    golden, found = golden_of("deepseek_v4-tiny"), []
    for ranks, rounding in ((1, "on"), (2, "on"), (1, "off")):
        flags = {"tensor_parallel_size": ranks, "activation_quantization": rounding, "batch_invariant": True}
        engine = build(DEEPSEEK_V4, golden.path, **SMALL, **flags).engine
        session = Session(engine)
        one = session.submit(golden.prompt(2), 1, ignore_eos=True, prompt_logprobs=5)
        session.finish()
        entries = session.outcomes[one].prompt_logprobs
        found.append(
            {
                (n, t): p
                for n, e in enumerate(entries)
                for t, p in zip(e.top_token_ids, e.top_logprobs, strict=True)
            }
        )
        engine.close()
    alone, shared, unrounded = found
    assert {token // (640 // 2) for _, token in alone} == {0, 1}
    assert shared == pytest.approx(alone, abs=1e-3)
    assert max(abs(unrounded[key] - alone[key]) for key in alone.keys() & unrounded.keys()) > 0.01


def test_a_rank_that_cannot_start_is_named(monkeypatch):
    """Its GPU does not exist."""
    monkeypatch.setattr("openinfer.recipes.engine.startup.devices_of", lambda options: ["cpu", "cuda:99"])
    with pytest.raises(SetupError, match=r"rank 1 of 2 ended with exit code 1: .*CUDA"):
        build(RECIPE, TINY, tensor_parallel_size=2, **SMALL)
    assert gone(followers())


def test_a_rank_that_is_killed_while_it_starts_is_named(monkeypatch):
    popen = subprocess.Popen

    def killed(*args, **kwargs):
        process = popen(*args, **kwargs)
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(SetupError, match=r"rank 1 of 2 was killed by SIGKILL"):
        build(RECIPE, TINY, tensor_parallel_size=2, **SMALL)


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


@pytest.mark.parametrize(
    ("size", "fp8", "changes", "ranks", "why"),
    [
        ("4B", False, {"linear_num_value_heads": 30, "linear_num_key_heads": 15}, 4, "linear_num_value_heads is 30"),
        ("4B", False, {"linear_num_key_heads": 8, "linear_num_value_heads": 48}, 3, "num_attention_heads is 16"),
        ("4B", False, {"linear_num_key_heads": 6, "linear_num_value_heads": 12}, 4,
         "linear_num_key_heads is 6; 4 ranks cannot share or repeat"),
        ("0.8B", True, {}, 8, "intermediate_size is 3584; 8 ranks cannot share it in multiples of 128"),
        ("35B-A3B", True, {"shared_expert_intermediate_size": 192}, 2, "shared_expert_intermediate_size is 192"),
        ("35B-A3B", False, {"num_experts": 250}, 4, "num_experts is 250; 4 ranks cannot share it"),
    ],
)  # fmt: skip
def test_a_hybrid_that_ranks_cannot_share_is_refused(size, fp8, changes, ranks, why):
    raw = hybrid_json(size, fp8=fp8)
    raw["text_config"] |= changes
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        HybridConfig.parse(raw).of_rank(0, ranks)


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("qwen3-tiny-untied", Config, "num_attention_heads is 6; 4 ranks"),
        ("qwen3_5-moe-tiny", HybridConfig, "num_attention_heads is 2; 4 ranks"),
        ("deepseek_v4-tiny", DeepseekConfig, "o_groups is 2; 4 ranks"),
    ],
)
def test_goldens_that_four_ranks_cannot_share_are_refused(name, config, why):
    raw = json.loads((TINY.parent / name / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        config.parse(raw).of_rank(0, 4)


def test_ranks_share_every_part_of_a_hybrid():
    """A part of an FP8 weight may lie within one block of 128, as the shared expert's on 8 ranks."""
    for size in ("0.8B", "4B", "27B", "35B-A3B", "397B-A17B", "Qwen3-Next-80B-A3B"):
        raw = hybrid_json(size, fp8=size == "35B-A3B")
        raw.get("text_config", raw)["num_hidden_layers"] = 4
        whole = HybridConfig.parse(raw)
        for ranks in (2, 4, 8):
            parts = [whole.of_rank(rank, ranks) for rank in range(ranks)]
            rows = {"in_proj": [], "conv1d": []}
            for part in parts:
                arena, form = Arena(Device("null"), None), HybridFormat.published(part)
                places = HybridWeights.allocate(part, arena, bfloat16, form).places
                for name, _, source in (
                    *places.layers,
                    *(load for load in places.loads if "conv1d" in load.name),
                ):
                    if kind := next((one for one in rows if f".layers.1.linear_attn.{one}" in name), None):
                        rows[kind] += [(name, row) for row in range(source[0].start, source[0].stop)]
            inputs = whole.conv_size + whole.z_size + 2 * whole.value_heads
            assert [len(taken) for taken in rows.values()] == [inputs, whole.conv_size]
            assert [len(set(taken)) for taken in rows.values()] == [inputs, whole.conv_size]
            assert sum(part.state_bytes(2) for part in parts) == whole.state_bytes(2)


def test_ranks_share_every_part():
    """With 4 key-value heads on 8 ranks, pairs have the same one."""
    for size, kv_heads in (("0.6B", 8), ("8B", 8), ("32B", 4)):
        whole = Config.parse({**config_json(size), "num_key_value_heads": kv_heads})
        for ranks in (2, 4, 8):
            parts = [whole.of_rank(rank, ranks).part for rank in range(ranks)]
            for count in (whole.num_heads, whole.intermediate_size, whole.vocab_size):
                assert [n for part in parts for n in range(count)[part.slice(count)]] == list(range(count))
            heads = [part.first(kv_heads) for part in parts]
            assert sorted(set(heads)) == list(range(0, kv_heads, parts[0].of(kv_heads)))
            assert heads == sorted(heads)
            assert {part.of(kv_heads) for part in parts} == {max(1, kv_heads // ranks)}


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ({"device": "cpu"}, ["cpu", "cpu"]),
        ({"device": "cuda"}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda", "device_ids": "3,1"}, ["cuda:3", "cuda:1"]),
        ({"device": "cuda", "device_ids": "3", "tensor_parallel_size": 1}, ["cuda:3"]),
        ({"device": "cuda:3", "tensor_parallel_size": 1}, ["cuda:3"]),
    ],
)
def test_devices(flags, devices):
    assert devices_of(Options(**{"tensor_parallel_size": 2, **flags})) == devices


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"device": "cuda:1"}, "--device cuda:1 names one GPU: name them by --device-ids alone"),
        (
            {"device": "cpu", "device_ids": "0,1"},
            "--device-ids 0,1 names GPUs; leave it out with --device cpu",
        ),
        ({"device": "cpu", "device_ids": "1", "tensor_parallel_size": 1}, "--device-ids 1 names GPUs"),
        (
            {"device": "cuda", "device_ids": "0,1", "tensor_parallel_size": 1},
            "--device-ids 0,1: name one GPU",
        ),
        ({"device": "cuda", "device_ids": "0"}, "--device-ids 0: name 2 different GPUs"),
        ({"device": "cuda", "device_ids": "1,1"}, "--device-ids 1,1: name 2 different GPUs"),
        ({"device": "cuda", "device_ids": "0,x"}, "--device-ids 0,x: name 2 different GPUs"),
    ],
)
def test_devices_that_cannot_be(flags, why):
    with pytest.raises(SetupError, match=re.escape(why)):
        devices_of(Options(**{"tensor_parallel_size": 2, **flags}))


def test_no_ranks_are_refused():
    with pytest.raises(SetupError, match="--tensor-parallel-size 0: it must be from 1 to 64"):
        build(RECIPE, TINY, tensor_parallel_size=0, **SMALL)
