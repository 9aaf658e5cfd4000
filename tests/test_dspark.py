"""DSpark drafts of DeepSeek-V4: the drafter against its description in numpy, and whole engines."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspark_form import BLOCK, TARGETS, Reference, write_dspark
from golden_rows import TapPack, start_row
from test_transfers import ALLOWED, finish, prefill
from test_transfers import config as transfer_config

from openinfer.frontend.http import Tokenizer
from openinfer.graph import Buckets, Shape
from openinfer.graph.runner import segments
from openinfer.graph.runner.proposing import draft
from openinfer.kernels import CpuPack, InterpDriver, LaunchPack, Target
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.engine.errors import SetupError, UnsupportedModel
from openinfer.recipes.engine.testing.restless import fcfs
from openinfer.sampler.form import Grammar
from openinfer.sampler.gpu import greedy_rows
from openinfer.tensor import CheckpointError, Device, Stream, Tensor, bfloat16, uint8

DSPARK = '{"method": "dspark"}'
ALL = json.dumps({"method": "dspark", "num_speculative_tokens": BLOCK})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dspark(tmp_path_factory.mktemp("dspark") / "deepseek_v4-dspark")


class Notes:
    """A pack that keeps the streams after each layer of the model, and what the drafter makes of them."""

    def __init__(self) -> None:
        self.inner = TapPack({"hc_post": "streams"})
        self.main_x, self.logits, self.survival = [], [], []

    def run(self, op: Any, args: Any) -> None:
        self.inner.run(op, args)
        if op.name == "norm_rows":
            self.main_x.append(args.out.numpy().copy())
        if op.name == "markov":
            self.logits.append(args.logits.numpy()[0].copy())
            self.survival.append(float(args.survival.numpy()[0]))


def proposed(model: Any, tokens: list[int]) -> tuple[Notes, int, list[int]]:
    """The notes, the token sampled after these, and the drafts of the positions behind it."""
    rows, pack, count = model.batch.rows, Notes(), len(tokens)
    rows.set("seq_lens", 1, 0)
    rows.set("reserved", 1, 1024)
    rows.write("draft_masks", 1, [-1] * rows.width("draft_masks"))
    start_row(model, tokens)
    model.forward(pack, count, 1, count)
    greedy_rows(pack, rows, model.batch.sampled, 1)
    draft(model, pack, Shape(count, 1, count), BLOCK)
    held = rows["drafts"].numpy()[1]
    drafts = [int(held[(count + 1 + n) % len(held)]) for n in range(BLOCK)]
    return pack, int(rows["last_tokens"].numpy()[1]), drafts


def model_of(place: Any, path: Path) -> Any:
    return place(RECIPE, path, [9, 9], speculative_config=ALL, activation_quantization="off")


@pytest.mark.parametrize("index", range(4))
def test_proposals_are_those_of_the_description(place: Any, path: Path, deepseek: Any, index: int) -> None:
    """After prompts of 1 to 129 tokens, which is more than a window, and after some of the answer."""
    model, reference = model_of(place, path), Reference(path)
    for answered in (0, 3):
        tokens = [*deepseek.prompt(index), *deepseek.greedy(index)[:answered]]
        notes, anchor, drafts = proposed(model, tokens)
        assert anchor == deepseek.greedy(index)[answered]
        streams = notes.inner.streams
        read = np.concatenate([streams[2 * n + 1][: len(tokens)].mean(1) for n in TARGETS], 1)
        wanted, logits, sure = reference.propose(read, anchor)
        np.testing.assert_allclose(notes.main_x[0], reference.main_x(read), atol=1e-3, rtol=0)
        np.testing.assert_allclose(np.stack(notes.logits), logits, atol=1e-3, rtol=0)
        np.testing.assert_allclose(notes.survival, np.cumprod(sure), atol=1e-4, rtol=0)
        assert drafts == wanted


def test_a_drafter_that_reads_other_layers_is_noticed(place: Any, path: Path, deepseek: Any) -> None:
    """A negative control: the inputs of the target layers in place of their outputs."""
    model, tokens = model_of(place, path), deepseek.prompt(2)
    right = np.stack(proposed(model, tokens)[0].logits)
    object.__setattr__(model, "reads", tuple(n - 1 for n in model.reads))
    assert np.abs(np.stack(proposed(model, tokens)[0].logits) - right).max() > 0.1


@pytest.mark.parametrize("rounding", of_the_day(["off", "on"]))
def test_a_gpus_launches_of_drafts_in_the_interpreter(place: Any, path: Path, rounding: str) -> None:
    """After a step of two rows, one of them dead: the drafter's context, its block and its heads."""
    target = Target(arch=90, num_sms=4, interpreted=True)
    regions = (Tensor.from_numpy(np.zeros(64 << 20, uint8)) for _ in range(2))
    driver, found = InterpDriver(), []
    for pack in (LaunchPack(target, driver, *regions), CpuPack()):
        model = place(
            RECIPE, path, [5, 5], max_rows=2, max_tokens=16, length=256, dtype=bfloat16, speculative_config=ALL,
            activation_quantization=rounding,
        )  # fmt: skip
        model.cache.window.numpy()[1:] = np.nan  # what was never written must never be read
        shape, rows, prompt = (
            Shape(16, 2, 16),
            model.batch.rows,
            np.random.default_rng(10).integers(3, 490, 11),
        )
        work = segments(model, CpuPack(), Buckets((2,), (16,), (2,), BLOCK))
        for name, value in {"alive": 1, "limits": 60, "reserved": 64}.items():
            rows.set(name, 1, value)
        rows.write("stop_ids", 1, [-1] * 20)
        rows.write("draft_masks", 1, [-1] * rows.width("draft_masks"))
        for table in model.tables:
            rows.write(table, 1, [3, 2])
        rows.write("prompt", 0, [*prompt, 5, 6, -1, -1, -1])
        for name, values in {"slots": [1, 2], "emits": [1, 1], "q_starts": [0, 11, 13]}.items():
            rows.write(name, 0, values)
            rows.write("sure_starts", 0, [0, 11, 13])
        for _ in rows.uploads(Stream(Device("cpu"))):
            work["upload",]()
        for key in (("forward", shape), ("sample", 2, 0)):
            work[key]()
        draft(model, pack, shape, BLOCK)
        drafts, seen = rows["drafts"].numpy()[1, 12 : 12 + BLOCK].tolist(), model.kept.survival.numpy()[0]
        found.append((model.batch.logits.numpy()[: 2 * BLOCK : 2].copy(), float(seen), drafts))
    (ours, sure, drafts), (expected, certain, wanted) = found
    count = (
        1 if rounding == "on" else BLOCK
    )  # a code that differs may give another draft, and others after it
    assert np.linalg.norm((ours - expected)[:count]) / np.linalg.norm(expected[:count]) < 0.04 * (
        4 if count == 1 else 1
    )
    assert abs(sure - certain) < 0.05
    assert drafts[0] == wanted[0]
    launched = {name.rpartition(".")[2].partition("[")[0] for name in driver.launched}
    assert {"start_block", "markov_logits", "markov_survival", "sparse_attend", "q_kv_write"} <= launched, (
        launched
    )


