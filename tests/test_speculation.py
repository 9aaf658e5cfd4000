"""Drafts on whole engines: turns of a conversation go on from what drafts left in the cache."""

from __future__ import annotations

import datetime
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspark_form import write_dspark
from safetensors.numpy import load_file, save_file
from test_eagle3 import speculation, write_head

from openinfer.cli import recipes
from openinfer.frontend.http import Tokenizer
from openinfer.graph import Buckets, Shape
from openinfer.graph.runner import segments
from openinfer.graph.runner.verifying import write_verified
from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Pack, Target
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.testing import Planted
from openinfer.recipes.engine.testing.restless import fcfs
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.sampler.form import Grammar
from openinfer.tensor import Device, Stream, Tensor, bfloat16, uint8

ROOT = Path(__file__).parents[1]
GOLDENS, DEMO = ROOT / "tests" / "goldens", ROOT / "demo"
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
FP8_MTP = MTP.replace("}", ', "quantization": "fp8"}')
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


TODAY = datetime.date.today().toordinal()


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([TODAY % 3], id="of the day"),
        pytest.param(range(3), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_5-tiny", "deepseek_v4-tiny"])
def test_a_prefix_that_drafts_have_written_is_as_good_as_another(
    session: Callable[..., Any], name: str, starts: Sequence[int]
) -> None:
    """Outputs cross the edges of pages amid drafts, and end there. The next turn finds them in the cache."""
    flags = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    if name.startswith("deepseek"):
        flags["activation_quantization"] = "off"
    plain = session(GOLDENS / name, enable_prefix_caching=False, **flags)
    drafted = session(GOLDENS / name, speculative_config=NGRAM, **flags)
    rng, answers = random.Random(1), list[list[int]]()
    drafted.engine.runner.drafting.make_drafter = lambda: Planted(answers)
    for start in starts:
        prompt = [rng.randrange(3, 500) for _ in range(118 + start)]
        for turn in range(4):
            count = 9 + start + 3 * turn
            asked = [(prompt, count, {"ignore_eos": True})]
            (want,) = plain.outcomes_of(asked)
            answers.append(prompt + want.tokens)
            (got,) = drafted.outcomes_of(asked)
            assert got.tokens == want.tokens, (start, turn)
            prompt = [*prompt, *want.tokens, *[rng.randrange(3, 500) for _ in range(117 - count)]]
    stats = drafted.engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.accepted_draft_tokens > 20


def test_a_request_without_drafts_is_told_of_none(session: Callable[..., Any]) -> None:
    """Beside one with drafts, whose terminal counts them."""
    drafted, answers = session(GOLDENS / "qwen3-tiny", speculative_config=NGRAM), list[list[int]]()
    drafted.engine.runner.drafting.make_drafter = lambda: Planted(answers)
    prompt, ends = list(range(20, 60)), {"ignore_eos": True}
    (want,) = drafted.outcomes_of([(prompt, 24, {**ends, "disable_spec_decode": True})])
    assert want.terminals[0].drafts is None
    assert drafted.engine.stats().drafts == 0
    answers.append(prompt + want.tokens)
    one, other = drafted.outcomes_of(
        [(prompt, 24, ends), (prompt, 24, {**ends, "disable_spec_decode": True})]
    )
    assert one.tokens == other.tokens == want.tokens
    assert other.terminals[0].drafts is None
    stats, drafts = drafted.engine.stats(), one.terminals[0].drafts
    assert (drafts.steps, drafts.tokens) == (stats.drafts, stats.draft_tokens)
    assert drafts.accepted == stats.accepted_by_position
    assert sum(drafts.accepted) > 5


class Faulty:
    """Repeats the last token, and after a while proposes one that does not exist."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return [10**6 if len(tokens) > 50 else tokens[-1]] * count


def test_a_drafter_that_proposes_no_token_is_turned_off(
    session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = session(GOLDENS / "qwen3-tiny")
    config = f'{{"method": "custom_class", "model": "{__name__}:Faulty", "num_speculative_tokens": 2}}'
    drafted = session(GOLDENS / "qwen3-tiny", speculative_config=config)
    drafted.engine.runner.drafting.worth.choose = lambda available, rows, cost: 2 if available else 0
    asked = [(list(range(20, 60 + n)), 24, {"ignore_eos": True}) for n in (0, 3)]
    wanted, found = plain.outcomes_of(asked), drafted.outcomes_of(asked)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in wanted]
    assert drafted.engine.stats().draft_tokens > 0
    assert sum("the drafter is off" in record.getMessage() for record in caplog.records) == 1


def test_steps_after_drafts_have_no_room_for_them(session: Callable[..., Any]) -> None:
    """One step takes the accepted drafts of a recurrent state. The steps after it run as without drafts."""
    drafted = session(GOLDENS / "qwen3_5-tiny", speculative_config=NGRAM)
    runner, levels = drafted.engine.runner, list[int]()
    runner.drafting.worth.choose = lambda available, rows, cost: 2 if len(levels) == 5 else 0
    runner.drafting.worth.idle = lambda cost: 0
    launch = runner.graphs.launch

    def noted(key: tuple[Any, ...]) -> None:
        levels.extend([key[1].drafts] if key[0] == "forward" else [])
        launch(key)

    runner.graphs.launch = noted
    runner.drafting.make_drafter = lambda: SimpleNamespace(propose=lambda tokens, count: [5] * count)
    drafted.outcomes_of([(list(range(20, 60)), 24, {"ignore_eos": True})])
    assert levels[:10] == [0, 0, 0, 0, 0, 2, 1, 0, 0, 0]
    assert not any(levels[10:])


def test_suffixes_find_drafts_in_a_text_that_repeats_itself(session: Callable[..., Any]) -> None:
    config = '{"method": "suffix", "num_speculative_tokens": 4}'
    plain, drafted = (session(GOLDENS / "qwen3-tiny", speculative_config=one) for one in (None, config))
    asked = [([39 + 6 * n] * 30, 40, {"ignore_eos": True}) for n in (0, 1)]
    wanted, found = plain.outcomes_of(asked), drafted.outcomes_of(asked)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in wanted]
    stats = drafted.engine.stats()
    assert stats.accepted_draft_tokens > 20
    assert stats.steps < plain.engine.stats().steps


ASKED = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 1.2, "seed": 5, "top_k": 20, "min_tokens": 20, "presence_penalty": 0.5},
]
TEXTS = ["What is the capital of France?", "Sort 5 3 9 1", "Extract JSON: Anna is 31", "How much is 12 + 30?"]


TURN = {
    "qwen3_5": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "deepseek_v4": "<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜></think>",
}


PLAIN: dict[tuple[str, str], list[Any]] = {}
"""What models without drafts answer, by model and cache."""


@pytest.mark.parametrize(
    ("name", "ranks", "cache"),
    [
        pytest.param("qwen3_5", 1, "fp8", marks=pytest.mark.slow),
        # One rank of one model and two of the other are of the day.
        *(
            pytest.param(name, ranks, "auto", marks=() if (number + ranks + TODAY) % 2 else pytest.mark.slow)
            for number, name in enumerate(("qwen3_5", "deepseek_v4"))
            for ranks in (1, 2)
        ),
    ],
)
def test_drafts_of_the_models_own_layers_change_no_token(
    session: Callable[..., Any], name: str, ranks: int, cache: str
) -> None:
    """Greedy and sampled requests, in chunks, with preemption, cached prefixes and prompts that are scored."""
    path = DEMO / name
    tokenizer = Tokenizer.load(path)
    asked = [(tokenizer.encode_short(TURN[name].format(text)), 30, one) for text in TEXTS for one in ASKED]
    flags = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "kv_cache_dtype": cache}
    flags |= {"batch_invariant": cache == "fp8"}  # another order of sums makes another code of some values
    if (name, cache) not in PLAIN:
        plain = session(path, enable_prefix_caching=False, **flags)  # other tests ask one at a time
        PLAIN[name, cache] = plain.outcomes_of(asked)
    small = {"max_num_batched_tokens": 32, "scheduling_policy": fcfs(32), "tensor_parallel_size": ranks}
    config = FP8_MTP if cache == "fp8" else MTP
    drafted = session(path, speculative_config=config, **small, **flags)
    found = drafted.outcomes_of(asked)
    for (_, _, options), want, got in zip(asked, PLAIN[name, cache], found, strict=True):
        assert got.tokens == want.tokens, options
        for mine, theirs in zip(want.logprobs, got.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or abs(mine.logprob - theirs.logprob) < 1e-4
        assert len(got.prompt_logprobs) == len(want.prompt_logprobs)
    stats = drafted.engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_draft_tokens > 0.5 * stats.draft_tokens > 50


def test_layers_draft_for_rows_with_a_grammar(session: Callable[..., Any]) -> None:
    """Their drafts are read back, because masks follow them. Forced tokens take their places."""
    path, schema = DEMO / "qwen3_5", {"name": {"type": "string"}, "age": {"type": "integer"}}
    tokenizer = Tokenizer.load(path)
    grammar = Grammar.of_schema(
        {"type": "object", "properties": schema, "required": list(schema), "additionalProperties": False}
    )
    flags = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
    prompt = tokenizer.encode_short(TURN["qwen3_5"].format("Extract JSON: Anna is 31"))
    found = []
    for config in (None, MTP):
        made = session(path, speculative_config=config, **flags)
        made.engine.control(tokenizer.token_table(""))
        for seed, temperature in enumerate((0.0, 0.7, 1.0)):
            made.submit(prompt, 60, grammar=grammar, temperature=temperature, seed=seed)
            made.submit(prompt, 30, temperature=temperature, seed=seed)
        made.finish()
        found.append([outcome.tokens for outcome in made.outcomes.values()])
    assert found[0] == found[1]
    drafts = [outcome.terminals[0].drafts for outcome in made.outcomes.values()]
    assert all(sum(one.accepted) > 0.3 * one.tokens > 2 for one in drafts[::2])


def test_a_prompt_is_scored_before_layers_draft(session: Callable[..., Any]) -> None:
    """Layers draft early in a step with a grammar, and overwrite the hidden states that scores are made of."""
    path = DEMO / "qwen3_5"
    tokenizer, found = Tokenizer.load(path), []
    prompt = tokenizer.encode_short(TURN["qwen3_5"].format(TEXTS[0]))
    for config in (None, MTP):
        made = session(path, speculative_config=config, max_model_len=256, kv_cache_memory_bytes=64 << 20)
        made.engine.control(tokenizer.token_table(""))
        made.submit(prompt, 8, grammar=Grammar("regex", "[a-e]{8,12}!"))
        scored = made.submit(prompt, 4, prompt_logprobs=1)
        made.finish()
        found.append([one.logprob for one in made.outcomes[scored].prompt_logprobs])
    assert len(found[0]) == len(prompt) - 1
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def write_mixture(folder: Path) -> None:
    """qwen3_5-moe-tiny with an MTP head, which has the weights of a layer of its own."""
    source = GOLDENS / "qwen3_5-moe-tiny"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    layer, rng = "model.language_model.layers.1.", np.random.default_rng(1)
    tensors = load_file(source / "model.safetensors")
    own = {n.replace(layer, "mtp.layers.0."): x for n, x in tensors.items() if n.startswith(layer)}
    norm = tensors["model.language_model.norm.weight"]
    own |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    fc = rng.standard_normal((len(norm), 2 * len(norm))) / len(norm) ** 0.5
    save_file({**tensors, **own, "mtp.fc.weight": fc.astype(norm.dtype)}, folder / "model.safetensors")


def test_the_head_of_a_mixture_drafts(session: Callable[..., Any], tmp_path: Path) -> None:
    write_mixture(tmp_path / "moe")
    rng = np.random.default_rng(1)
    asked = [([rng.integers(3, 500) for _ in range(40 + n)], 20, {"ignore_eos": True}) for n in range(3)]
    plain = session(GOLDENS / "qwen3_5-moe-tiny")
    drafted = session(tmp_path / "moe", speculative_config=MTP, max_num_batched_tokens=24)
    for want, got in zip(plain.outcomes_of(asked), drafted.outcomes_of(asked), strict=True):
        assert got.tokens == want.tokens
    assert drafted.engine.stats().draft_tokens > 0


@pytest.mark.parametrize(
    ("name", "flags", "complaint"),
    [
        ("tests/goldens/qwen3-tiny", {}, "method 'mtp' is not possible with this model; possible: ngram"),
        ("tests/goldens/qwen3_5-moe-tiny", {}, "has no MTP head; use method ngram"),
    ],
)
def test_layers_that_cannot_draft_are_refused_with_the_reason(
    session: Callable[..., Any], name: str, flags: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SetupError, match=complaint):
        session(ROOT / name, speculative_config=MTP, **flags)


WITH_LAYERS = ["qwen3-tiny", "qwen3_5-tiny", "deepseek_v4-tiny", "deepseek_v4-dspark"]


def with_layers(name: str, folder: Path) -> tuple[Path, str, dict[str, str]]:
    """A checkpoint with layers that draft, in the folder where no golden has them, the config and other flags."""
    flags = {"activation_quantization": "off"} if name.startswith("deepseek") else {}
    if name == "deepseek_v4-dspark":
        return write_dspark(folder / name), MTP.replace("mtp", "dspark"), flags
    if name == "qwen3-tiny":
        write_head(folder)
        return GOLDENS / name, speculation(folder), flags
    return GOLDENS / name, MTP, flags


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_step_that_drafts_nothing_keeps_the_cache_of_the_layers_whole(
    place: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """It writes the keys and values that a step with drafts writes, and nothing else of the cache."""
    (path, config, flags), blocks = with_layers(name, tmp_path), [6] if name == "qwen3-tiny" else [6, 4]
    recipe, found = recipes.find(path), []
    for places in (1, 0):
        model = place(
            recipe, path, blocks, max_rows=2, max_tokens=16, length=64, speculative_config=config, **flags
        )
        work, rows = segments(model, CpuPack(), Buckets((1,), (16,), (1,), 1)), model.batch.rows
        rows.set("alive", 1, 1)
        rows.set("limits", 1, 60)
        rows.write("stop_ids", 1, [-1] * 20)
        for table in filter(None, model.tables):
            rows.write(table, 1, [3])
        prompt = np.random.default_rng(2).integers(3, 500, 13)
        rows.write("prompt", 0, [*prompt, -1, -1, -1])
        for field, values in {
            "slots": [1],
            "emits": [1],
            "q_starts": [0, 13],
            "sure_starts": [0, 13],
        }.items():
            rows.write(field, 0, values)
        for _ in rows.uploads(Stream(Device("cpu"))):
            work["upload",]()
        shape = Shape(16, 1, 16)
        for key in (("forward", shape), ("sample", 1, 0)):
            work[key]()
        before = cache_of(model).copy()
        work["draft", shape, places]()
        found.append(cache_of(model).copy())
        assert (found[-1] != before).any()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", of_the_day(WITH_LAYERS, 2))
def test_tokens_that_layers_see_later_leave_the_same_cache(
    session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Without drafts, layers see many tokens at once: when rows change, before drafts, and when no more can be kept."""
    path, config, flags = with_layers(name, tmp_path)
    monkeypatch.setattr("openinfer.graph.runner.verifying.MOST_KEPT", 4)
    rng, found = np.random.default_rng(5), []
    prompts = [rng.integers(3, 500, size).tolist() for size in (20, 7, 13)]
    for later in (True, False):
        if not later:
            monkeypatch.setattr("openinfer.graph.runner.proposing.keeps", lambda shape: False)
            monkeypatch.setattr("openinfer.graph.runner.runner.keeps", lambda shape: False)
        made = session(path, speculative_config=config, max_num_seqs=4, **flags)
        runner, steps = made.engine.runner, iter(range(1000))
        cache_of(runner.model)[...] = 0  # what no token writes, too
        runner.drafting.worth.choose = lambda available, rows, cost, steps=steps: 22 <= next(steps) < 25
        runner.drafting.worth.idle = lambda cost: 0
        replayed = keys_of(runner, monkeypatch)
        for n, prompt in enumerate(prompts):
            made.submit(prompt, 20 + 5 * n, temperature=0.8, seed=n, ignore_eos=True)
            for _ in range(4):
                made.step(1.0)
        made.finish()
        if runner.drafting.unseen:
            runner.replay(("draft", runner._shape, 0))
        plain = sum(key[0] == "draft" and key[1].longest == 1 and not key[2] for key in replayed)
        found.append((plain, [one.tokens for one in made.outcomes.values()], cache_of(runner.model).copy()))
        assert made.engine.stats().draft_tokens > 0
    (few, tokens, cache), (each, others, whole) = found
    assert tokens == others
    np.testing.assert_allclose(cache, whole, rtol=1e-5, atol=1e-5)
    assert 1 < few < each / 2


def keys_of(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The segments that a runner launches from now on."""
    keys, launch = list[tuple[Any, ...]](), runner.graphs.launch
    monkeypatch.setattr(
        runner.graphs, "launch", lambda key: (keys.append(key), launch(key))[1], raising=False
    )
    return keys


def test_drafts_are_tokens_that_the_request_allows(session: Callable[..., Any]) -> None:
    made = session(GOLDENS / "qwen3_5-tiny", speculative_config=MTP)
    made.engine.runner.drafting.costs = None
    allowed, prompt = range(40, 60), np.random.default_rng(4).integers(3, 500, 9).tolist()
    one = made.submit(prompt, 30, temperature=1.0, seed=1, ignore_eos=True, allowed_token_ids=tuple(allowed))
    made.submit(prompt, 30, temperature=1.0, seed=1, ignore_eos=True)
    made.finish()
    drafts = made.engine.runner.model.batch.rows["drafts"].numpy()
    found = [{int(token) for token in row if token > 0} for row in drafts]
    assert set(made.outcomes[one].tokens) <= set(allowed)
    assert sum(bool(tokens) and tokens <= set(allowed) for tokens in found) == 1  # the other row's are any
    assert sum(map(bool, found)) == 2


def test_forced_tokens_have_the_logits_of_no_draft(session: Callable[..., Any]) -> None:
    """Layers that draft keep their logits where those of the step are."""
    prompt, found = np.random.default_rng(4).integers(3, 500, 20).tolist(), []
    for config in (None, MTP):
        forced = Forced(session(GOLDENS / "qwen3_5-tiny", speculative_config=config).engine)
        found.append(forced.feed(forced.join(1, prompt), len(prompt), 8))
        forced.leave()
    np.testing.assert_allclose(*found, atol=1e-4)


def cache_of(model: Any) -> np.ndarray[Any, Any]:
    """Keys and values of all layers, those that draft among them."""
    memory = model.cache.window if hasattr(model, "cache") else model.kv.kv
    return np.asarray(memory.numpy()[1:], np.float32)


SEED = 8
"""A prompt after which the first two tokens are at least 0.5 apart, for the model and its drafts."""


def drafting_steps(
    place: Callable[..., Any], pack: Pack, seed: int, config: str
) -> list[np.ndarray[Any, Any]]:
    """A prompt, its drafts by the MTP head, and the step that verifies them: the logits of each, and the tokens."""
    path, shape = GOLDENS / "qwen3_5-tiny", Shape(16, 1, 16)
    model = place(
        QWEN3_5, path, [6, 4], max_rows=2, max_tokens=16, length=64, dtype=bfloat16, speculative_config=config
    )
    work = segments(model, pack, Buckets((1,), (16,), (1,), 2))
    rows, logits, found = model.batch.rows, model.batch.logits, []
    for name, value in {"alive": 1, "limits": 60, "state_from": 2, "state_to": 2, "reserved": 32}.items():
        rows.set(name, 1, value)
    rows.write("stop_ids", 1, [-1] * 20)
    rows.write("block_tables", 1, [3, 5])
    prompt = np.random.default_rng(seed).integers(3, 500, 13)
    rows.write("prompt", 0, [*prompt, -1, -1, -1])
    for name, values in {"slots": [1], "emits": [1], "q_starts": [0, 13], "sure_starts": [0, 13]}.items():
        rows.write(name, 0, values)

    def run(*keys: tuple[object, ...]) -> None:
        for _ in rows.uploads(Stream(Device("cpu"))):
            work["upload",]()
        for key in keys:
            work[key]()

    run(("forward", shape))
    found.append(logits[:1].numpy().copy())
    run(("sample", 1, 0), ("draft", shape, 2))
    found.append(logits[:1].numpy().copy())
    rows.write("prompt", 0, [-1] * 16)
    verify = Shape(3, 1, 3, 2)
    write_verified(rows, np.array([0, 3], np.int32), np.array([2], np.int32), 2)
    rows.write("q_starts", 0, [0, 3])
    run(("forward", verify))
    found.append(logits[:3].numpy().copy())
    run(("sample", 1, 2), ("draft", verify, 2))
    found.append(logits[:1].numpy().copy())
    return [*found, rows["drafts"].numpy()[1].copy(), model.batch.sampled.result[:3].numpy()[:, :2].copy()]


@pytest.mark.parametrize("config", of_the_day([MTP, FP8_MTP]))
def test_a_gpus_launches_of_drafts_in_the_interpreter(place: Callable[..., Any], config: str) -> None:
    target = Target(arch=90, num_sms=4, interpreted=True)
    regions = (Tensor.from_numpy(np.zeros(64 << 20, uint8)) for _ in range(2))
    ours = drafting_steps(place, LaunchPack(target, InterpDriver(), *regions), SEED, config)
    expected = drafting_steps(place, CpuPack(), SEED, config)
    for a, b in zip(ours[:4], expected[:4], strict=True):
        assert np.isfinite(a).all()
        # Activations of an FP8 head are rounded to 3 bits, so a small difference may become a large one.
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < (0.04 if config == MTP else 0.08)
    for a, b in zip(ours[4:], expected[4:], strict=True):
        np.testing.assert_array_equal(a, b)
