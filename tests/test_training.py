"""The hooks of training: weights updated in place, sleep, and a policy that a trainer improves through the engine."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer.frontend.contract import TERMINALS, Finished, Rejected, Request, Sleep, UpdateWeights, WakeUp
from openinfer.frontend.errors import Unsupported
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v4 import RECIPE as DEEPSEEK
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3_5 import RECIPE as HYBRID
from openinfer.sampler import SamplingParams
from openinfer.tensor import Checkpoint, OutOfMemory, SharedWeights, handover
from openinfer.tensor.arena import MappedMemory
from openinfer.tensor.handover import Giver

GOLDENS = Path(__file__).parent / "goldens"
TINY = GOLDENS / "qwen3-tiny"
PROMPT = [5, 9, 17, 3, 8, 8, 250, 31, 4, 4, 19, 2, 60, 61, 62, 63, 5, 9]
FLAGS: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256,
    "kv_cache_memory_bytes": 30_000_000, "batch_invariant": True,
}  # fmt: skip
IDS = itertools.count(1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = build(RECIPE, TINY, **FLAGS, enable_sleep_mode=True).engine
    yield made
    made.close()


def request(prompt: list[int], **params: Any) -> Request:
    most = params.pop("max_tokens", 12)
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **params})
    return Request(
        id=next(IDS), prompt_token_ids=prompt, sampling=sampling, max_tokens=most, arrival=time.monotonic()
    )


def generate(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Each request's tokens and their log-probabilities."""
    found: dict[int, tuple[list[int], list[float]]] = {one.id: ([], []) for one in requests}
    for one in requests:
        engine.submit(one)
    left = len(requests)
    while left:
        outputs = engine.step(0.01)
        for position, owner in enumerate(outputs.request_ids):
            assert outputs.logprobs is not None
            entry = outputs.logprobs[position]
            assert entry is not None
            found[owner][0].append(outputs.token_ids[position])
            found[owner][1].append(entry.logprob)
        for update in outputs.updates:
            assert not isinstance(update, Rejected), update
            left -= isinstance(update, TERMINALS)
    return list(found.values())