# -- whole engines --


def engine(session: Any, path: Path, config: str | None = DSPARK, **flags: Any) -> Any:
    return session(path, speculative_config=config, activation_quantization="off", **flags)


@pytest.mark.parametrize("ranks", of_the_day([1, 2]))
def test_greedy_tokens_are_those_without_drafts(session: Any, path: Path, deepseek: Any, ranks: int) -> None:
    asked = [(deepseek.prompt(n), 32, {"ignore_eos": True}) for n in range(5)]
    made = engine(session, path, tensor_parallel_size=ranks)
    made.engine.runner.drafting.worth.choose = lambda available, rows, cost: BLOCK if available else 0
    for index, got in enumerate(made.outcomes_of(asked)):
        assert got.tokens == deepseek.greedy(index)
    right = made.engine.stats().accepted_by_position
    assert right[0] > 30
    assert right[BLOCK - 1] > 5
    assert all(a >= b for a, b in pairwise(right))


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_engines_proposals_are_those_of_a_fresh_drafter(
    session: Any, place: Any, path: Path, deepseek: Any, index: int
) -> None:
    """Whatever was rejected before, after plain steps that the drafter saw later, and from chunks of the prompt."""
    made, fresh = engine(session, path, max_num_batched_tokens=24), model_of(place, path)
    runner, prompt = made.engine.runner, deepseek.prompt(index)
    steps, found = iter(range(1000)), list[tuple[int, int, list[int]]]()
    runner.drafting.worth.choose = lambda available, rows, cost: BLOCK * (next(steps) % 8 < 4)
    runner.drafting.worth.idle = lambda cost: 0
    launch, rows = runner.graphs.launch, runner.model.batch.rows

    def noted(key: tuple[Any, ...]) -> None:
        launch(key)
        slots = np.flatnonzero(rows["alive"].numpy())
        if key[0] == "draft" and key[2] and len(slots):
            (slot,), held = slots.tolist(), rows["drafts"].numpy()
            count, anchor = int(rows["seq_lens"].numpy()[slot]), int(rows["last_tokens"].numpy()[slot])
            drafts = held[slot, np.arange(count + 1, count + 1 + key[2]) % held.shape[1]].tolist()
            if count >= len(prompt):
                found.append((count, anchor, drafts))

    runner.graphs.launch = noted
    made.submit(prompt, 32, ignore_eos=True)
    made.finish()
    tokens, right = [*prompt, *made.outcomes[0].tokens], 0
    assert len(found) > 8
    for count, anchor, drafts in found:
        assert anchor == tokens[count]
        assert drafts == proposed(fresh, tokens[:count])[2][: len(drafts)]
        right += drafts[:1] == tokens[count + 1 : count + 2]
    assert right > 3


