"""Adapters (LoRA) in an engine: each request has the tokens of the merged checkpoint, whatever its company."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from next_form import as_next
from safetensors.numpy import save_file
from test_eagle3 import speculation, write_head

from openinfer.cli import recipes
from openinfer.cli.bench import points as steps
from openinfer.cli.explain.segments import Outline, Placed
from openinfer.frontend.contract import LoadAdapter, Rejected, UnloadAdapter
from openinfer.frontend.errors import Unsupported
from openinfer.kernels import H200
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.tensor import Checkpoint

GOLDENS = Path(__file__).parent / "goldens"
MODELS = ("qwen3-tiny-untied", "qwen3_5-tiny", "qwen3_5-moe-tiny", "qwen3_next")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z",
       "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "out_proj")  # fmt: skip
ADAPTERS: Mapping[str, tuple[int, int, Sequence[str]]] = {  # rank, alpha, targets
    "all": (8, 16, ALL),
    "two": (4, 4, ("q_proj", "v_proj", "in_proj_z", "in_proj_qkvz")),
    "mlp": (16, 8, ("gate_proj", "down_proj")),
}
FLAGS = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 6, "kv_cache_memory_bytes": 64 << 20}
NEW = 14


def weights_of(folder: Path) -> dict[str, Any]:
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}


def write_adapter(
    weights: Mapping[str, Any], folder: Path, rank: int, alpha: int, targets: Sequence[str], seed: int
) -> dict[str, Any]:
    """A PEFT folder with random matrices; the weights merged with it, in float32."""
    rng, tensors, names = np.random.default_rng(seed), {}, set()
    merged = {name: value.astype(np.float32) for name, value in weights.items()}
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        if (
            name == module
            or module.rpartition(".")[2] not in targets
            or name.startswith("mtp.")
            or ".experts." in name
            or value.ndim != 2
        ):
            continue
        rows, columns = value.shape
        spread = 0.35 * merged[name].std() * np.sqrt(columns / rank)
        a = (rng.standard_normal((rank, columns)) / np.sqrt(columns)).astype(np.float32)
        b = (rng.standard_normal((rows, rank)) * spread).astype(np.float32)
        at = "base_model.model." + module
        tensors |= {at + ".lora_A.weight": a, at + ".lora_B.weight": b}
        names.add(module.rpartition(".")[2])
        merged[name] += alpha / rank * b @ a
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


class Made:
    """A model, its adapters, and the tokens of each merged checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model, self.folder = GOLDENS / name, folder
        if name == "qwen3_next":
            self.model = as_next(GOLDENS / "qwen3_5-moe-tiny", folder / "model")
        weights = weights_of(self.model)
        rng = np.random.default_rng(3)
        shared = rng.integers(3, 200, 70).tolist()
        self.prompts = [shared + rng.integers(3, 200, 3 + 9 * n).tolist() for n in range(4)]
        self.want = {"": self.tokens(self.model)}
        for seed, (adapter, (rank, alpha, targets)) in enumerate(ADAPTERS.items()):
            merged = write_adapter(weights, folder / adapter, rank, alpha, targets, seed)
            whole = folder / f"{adapter}-merged"
            shutil.copytree(self.model, whole, ignore=shutil.ignore_patterns("*.safetensors"))
            save_file(merged, whole / "model.safetensors")
            self.want[adapter] = self.tokens(whole)

    def engine(self, folder: Path, **flags: Any) -> Session:
        config = json.loads((folder / "config.json").read_text())
        recipe = next(one for one in recipes.installed() if one.matches(config))
        return Session(build(recipe, folder, **{**FLAGS, **flags}).engine)

    def serving(self, *names: str, **flags: Any) -> Session:
        """An engine with these adapters."""
        modules = [f"{name}={self.folder / name}" for name in names]
        return self.engine(self.model, enable_lora=True, lora_modules=modules, **flags)

    def tokens(self, folder: Path) -> list[list[int]]:
        session = self.engine(folder)
        ids = [ask(session, prompt, "") for prompt in self.prompts]
        session.finish()
        session.engine.close()
        return [session.outcomes[one].tokens for one in ids]

    def check(self, session: Session, asked: Mapping[int, tuple[str, int]]) -> None:
        session.finish()
        for request, (adapter, index) in asked.items():
            assert session.outcomes[request].tokens == self.want[adapter][index], (adapter, index)