def weights_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint in float32."""
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)).astype(np.float32) for name in checkpoint.names}


def changed(folder: Path, source: Path, **values: np.ndarray[Any, Any]) -> Path:
    """A copy of a checkpoint in float32, with other values of some tensors."""
    folder.mkdir(exist_ok=True)
    tensors = weights_of(source)
    assert all(tensors[name].shape == value.shape for name, value in values.items())
    save_file(tensors | values, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


# -- weights updated in place --


def test_updated_weights_are_those_of_the_new_checkpoint(engine: Engine, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    other = changed(tmp_path / "new", TINY, **{name: -3 * weights_of(TINY)[name]})
    fresh = build(RECIPE, other, **FLAGS).engine
    expected = generate(fresh, [request(PROMPT)])
    fresh.close()
    before = generate(engine, [request(PROMPT)])
    engine.control(UpdateWeights(str(other), "step 1"))
    assert generate(engine, [request(PROMPT)]) == expected != before  # no cached prefix of the old weights
    assert engine.stats().weights_version == "step 1"
    assert generate(engine, [request(PROMPT)]) == expected
    assert engine.pool.stats.hit_tokens  # prefixes of the new weights are shared
    engine.control(UpdateWeights(str(TINY), "step 2"))
    assert generate(engine, [request(PROMPT)]) == before
    engine.check()


def test_a_checkpoint_of_another_model_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    before = generate(engine, [request(PROMPT)])
    for path, version, words in (
        (tmp_path / "nowhere", "1", "has no weights for this model"),
        (GOLDENS / "qwen3_5-tiny", "1", "has no weights for this model"),
        (TINY, "", "need a version"),
    ):
        with pytest.raises(Unsupported, match=words):
            engine.control(UpdateWeights(str(path), version))
    assert generate(engine, [request(PROMPT)]) == before
    assert engine.stats().weights_version == ""


def cached_tokens(engine: Engine) -> int:
    """Of PROMPT, twice as long; it is not asked for, so the next look finds as many."""
    lease = engine.pool.acquire([*PROMPT, *PROMPT])
    found = lease.num_cached + lease.num_loadable
    lease.release()
    return found


@pytest.mark.attack
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_refused_command_changes_nothing(ranks: int, tmp_path: Path) -> None:
    """Cached prefixes stay, in the pool, in host memory and on the disk; and so does all else."""
    made = build(
        RECIPE, TINY, **FLAGS, tensor_parallel_size=ranks, enable_sleep_mode=True, kv_offload_gb=0.05,
        kv_offload_dir=str(tmp_path / "tier"), kv_offload_disk_gb=0.1,
    ).engine  # fmt: skip
    wait_for_room(made)
    before = generate(made, [request([*PROMPT, *PROMPT])])
    tiers = made._cache.tiers
    assert tiers is not None
    tiers.take_all(made.pool)
    until = time.monotonic() + 30
    while not tiers.disk_bytes and time.monotonic() < until:
        made.step(0.01)
    generate(made, [request([*PROMPT, *PROMPT])])
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(b"no tensors")
    held = cached_tokens(made), tiers.host_bytes, tiers.disk_bytes
    assert all(held)
    for command in (
        UpdateWeights(str(tmp_path / "nowhere"), "1"),
        UpdateWeights(str(GOLDENS / "qwen3_5-tiny"), "1"),
        UpdateWeights(str(damaged), "1"),
        UpdateWeights(str(TINY), ""),
        UpdateWeights("\0", "1"),
        Sleep(0),
        Sleep(7),
        Sleep(-(2**63)),
        WakeUp(),
    ):
        with pytest.raises(Unsupported):
            made.control(command)
        assert (cached_tokens(made), tiers.host_bytes, tiers.disk_bytes) == held, command
    stats = made.stats()
    assert (stats.asleep, stats.refusal, stats.weights_version) == (False, "", "")
    assert generate(made, [request([*PROMPT, *PROMPT])]) == before
    made.close()


@pytest.mark.attack
def test_a_sleep_without_its_flag_keeps_cached_prefixes() -> None:
    made = build(RECIPE, TINY, **FLAGS).engine
    generate(made, [request([*PROMPT, *PROMPT])])
    held = cached_tokens(made)
    assert held
    with pytest.raises(Unsupported, match="--enable-sleep-mode"):
        made.control(Sleep())
    assert cached_tokens(made) == held
    made.close()


@pytest.mark.attack
def test_a_wake_that_finds_no_memory_can_be_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may still have the GPU."""
    before = generate(engine, [request(PROMPT)])
    engine.control(Sleep())
    with monkeypatch.context() as full:
        full.setattr(MappedMemory, "take_back", no_memory)
        for _ in range(2):
            with pytest.raises(Unsupported, match="try again later: the device is full"):
                engine.control(WakeUp())
            assert engine.stats().asleep
    engine.control(WakeUp())
    assert generate(engine, [request(PROMPT)]) == before


def no_memory(memory: MappedMemory) -> None:
    raise OutOfMemory("the device is full")


def no_array(*size: Any) -> None:
    raise MemoryError


def test_a_sleep_that_finds_no_memory_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = generate(engine, [request(PROMPT)])
    held = cached_tokens(engine)
    with monkeypatch.context() as full:
        full.setattr("openinfer.graph.runner.weights_desk.np.empty", no_array)
        with pytest.raises(Unsupported, match="the host has no memory"):
            engine.control(Sleep())
    assert not engine.stats().asleep
    assert cached_tokens(engine) == held
    assert generate(engine, [request(PROMPT)]) == before


def test_a_deep_sleep_stays_deep_through_another_one(engine: Engine) -> None:
    """Else weights that are zero would answer."""
    engine.control(Sleep(2))
    engine.control(WakeUp())
    engine.control(Sleep(1))
    engine.control(WakeUp())
    engine.submit(request(PROMPT))
    (refused,) = engine.step(0.0).updates
    assert isinstance(refused, Rejected)
    assert "POST /update_weights" in refused.reason