def test_rows_of_every_kind_get_the_tokens_that_they_get_without(session: Any, path: Path) -> None:
    """In small chunks, with preemption, cached prefixes and fewer tokens of a step than rows have drafts."""
    rng, asked = random.Random(2), []
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.5}, {"allowed_token_ids": tuple(range(40, 90)), "temperature": 0.7},
        {"logit_bias": [(7, 4.0)], "min_p": 0.01, "temperature": 0.9},
    ]  # fmt: skip
    for n, kind in enumerate(kinds):
        prompt = [rng.randrange(3, 500) for _ in range(20 + 25 * n)]
        asked.append((prompt, 16, {"ignore_eos": True, "seed": n, "logprobs": 1, **kind}))
    plain = engine(session, path, None, enable_prefix_caching=False)
    small = {"max_num_batched_tokens": 17, "scheduling_policy": fcfs(17)}
    drafted = engine(session, path, max_num_seqs=4, **small)
    drafted.engine.runner.drafting.worth.choose = lambda available, rows, cost: 2 if available else 0
    for want, got in zip(plain.outcomes_of(asked), drafted.outcomes_of(asked), strict=True):
        assert got.tokens == want.tokens
        for mine, theirs in zip(want.logprobs, got.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-4
    stats = drafted.engine.stats()
    assert stats.preemptions > 0
    assert stats.draft_tokens > 50


def blocks_of(run: Any, prompt: list[int], **given: Any) -> tuple[int, int, list[np.ndarray[Any, Any]]]:
    """Tokens of a prompt that were cached, accepted drafts, and what the heads read of each block of drafts."""
    before, runner, found = run.engine.stats().accepted_draft_tokens, run.engine.runner, []
    launch, collapsed = runner.graphs.launch, runner.model.buffers.collapsed.numpy()
    emits = runner.model.batch.rows["emits"].numpy()

    def noted(key: tuple[Any, ...]) -> None:
        launch(key)
        if key[0] == "draft" and key[2] and runner.model.batch.rows["alive"].numpy().any() and emits[0]:
            found.append(collapsed[: key[2] * key[1].rows : key[1].rows].copy())

    runner.graphs.launch = noted
    number = run.submit(prompt, 24, ignore_eos=True, **given)
    finish(run)
    runner.graphs.launch = launch
    return run.outcomes[number].cached, run.engine.stats().accepted_draft_tokens - before, found


def largest_difference(some: Any, others: Any) -> float:
    assert len(some) == len(others) > 5
    return max(np.abs(a - b).max() for a, b in zip(some, others, strict=True))


def steady(run: Any) -> Any:
    """All drafts in each step, from the first one on."""
    drafting = run.engine.runner.drafting
    drafting.worth.choose = lambda available, rows, cost: BLOCK if available else 0
    drafting.places = BLOCK
    return run


@pytest.mark.parametrize("ranks", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cached_prefix_has_the_drafters_context(
    session: Any, path: Path, deepseek: Any, ranks: int
) -> None:
    """The first blocks look back into it. ranks: of an engine from whose small cache it went to host memory, or 0."""
    prompt, flags = deepseek.prompt(3), {"max_num_seqs": 1, "max_model_len": 320}
    if ranks:
        flags |= {"kv_offload_gb": 0.1, "kv_cache_memory_bytes": 9 << 20, "tensor_parallel_size": ranks}
    run = steady(engine(session, path, **flags))
    none, right, blocks = blocks_of(run, prompt)
    for first in range(2 * ranks):
        run.submit([*range(3 + first, 290 + first)], 1)
        run.finish()
    cached, again, same = blocks_of(run, prompt)
    assert (none, cached) == (0, 128)
    assert again == right > 3
    assert largest_difference(same, blocks) < 1e-3
    assert not ranks or run.engine.stats().offload_blocks["from_host"] > 0
    drafter = run.engine.runner.model.cache.window.numpy()[:, -3:]  # a negative control
    drafter[:] = np.roll(drafter, 1, axis=-1)
    cached, _, others = blocks_of(run, prompt)
    assert cached == 128
    assert np.abs(others[0][0] - blocks[0][0]).max() > 0.01


def test_a_page_that_plain_steps_filled_comes_back_whole(session: Any, path: Path, deepseek: Any) -> None:
    """Without drafts the drafter sees up to 32 tokens at once; all of a page is seen before it is copied."""
    flags = {"max_num_seqs": 1, "max_model_len": 320}
    run = engine(session, path, kv_offload_gb=0.1, kv_cache_memory_bytes=9 << 20, **flags)
    drafting, prompt = run.engine.runner.drafting, deepseek.prompt(3)[:92]
    drafting.worth.choose, drafting.places = (lambda *args: 0), 0
    run.submit(prompt, 40, ignore_eos=True)
    run.finish()
    for first in range(2):
        run.submit([*range(3 + first, 290 + first)], 1)
        run.finish()
    longer = [*prompt, *run.outcomes[0].tokens][:131]
    cached, _, blocks = blocks_of(steady(run), longer)
    assert cached == 128
    assert run.engine.stats().offload_blocks["from_host"] > 0
    assert largest_difference(blocks, blocks_of(steady(engine(session, path, **flags)), longer)[2]) < 1e-3


def test_an_engine_that_decodes_for_another_accepts_as_often(session: Any, path: Path, deepseek: Any) -> None:
    prompt, own = deepseek.prompt(3), {"max_num_seqs": 4, "max_model_len": 320}
    _, right, blocks = blocks_of(steady(engine(session, path, **own)), prompt)
    shared = {"kv_transfer_config": transfer_config(), "kv_peer": ALLOWED, **own}
    first, second = (steady(engine(session, path, **shared)) for _ in range(2))
    cached, again, same = blocks_of(second, prompt, kv_transfer=prefill(first, prompt))
    assert (cached, again) == (128, right)
    assert right > 3
    assert second.engine.stats().offload_blocks["from_peer"] > 0
    assert largest_difference(same, blocks) < 1e-3


@pytest.mark.parametrize(
    ("sure", "floor"), of_the_day([("as trained", 0.4), ("as trained", 2.0), ("NaN", 0.4)])
)
def test_confidence_says_how_many_drafts_are_verified_and_changes_no_token(
    session: Any, path: Path, deepseek: Any, sure: str, floor: float
) -> None:
    asked = [(deepseek.prompt(n), 32, {"ignore_eos": True}) for n in range(3)]
    found = []
    for least in (0.0, floor):
        run = steady(engine(session, path, max_num_seqs=3))
        if sure == "NaN":
            run.engine.runner.model.weights.stages.confidence.numpy()[:] = np.nan
        run.engine.runner.drafting.worth.floor = lambda *args, least=least: least
        outcomes = run.outcomes_of(asked)
        assert [one.tokens for one in outcomes] == [deepseek.greedy(n) for n in range(3)]
        stats = run.engine.stats()
        assert stats.draft_tokens == sum(
            one.terminals[0].drafts.tokens for one in outcomes if one.terminals[0].drafts
        )
        found.append(
            (stats.draft_tokens, stats.accepted_draft_tokens, run.engine.runner.drafting.worth.chances[0])
        )
    (whole, accepted, chance), (cut, fewer, again) = found
    if sure == "NaN":
        assert found[0] == found[1]
    elif floor > 1:
        assert cut <= len(asked) * BLOCK  # the first of each row, before anything is known
    else:
        assert 5 < fewer <= cut < 0.7 * whole
        assert accepted > 0
        assert abs(again - chance) < 0.3  # drafts that were not verified do not count as wrong


def test_what_a_draft_costs_sets_the_chance_below_which_it_is_none(
    session: Any, path: Path, deepseek: Any
) -> None:
    """Where a draft takes a fifth of a step, unlikely ones are cut."""
    found = []
    for each in (0.0, 0.2):
        run = steady(engine(session, path))
        drafting, rows = run.engine.runner.drafting, run.engine.runner.model.batch.rows
        drafting.costs = SimpleNamespace(
            decode=lambda rows, level, chunks, each=each: 1 + each * level, sure=lambda rows: True,
            seconds=lambda shape: 1.0, took=lambda *args: None,
        )  # fmt: skip
        run.outcomes_of([(deepseek.prompt(n), 24, {"ignore_eos": True}) for n in range(2)])
        found.append((float(rows["draft_floor"].numpy()[0]), run.engine.stats().draft_tokens))
    (none, whole), (floor, cut) = found
    assert none == 0
    assert 0.05 < floor < 0.5
    assert cut < 0.9 * whole


def test_a_grammar_beside_drafts_that_confidence_ends(session: Any, path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    prompt, found = tokenizer.encode_short("Say why the sky is blue"), []
    for config in (None, DSPARK):
        run = engine(session, path, config, max_model_len=256)
        run.engine.control(tokenizer.token_table(""))
        if config:
            steady(run).engine.runner.drafting.worth.floor = lambda *args: 0.4
        for n, regex in enumerate(("[a-e]{8,12}!", '"first": [0-9]{4}, "second": [0-9]{4}')):
            run.submit(prompt, 40, grammar=Grammar("regex", regex), temperature=0.5 * n, seed=n)
        run.finish()
        found.append([run.outcomes[n].tokens for n in range(2)])
        assert run.engine.stats().accepted_draft_tokens > 5 or not config
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dspark_block_size": 0}, r"an MTP layer.*method dspark needs a DSpark drafter \(dspark_block_size"),
        ({"dspark_block_size": -1}, "dspark_block_size is -1"),
        ({"dspark_block_size": 65}, "dspark_block_size is 65; it must be from 1 to 64"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id is 512; it must be an integer from 0 to 511"),
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id is None"),
        ({"dspark_target_layer_ids": [0, 3]}, r"dspark_target_layer_ids is \[0, 3\].*0 to 2, rising"),
        ({"dspark_target_layer_ids": [2, 0]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [0, 1, 2]}, r"main_proj\.(weight|scale).*\[128, 256\]|main_proj"),
        ({"draft_vocab_size": 256}, "draft_vocab_size is 256; a DSpark drafter has 512"),
        ({"enable_confidence_head": False}, "enable_confidence_head is False"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"n_mtp_layers": 2}, "n_mtp_layers is 2; by the checkpoint's tensors it is 3"),
        ({"compress_ratios": [0, 4, 128, 0, 0]}, "compress_ratios has 2 ratios more"),
        ({"lost": "mtp."}, r"has tensors mtp.N of N \(none\)"),
        ({"lost": "mtp.1."}, "has tensors mtp.N of N 0, 2; a DSpark drafter has them of 0, 1"),
        ({"lost": "mtp.2.confidence"}, r"missing: mtp\.2\.confidence_head\.proj\.weight"),
        ({"lost": "mtp.0.main_proj.w"}, r"missing: mtp\.0\.main_proj\.weight"),
        (
            {"lost": "mtp.2.", "n_mtp_layers": 2, "compress_ratios": [0, 4, 128, 0, 0]},
            r"missing: mtp\.1\.(norm|hc_head|markov)",
        ),
        ({"dspark_markov_rank": 16}, r"markov_w[12]\.weight.*\[512, 32\], must be \[512, 16\]"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_and_the_model_serves(
    session: Any, tmp_path: Path, deepseek: Any, changes: dict[str, Any], complaint: str
) -> None:
    folder = write_dspark(tmp_path / "changed", **changes)
    with pytest.raises((SetupError, UnsupportedModel, CheckpointError), match=complaint):
        engine(session, folder)
    (got,) = engine(session, folder, None).outcomes_of([(deepseek.prompt(1), 2, {"ignore_eos": True})])
    assert got.tokens == deepseek.greedy(1)[:2]


def test_other_models_and_other_methods(session: Any, path: Path, deepseek: Any) -> None:
    goldens = Path(__file__).parent / "goldens"
    with pytest.raises(SetupError, match=r"method 'dspark' is not possible with this model; possible: ngram"):
        session(goldens / "qwen3-tiny", speculative_config=DSPARK)
    with pytest.raises(SetupError, match=r"has an MTP layer.*needs a DSpark drafter.*use method mtp"):
        engine(session, deepseek.path)
    with pytest.raises(SetupError, match=r"has a DSpark drafter.*needs an MTP layer; use method dspark"):
        engine(session, path, '{"method": "mtp", "num_speculative_tokens": 2}')
    with pytest.raises(SetupError, match="num_speculative_tokens is 6; this drafter makes 5"):
        engine(session, path, ALL.replace("5", "6"))