def ask(session: Session, prompt: Sequence[int], adapter: str, **more: Any) -> int:
    return session.submit(prompt, NEW, ignore_eos=True, adapter=adapter, **more)


@pytest.fixture(scope="module", params=MODELS)
def made(request: Any, tmp_path_factory: Any) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Made:
    return Made("qwen3-tiny", tmp_path_factory.mktemp("qwen3-tiny"))


def test_tokens_are_those_of_merged_checkpoints_in_one_batch(made: Made) -> None:
    """The adapters change tokens, so one that is left out or swapped would be noticed."""
    assert len({tuple(map(tuple, tokens)) for tokens in made.want.values()}) == 1 + len(ADAPTERS)
    session = made.serving(*ADAPTERS, max_loras=3, max_num_batched_tokens=50)
    asked = {
        ask(session, prompt, adapter): (adapter, index)
        for index, prompt in enumerate(made.prompts)
        for adapter in ("", *ADAPTERS)
    }
    made.check(session, asked)
    assert any(session.outcomes[one].cached for one in asked), "no prefix was found, so the test shows little"
    session.engine.close()


@pytest.mark.parametrize("made", of_the_day(list(MODELS)), indirect=True)
def test_ranks_have_their_parts_of_adapters(made: Made) -> None:
    """Adapters take turns in one place, and one more is loaded while requests run."""
    session = made.serving("all", "two", max_loras=1, tensor_parallel_size=2)
    asked = {ask(session, made.prompts[0], adapter): (adapter, 0) for adapter in ("all", "", "two")}
    session.step()
    loaded = session.engine.control(LoadAdapter("mlp", str(made.folder / "mlp")))
    assert isinstance(loaded, Future)
    loaded.result(10)
    asked |= {ask(session, made.prompts[1], adapter): (adapter, 1) for adapter in ("mlp", "all")}
    made.check(session, asked)
    session.engine.close()


def check_drafts(made: Made, config: str) -> None:
    session = made.serving(*ADAPTERS, max_loras=3, speculative_config=config, max_num_batched_tokens=50)
    drafting: Any = session.engine.runner.drafting  # type: ignore[attr-defined]
    drafting.worth.choose = lambda available, rows, cost: 2 if available else 0
    asked = {
        ask(session, prompt, adapter): (adapter, index)
        for index, prompt in enumerate(made.prompts[:2])
        for adapter in ("", *ADAPTERS)
    }
    made.check(session, asked)
    assert session.engine.stats().draft_tokens > 20
    assert len(drafting.worth._adapters) == len(ADAPTERS)
    session.engine.close()


def test_a_head_that_drafts_has_no_adapter_and_changes_no_token(small: Made) -> None:
    """It reads the hidden states of the adapted model."""
    write_head(small.folder / "head")
    check_drafts(small, speculation(small.folder / "head"))


@pytest.mark.parametrize("made", ["qwen3_5-tiny"], indirect=True)
def test_an_mtp_layer_has_no_adapter_and_changes_no_token(made: Made) -> None:
    check_drafts(made, '{"method": "mtp", "num_speculative_tokens": 2}')