def test_nothing_changes_while_requests_run(engine: Engine) -> None:
    engine.submit(request(PROMPT))
    for command in (UpdateWeights(str(TINY), "1"), Sleep()):
        with pytest.raises(Unsupported, match="1 requests run or wait"):
            engine.control(command)
        engine.step(0.0)
    while not any(isinstance(update, Finished) for update in engine.step(0.01).updates):
        pass
    engine.control(UpdateWeights(str(TINY), "1"))


# -- sleep --


@pytest.mark.parametrize(("recipe", "name"), [(RECIPE, "qwen3-tiny"), (HYBRID, "qwen3_5-tiny")])
def test_after_a_sleep_answers_are_the_same(recipe: Any, name: str) -> None:
    engine = build(recipe, GOLDENS / name, **FLAGS, enable_sleep_mode=True).engine
    before = generate(engine, [request(PROMPT), request(PROMPT[:5])])
    tensors = [tensor for tensor in _tensors(engine) if np.any(tensor.numpy())]
    assert len(tensors) > 5
    engine.control(Sleep())
    assert engine.stats().asleep
    assert not any(np.any(tensor.numpy()) for tensor in tensors)  # the pages have gone
    engine.submit(asked := request(PROMPT))
    (refused,) = engine.step(0.0).updates
    assert isinstance(refused, Rejected)
    assert (refused.id, refused.reason) == (asked.id, "the engine sleeps; POST /wake_up first")
    with pytest.raises(Unsupported, match="wake it up first"):
        engine.control(UpdateWeights(str(GOLDENS / name), "1"))
    engine.control(WakeUp())
    assert not engine.stats().asleep
    assert generate(engine, [request(PROMPT), request(PROMPT[:5])]) == before
    with pytest.raises(Unsupported, match="does not sleep"):
        engine.control(WakeUp())
    engine.check()
    engine.close()


def test_ranks_take_weights_and_sleep_together(tmp_path: Path) -> None:
    engine = build(RECIPE, TINY, **FLAGS, enable_sleep_mode=True, tensor_parallel_size=2).engine
    before = generate(engine, [request(PROMPT)])
    engine.control(Sleep())
    engine.control(WakeUp())
    assert generate(engine, [request(PROMPT)]) == before
    name = "model.layers.0.mlp.down_proj.weight"
    other = changed(tmp_path / "new", TINY, **{name: -3 * weights_of(TINY)[name]})
    engine.control(UpdateWeights(str(other), "step 1"))
    alone = build(RECIPE, other, **FLAGS).engine
    ((tokens, logprobs),) = generate(engine, [request(PROMPT)])
    ((expected, close_to),) = generate(alone, [request(PROMPT)])
    assert tokens == expected != before[0][0]
    assert logprobs == pytest.approx(close_to, abs=1e-4)  # ranks add in another order
    engine.close()
    alone.close()


@pytest.mark.parametrize("command", of_the_day(["wake", "sleep", "update"]))
def test_ranks_carry_out_a_command_together_or_not_at_all(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 cannot: its host or its GPU has no memory, or it cannot read the folder."""
    site, flag = tmp_path / "site", tmp_path / "refuse"
    site.mkdir()
    (site / "sitecustomize.py").write_text(REFUSING.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    engine = build(RECIPE, TINY, **FLAGS, enable_sleep_mode=True, tensor_parallel_size=2).engine
    before = generate(engine, [request(PROMPT)])
    if command == "wake":
        engine.control(Sleep())
    held = cached_tokens(engine)
    flag.write_text(command)
    asked = {"wake": WakeUp(), "sleep": Sleep(), "update": UpdateWeights(str(TINY), "1")}[command]
    for _ in range(2):
        with pytest.raises(Unsupported, match="rank 1 cannot"):
            engine.control(asked)
        assert engine.stats().asleep == (command == "wake")
        assert cached_tokens(engine) == held
    flag.unlink()
    engine.control(asked)
    if command == "sleep":
        engine.control(WakeUp())
    assert generate(engine, [request(PROMPT)]) == before
    engine.check()
    engine.close()


REFUSING = """
import sys, pathlib
if any("follower_process" in one for one in sys.orig_argv):
    from openinfer.graph import NotPossible
    from openinfer.graph.runner import WeightsDesk
    for name in ("wake", "sleep", "update"):
        def half(desk, *args, name=name, inner=getattr(WeightsDesk, "_" + name)):
            flag = pathlib.Path({flag!r})
            if flag.exists() and flag.read_text() == name:
                raise NotPossible("rank 1 cannot")
            return inner(desk, *args)
        setattr(WeightsDesk, "_" + name, half)
"""
"""A start of Python where the desk of another rank refuses a command as long as a file names it."""


def _tensors(engine: Engine) -> list[Any]:
    """The weights of the first layer, and the batch's words."""
    model = engine.runner.model
    layer = model.weights.layers[0]  # type: ignore[attr-defined]
    names = [name for name in dir(layer) if not name.startswith("_")]
    found = [getattr(layer, name) for name in names]
    found += [getattr(part, n) for part in found for n in getattr(type(part), "__dataclass_fields__", ())]
    return [one for one in found if hasattr(one, "numpy")] + [model.batch.rows.words]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (RECIPE, "qwen3-tiny"),
        pytest.param(HYBRID, "qwen3_5-tiny", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, "deepseek_v4-tiny", marks=pytest.mark.slow),
    ],
)
def test_a_deep_sleep_drops_the_weights(recipe: Any, name: str) -> None:
    engine = build(recipe, GOLDENS / name, **FLAGS, enable_sleep_mode=True).engine
    before = generate(engine, [request(PROMPT)])
    desk = engine.training.desk
    engine.control(Sleep(1))
    whole = _kept_bytes(desk)
    engine.control(WakeUp())
    engine.control(Sleep(2))
    weights = sum(tensor.nbytes for tensor in desk.weights)
    assert _kept_bytes(desk) < whole - weights + 256 * len(desk.weights)
    engine.control(WakeUp())
    engine.submit(asked := request(PROMPT))
    (refused,) = engine.step(0.0).updates
    assert isinstance(refused, Rejected)
    assert refused.id == asked.id
    assert "the weights were dropped by a sleep of level 2; POST /update_weights" in refused.reason
    assert not engine.stats().asleep
    engine.control(UpdateWeights(str(GOLDENS / name), "1"))
    assert generate(engine, [request(PROMPT)]) == before
    with pytest.raises(Unsupported, match="level 3: 1 and 2 are possible"):
        engine.control(Sleep(3))
    engine.check()
    engine.close()


def _kept_bytes(desk: Any) -> int:
    return sum(len(buffer) for _, buffer in desk._saved)