@pytest.mark.parametrize("made", of_the_day(list(MODELS)), indirect=True)
@pytest.mark.parametrize("places", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_more_adapters_than_places_take_turns(made: Made, places: int) -> None:
    session = made.serving(
        *ADAPTERS, max_loras=places, scheduling_policy="openinfer.recipes.engine.testing.restless:fcfs"
    )
    asked = {}
    for index, prompt in enumerate(made.prompts[:3]):
        for adapter in ("mlp", "", "all", "two", "mlp"):
            asked[ask(session, prompt, adapter)] = adapter, index
            session.step()
    made.check(session, asked)
    assert all(not (one.running or one.waiting) for one in session.engine.stats().adapters)
    session.engine.check()
    assert session.engine.pool.num_free == session.engine.pool.num_total
    session.engine.close()


def test_a_prefix_is_found_under_its_own_adapter_alone(small: Made) -> None:
    session, prompt = small.serving("all", "two", max_loras=2), small.prompts[3]
    cached = []
    for adapter in ("", "all", "two", "", "all", "two"):
        one = ask(session, prompt, adapter)
        small.check(session, {one: (adapter, 3)})
        cached.append(session.outcomes[one].cached)
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 64
    session.engine.close()


def carry_out(session: Session, command: LoadAdapter | UnloadAdapter) -> None:
    future = session.engine.control(command)
    if isinstance(future, Future):
        future.result(20)


def test_adapters_come_and_go_while_requests_run(small: Made) -> None:
    session, prompt = small.serving(max_loras=1), small.prompts[2]
    base = ask(session, prompt, "")
    refused = ask(session, prompt, "x")
    carry_out(session, LoadAdapter("x", str(small.folder / "all")))
    first = ask(session, prompt, "x")
    for _ in range(6):
        session.step()
    assert 0 < len(session.outcomes[first].tokens) < NEW
    carry_out(session, UnloadAdapter("x"))
    late = ask(session, prompt, "x")
    carry_out(session, LoadAdapter("x", str(small.folder / "two")))
    second = ask(session, prompt, "x")
    small.check(session, {base: ("", 2), first: ("all", 2), second: ("two", 2)})
    for one in (refused, late):
        (terminal,) = session.outcomes[one].terminals
        assert isinstance(terminal, Rejected)
        assert terminal.reason == "the adapter 'x' is not loaded"
    assert session.outcomes[second].cached == 0, "a prefix of another adapter of that name was found"
    carry_out(session, LoadAdapter("x", str(small.folder / "mlp"), in_place=True))
    small.check(session, {ask(session, prompt, "x"): ("mlp", 2)})
    with pytest.raises(Unsupported, match="has already been loaded"):
        carry_out(session, LoadAdapter("x", str(small.folder / "mlp")))
    carry_out(session, UnloadAdapter("x"))
    with pytest.raises(Unsupported, match="'x' is not loaded"):
        carry_out(session, UnloadAdapter("x"))
    session.engine.close()


def test_a_bad_adapter_is_refused_and_no_request_notices(small: Made, tmp_path: Path) -> None:
    session, prompt = small.serving("all"), small.prompts[0]
    asked = {ask(session, prompt, adapter): (adapter, 0) for adapter in ("", "all")}
    session.step()
    weights = weights_of(GOLDENS / "qwen3-tiny")
    broken = tmp_path / "nan"
    write_adapter({name: value * np.nan for name, value in weights.items()}, broken, 4, 4, ["q_proj"], 0)
    for folder, why in ((broken, "not finite"), (tmp_path / "none", "there is no adapter_config.json")):
        with pytest.raises(Unsupported, match=why):
            carry_out(session, LoadAdapter("bad", str(folder)))
    write_adapter(weights, tmp_path / "wide", 32, 4, ["q_proj"], 0)
    with pytest.raises(Unsupported, match="--max-lora-rank is 16; raise it"):
        carry_out(session, LoadAdapter("bad", str(tmp_path / "wide")))
    small.check(session, asked)
    assert [one.name for one in session.engine.stats().adapters] == ["all"]
    session.engine.close()


def test_aborts_and_a_full_queue(small: Made) -> None:
    session, prompt = small.serving("all", "two", max_loras=1, max_num_queued_reqs=2), small.prompts[0]
    running = ask(session, prompt, "all")
    session.step()
    waits = [ask(session, prompt, "two") for _ in range(3)]
    (terminal,) = (one for one in session.engine.step(0.0).updates if isinstance(one, Rejected))
    assert (terminal.id, terminal.code) == (waits[2], "queue_full")
    session.outcomes[waits[2]].terminals.append(terminal)
    state = {one.name: (one.running, one.waiting) for one in session.engine.stats().adapters}
    assert state == {"all": (1, 0), "two": (0, 2)}
    assert session.engine.stats().waiting == 2
    session.engine.abort(waits[0])
    session.engine.abort(running)
    session.finish()
    assert session.outcomes[waits[1]].tokens == small.want["two"][0]
    session.engine.close()


def test_a_step_does_not_wait_for_an_adapter_that_is_read(small: Made, monkeypatch: Any) -> None:
    session = small.serving(max_loras=1)
    adapters = session.engine.runner.model.batch.adapters
    read = type(adapters).read
    done = threading.Event()
    monkeypatch.setattr(type(adapters), "read", lambda *args: done.wait(60) and read(*args))
    future = session.engine.control(LoadAdapter("x", str(small.folder / "all")))
    one = ask(session, small.prompts[0], "")
    small.check(session, {one: ("", 0)})
    assert not future.done()
    for command in (LoadAdapter("x", "elsewhere"), UnloadAdapter("x")):
        with pytest.raises(Unsupported, match="the adapter 'x' is being loaded; try again"):
            session.engine.control(command)
    done.set()
    future.result(20)
    small.check(session, {ask(session, small.prompts[0], "x"): ("all", 0)})
    done.clear()
    future = session.engine.control(LoadAdapter("x", str(small.folder / "two"), in_place=True))
    with pytest.raises(Unsupported, match="is being loaded"):  # else it would be there again after this
        session.engine.control(UnloadAdapter("x"))
    done.set()
    future.result(20)
    carry_out(session, UnloadAdapter("x"))
    assert session.engine.stats().adapters == []
    session.engine.close()


def test_engines_without_adapters_refuse_them(small: Made) -> None:
    session = small.engine(small.model)
    one = ask(session, small.prompts[0], "all")
    session.finish()
    (terminal,) = session.outcomes[one].terminals
    assert terminal.reason == "this engine has no adapters; start it with --enable-lora"
    with pytest.raises(Unsupported, match="start it with --enable-lora"):
        session.engine.control(LoadAdapter("x", "y"))
    assert session.engine.runner.model.batch.adapters is None
    session.engine.close()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lora_modules": ["a=b"]}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "max_loras": 0}, "--max-loras 0: it must be from 1 to 1024"),
        ({"enable_lora": True, "max_lora_rank": 9}, "--max-lora-rank 9: 8, 16, 32"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "--lora-modules .a.: give NAME=PATH"),
        ({"enable_lora": True, "lora_modules": [" =x"]}, "--lora-modules . =x.: give NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "'a' comes twice"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "'path'; name and path are needed"),
        ({"enable_lora": True, "lora_modules": ['{"name":' + "[" * 100_000]}, "name and path are needed"),
        (
            {"enable_lora": True, "lora_modules": ['{"name": "a", "path": "/none"}']},
            "/none: there is no adapter",
        ),
    ],
)
def test_flags_that_are_refused(small: Made, flags: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        small.engine(small.model, **flags)
    assert getattr(caught.value, "user_can_mend", False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_plan_for_a_gpu_counts_the_places(name: str) -> None:
    """Two adapters of rank 32 of a published size, and the kernels for them."""
    (recipe,) = (one for one in recipes.installed() if one.name == name)
    source, sizes = Source(recipe.published()["4B"]), {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    plain = Outline(recipe, source, recipe.options(**sizes), H200)
    served = Outline(
        recipe, source, recipe.options(**sizes, enable_lora=True, max_loras=2, max_lora_rank=32), H200
    )
    assert served.memory["adapters"] > 2 * (40 << 20)
    assert served.memory["weights"] == plain.memory["weights"]
    assert "adapters" not in plain.memory
    adapted = {call.op.name for calls in served.steps.values() for call in calls if _adapted(call)}
    assert adapted == {"gate_up_silu", "linear_add", "norm_linear"}
    assert not any(_adapted(call) for calls in plain.steps.values() for call in calls)


def _adapted(call: Any) -> bool:
    return getattr(call.args, "lora", None) is not None


def test_models_without_adapters_refuse_the_flag(small: Made) -> None:
    with pytest.raises(ValueError, match="--enable-lora is not possible with deepseek_v4: no op adds"):
        small.engine(GOLDENS / "deepseek_v4-tiny", enable_lora=True)
    llama = GOLDENS.parents[1] / "examples" / "llama" / "golden" / "llama-tiny"
    with pytest.raises(ValueError, match="--enable-lora: this model's recipe runs no adapters"):
        small.engine(llama, enable_lora=True)


def test_a_benchmark_gives_rows_adapters(small: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its step has none of an adapter's work. Dummy weights have dummy adapters."""
    session = small.engine(small.model, enable_lora=True, max_loras=2, load_format="dummy")
    engine: Any = session.engine
    assert [state.name for state in engine.stats().adapters] == ["dummy-1", "dummy-2"]
    asked: list[str] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request.adapter), submit(request))[1])
    steps.run_points(engine, small.prompts[:3], 4)
    assert asked == ["dummy-2", "dummy-1", "dummy-2"]
    placed = Placed(engine, [8, 8, 0], [4, 4, 4], np.random.default_rng(0))
    rows = engine.runner.model.batch.rows["adapters"]
    placed.step([1, 2, 3], 4)
    assert rows.numpy()[:4].tolist() == [0, 1, 2, 1]
    placed.leave()
    engine.close()