@pytest.mark.parametrize("disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cached_prefixes_outlive_a_sleep_in_the_tiers(disk: bool, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"kv_offload_gb": 0.05, "enable_prefix_caching": True}
    if disk:
        tiers |= {"kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.1}
    engine = build(RECIPE, TINY, **FLAGS, enable_sleep_mode=True, **tiers).engine
    prompts = [[seed, *PROMPT, *PROMPT, *PROMPT] for seed in range(1, 9)]
    wait_for_room(engine)
    before = generate(engine, [request(prompt) for prompt in prompts])
    for level in (1, 2):
        engine.control(Sleep(level))
        assert not engine.pool.cached()
        engine.control(WakeUp())
        if level == 2:
            engine.control(UpdateWeights(str(TINY), "1"))
        loaded = engine.pool.stats.loaded_tokens
        assert generate(engine, [request(prompt) for prompt in prompts]) == before
        loaded = engine.pool.stats.loaded_tokens - loaded
        assert loaded == (8 * 48 if level == 1 else 0)
        engine.check()
    engine.close()


def test_a_disk_gives_no_blocks_of_other_weights_with_the_same_version(tmp_path: Path) -> None:
    """A restarted engine takes new weights under the name of the last. Those with the same bytes find their blocks."""
    name = "model.layers.0.self_attn.k_proj.weight"
    other = changed(tmp_path / "new", TINY, **{name: -weights_of(TINY)[name]})
    same, prompt = changed(tmp_path / "same", TINY), [7, *PROMPT, *PROMPT, *PROMPT]
    cached = []
    for path in (same, other, same):
        engine = build(
            RECIPE, TINY, **FLAGS, enable_prefix_caching=True, kv_offload_dir=str(tmp_path / "kv"),
            kv_offload_disk_gb=0.1,
        ).engine  # fmt: skip
        disk = engine._cache.tiers._disk
        clear = disk.clear
        disk.clear = lambda: None  # as where the records of the last process are found after the update
        engine.control(UpdateWeights(str(path), "1"))
        disk.clear = clear
        wait_for_room(engine)
        generate(engine, [request(prompt)])
        cached.append(engine.pool.stats.loaded_tokens)
        engine.close()
    assert cached == [0, 0, 48]


def wait_for_room(engine: Engine) -> None:
    """Host memory of the tiers is locked in a thread."""
    tiers = engine._cache.tiers
    assert tiers is not None
    until = time.monotonic() + 10
    while not tiers._host.has_room and time.monotonic() < until:
        engine.step(0.01)


# -- weights from the memory of another process --

GIVER = """
import sys
import numpy as np
from openinfer.tensor import Checkpoint, SharedWeights
with Checkpoint(sys.argv[1]) as source:
    shapes = {name: (source.info(name).shape, "float32") for name in source.names}
    with SharedWeights(sys.argv[2], shapes) as shared:
        for name in shapes:
            sign = -1 if "down_proj" in name else 1
            shared[name].numpy()[:] = sign * np.array(source.array(name)).astype("float32")
        print("ready", flush=True)
        sys.stdin.readline()
"""


def test_weights_come_from_another_processs_memory(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trainer.sock"
    giver = subprocess.Popen(
        [sys.executable, "-c", GIVER, str(TINY), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert giver.stdout is not None
    assert giver.stdout.readline() == "ready\n"
    before = generate(engine, [request(PROMPT)])
    engine.control(UpdateWeights(str(path), "7"))
    giver.communicate("\n")  # the engine has its own copy
    names = [name for name in weights_of(TINY) if "down_proj" in name]
    other = changed(tmp_path / "file", TINY, **{name: -weights_of(TINY)[name] for name in names})
    after = generate(engine, [request(PROMPT)])
    engine.control(UpdateWeights(str(other), "8"))
    assert generate(engine, [request(PROMPT)]) == after != before
    with pytest.raises(Unsupported, match="has no weights for this model"):
        engine.control(UpdateWeights(str(path), "9"))  # the other process has ended
    shapes = {"model.norm.weight": ((64,), "float32")}
    with SharedWeights(path, shapes), pytest.raises(Unsupported, match="missing"):
        engine.control(UpdateWeights(str(path), "9"))
    assert generate(engine, [request(PROMPT)]) == after
    assert engine.stats().weights_version == "8"


@pytest.mark.attack
@pytest.mark.parametrize("fault", ["silent", "no memory", "not sealed", "another user's"])
def test_a_socket_that_gives_no_weights_is_refused_at_once(
    engine: Engine, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And changes nothing: the engine waits for no stranger, and maps nothing that could become shorter."""
    before = generate(engine, [request(PROMPT)])
    path, file = str(tmp_path / "weights"), os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    os.truncate(file, 1 << 20)
    monkeypatch.setattr("openinfer.tensor.shared.CONNECT_S", 0.2)
    ended, words = (
        threading.Event(),
        {"silent": "timed out", "no memory": "no memory", "not sealed": "F_SEAL_SHRINK"},
    )

    def give(asking: socket.socket) -> None:
        if fault == "silent":
            ended.wait(30)
        else:
            socket.send_fds(asking, [b"\0" * 8], [file] * (fault != "no memory"))

    giver = Giver(path, give, "giver")
    if fault == "another user's":
        monkeypatch.setattr(handover, "_user", lambda connection: os.getuid() + 1)
    with pytest.raises(Unsupported, match=words.get(fault, "belongs to user")):
        engine.control(UpdateWeights(path, "9"))
    ended.set()
    giver.close()
    os.close(file)
    hit = engine.pool.stats.hit_tokens
    assert generate(engine, [request(PROMPT)]) == before
    assert engine.pool.stats.hit_tokens > hit
    assert engine.stats().weights_version == ""


# -- a trainer and the engine --


class Trainer:
    """A policy gradient in numpy: REINFORCE on the weight of the last norm.

    It runs the published Qwen3 arithmetic by itself, from the checkpoint alone. Its gradient is exact: a logit is the
    sum over the hidden size of table, weight and normalised hidden state."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = weights_of(folder)
        self.gain = self.weights["model.norm.weight"].copy()

    def hidden(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """The normalised hidden state after the last token, before the last norm's weight."""
        c, w = self.config, self.weights
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x, count = w["model.embed_tokens.weight"][tokens], len(tokens)
        mask = np.triu(np.full((count, count), -np.inf), 1)
        for number in range(c["num_hidden_layers"]):
            layer = {
                name.split(".", 3)[3]: value
                for name, value in w.items()
                if name.startswith(f"model.layers.{number}.")
            }
            h = self._norm(x, layer["input_layernorm.weight"])
            q, k, v = (
                (h @ layer[f"self_attn.{one}_proj.weight"].T).reshape(count, -1, size).swapaxes(0, 1)
                for one in "qkv"
            )
            q = self._rotate(self._norm(q, layer["self_attn.q_norm.weight"]))
            k = self._rotate(self._norm(k, layer["self_attn.k_norm.weight"]))
            k, v = (np.repeat(one, heads // groups, axis=0) for one in (k, v))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(size) + mask
            attended = (_softmax(scores) @ v).swapaxes(0, 1).reshape(count, heads * size)
            x = x + attended @ layer["self_attn.o_proj.weight"].T
            h = self._norm(x, layer["post_attention_layernorm.weight"])
            gate, up = (h @ layer[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
        found: np.ndarray[Any, Any] = self._norm(x[-1], np.ones_like(self.gain))
        return found

    def chances(self, hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The probability of every token."""
        return _softmax(self.weights["model.embed_tokens.weight"] @ (self.gain * hidden))

    def step(
        self, samples: list[tuple[np.ndarray[Any, Any], int]], rewards: np.ndarray[Any, Any], rate: float
    ) -> None:
        """Ascend the mean over samples of (reward - mean reward) * d log p(token) / d gain."""
        table, gradient = self.weights["model.embed_tokens.weight"], np.zeros_like(self.gain)
        for (hidden, token), advantage in zip(samples, rewards - rewards.mean(), strict=True):
            expected = self.chances(hidden) @ table
            gradient += advantage * (table[token] - expected) * hidden / len(samples)
        self.gain += rate * gradient

    def _norm(self, x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def _rotate(self, x: np.ndarray[Any, Any]) -> Any:
        half = x.shape[-1] // 2
        turns = np.outer(np.arange(x.shape[1]), self.config["rope_theta"] ** (-np.arange(half) / half))
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(turns), np.sin(turns)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax(x: np.ndarray[Any, Any]) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_policy_gradient_loop_between_a_trainer_and_the_engine(engine: Engine, tmp_path: Path) -> None:
    """The engine samples, the trainer learns from its tokens, and the engine takes the trainer's weights."""
    trainer, rng = Trainer(TINY), np.random.default_rng(0)
    prompts = [PROMPT[: 4 + n] for n in range(4)]
    states = [trainer.hidden(prompt) for prompt in prompts]
    means = []
    for update in range(8):
        asked = [
            (state, request(prompt, temperature=1.0, seed=int(rng.integers(1 << 30)), max_tokens=1))
            for prompt, state in zip(prompts, states, strict=True)
            for _ in range(16)
        ]
        sampled = generate(engine, [one for _, one in asked])
        samples = [(state, tokens[0]) for (state, _), (tokens, _) in zip(asked, sampled, strict=True)]
        for (state, token), (_, (logprob,)) in zip(samples, sampled, strict=True):
            # The log-probability that the engine sampled with is the one that the trainer differentiates.
            assert np.log(trainer.chances(state)[token]) == pytest.approx(logprob, abs=2e-3)
        rewards = np.array([float(token % 2 == 0) for _, token in samples])  # even tokens are good
        means.append(rewards.mean())
        trainer.step(samples, rewards, rate=12.0)
        folder = changed(tmp_path / f"update{update}", TINY, **{"model.norm.weight": trainer.gain})
        engine.control(UpdateWeights(str(folder), f"update {update}"))
        assert engine.stats().weights_version == f"update {update}"
    print([round(float(one), 2) for one in means])
    assert np.mean(means[-2:]) > means[0] + 0.2


# -- over HTTP --


def ask(server: Any, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and answer; a POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_answers_name_the_weights_and_a_server_sleeps(start: Any, tmp_path: Path) -> None:
    server = start(TINY, "--device", "cpu", "--kv-cache-memory-bytes", "30000000", "--enable-sleep-mode")
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    _, before = ask(server, "/v1/completions", body)
    assert before["system_fingerprint"].count("-") == 1
    other = changed(tmp_path, TINY, **{"model.norm.weight": -weights_of(TINY)["model.norm.weight"]})
    assert ask(server, "/update_weights", {"path": str(other), "version": "v7"}) == (200, {"version": "v7"})
    _, after = ask(server, "/v1/completions", body)
    assert after["system_fingerprint"] == before["system_fingerprint"] + "-v7"
    assert after["choices"][0]["logprobs"] != before["choices"][0]["logprobs"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert ask(server, "/v1/chat/completions", chat)[1]["system_fingerprint"].endswith("-v7")
    assert ask(server, "/update_weights", {"path": "/nowhere", "version": "v8"})[0] == 409
    assert ask(server, "/update_weights", {"path": str(other), "version": ""})[0] == 400
    assert ask(server, "/sleep?level=3", {})[0] == 409
    assert ask(server, "/wake_up?tags=weights", {})[0] == 400
    assert ask(server, "/sleep?level=1", {}) == (200, {"is_sleeping": True})
    assert ask(server, "/is_sleeping") == (200, {"is_sleeping": True})
    status, refused = ask(server, "/v1/completions", body)
    assert (status, refused["error"]["code"]) == (503, "sleeping")
    assert ask(server, "/health")[0] == 200
    assert sleep_state(server) == "weights_offloaded"
    assert ask(server, "/wake_up", {}) == (200, {"is_sleeping": False})
    assert ask(server, "/v1/completions", body)[1]["choices"] == after["choices"]
    assert ask(server, "/sleep?level=2", {}) == (200, {"is_sleeping": True})
    assert sleep_state(server) == "discard_all"
    assert ask(server, "/wake_up", {}) == (200, {"is_sleeping": False})
    assert sleep_state(server) == "awake"
    status, refused = ask(server, "/v1/completions", body)
    assert (status, refused["error"]["code"]) == (503, "sleeping")
    assert "POST /update_weights" in refused["error"]["message"]
    assert ask(server, "/update_weights", {"path": str(other), "version": "v7"})[0] == 200
    assert ask(server, "/v1/completions", body)[1]["choices"] == after["choices"]


def sleep_state(server: Any) -> str:
    """The state in the metrics."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        found = re.findall(
            r'^vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} 1.0', answer.read().decode(), re.M
        )
    (state,) = found
    return str(state)
