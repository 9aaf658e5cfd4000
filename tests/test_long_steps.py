"""Tokens of long steps, dealt to ranks: the same answers as of one rank, on every path, and faults that are noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels.testing import of_the_day
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.recipe import RECIPE, SMALL
from openinfer.recipes.engine import config_fields
from openinfer.recipes.engine.config_fields import Part
from openinfer.recipes.engine.testing import Session

SIZES = {**SMALL, "num_attention_heads": 4, "o_groups": 4, "o_lora_rank": 32, "num_nextn_predict_layers": 1}
FLAGS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 64 << 20, "activation_quantization": "off",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**RECIPE.small, **SIZES}))
    return tmp_path


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of which the leader computed a part, by their tokens."""
    found: list[int] = []
    deal = Part.deal

    def counted(self: Part, tokens: int) -> slice | None:
        own = deal(self, tokens)
        if own is not None:
            found.append(tokens)
        return own

    monkeypatch.setattr(Part, "deal", counted)
    return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 1024, length).tolist()


def answer(run: Session, prompt: list[int], most: int = 4) -> list[float]:
    """The log-probabilities of the tokens of an answer."""
    (found,) = run.outcomes_of([(prompt, most, {"logprobs": 0, "ignore_eos": True})])
    return [at.logprob for at in found.logprobs if at is not None]


@pytest.mark.parametrize(("ranks", "length"), of_the_day([(2, 1100), (4, 1024), (4, 2200)]))
def test_a_long_prompt_has_the_answer_of_one_rank(session, path, dealt, ranks, length):
    wanted = answer(session(path, **FLAGS), prompt_of(length))
    assert not dealt
    found = answer(session(path, tensor_parallel_size=ranks, **FLAGS), prompt_of(length))
    assert dealt
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_decoding_rows_and_cached_prefixes_share_a_dealt_step(session, path, dealt):
    one, two = session(path, **FLAGS), session(path, tensor_parallel_size=2, **FLAGS)
    for run in one, two:
        for n in range(3):
            run.submit(prompt_of(40 + n, n), 12, logprobs=0, ignore_eos=True)
        for _ in range(4):
            run.step()
    long = prompt_of(1100)
    for prompt in long, long[:256] + prompt_of(1100, 1):
        wanted, found = (answer(run, prompt) for run in (one, two))
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert dealt
    assert two.engine.stats().prefix_hit_tokens == one.engine.stats().prefix_hit_tokens == 256


def test_activations_that_are_rounded_stay_near(session, path, dealt):
    flags = {**FLAGS, "activation_quantization": "on"}
    wanted = answer(session(path, **flags), prompt_of(1024), 1)
    found = answer(session(path, tensor_parallel_size=2, **flags), prompt_of(1024), 1)
    assert dealt
    np.testing.assert_allclose(found, wanted, atol=0.1)


def no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other rank has computed comes too late."""
    share = Model.share

    def late(self: Model, pack: Any, whole: Any, step: Any) -> None:
        kept = whole.numpy().copy()
        share(self, pack, whole, step)
        if step.own is not None:
            kept[step.own] = whole.numpy()[step.own]
            whole.numpy()[:] = kept

    monkeypatch.setattr(Model, "share", late)


def same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks compute the second part."""
    deal = Part.deal
    monkeypatch.setattr(Part, "deal", lambda self, n: slice(n // 2, n) if deal(self, n) else None)


@pytest.mark.parametrize("fault", of_the_day([no_gather, same_part]))
def test_a_fault_changes_the_answer(session, path, monkeypatch, fault):
    wanted = answer(session(path, **FLAGS), prompt_of(1024))
    made = session(path, tensor_parallel_size=2, **FLAGS)
    fault(monkeypatch)
    assert np.abs(np.subtract(answer(made, prompt_of(1024)), wanted)).max() > 2e-3


def test_prompt_logprobs_and_drafts_follow_a_dealt_step(session, path, dealt):
    flags = {**FLAGS, "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}'}
    found = []
    for ranks in (1, 2):
        run = session(path, tensor_parallel_size=ranks, **flags)
        options = {"prompt_logprobs": 0, "logprobs": 0, "ignore_eos": True}
        (one,) = run.outcomes_of([(prompt_of(1100), 8, options)])
        found.append([at.logprob for at in (*one.prompt_logprobs, *one.logprobs) if at is not None])
        assert len(found[-1]) >= 1100 + 7
    assert dealt
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)


def test_short_steps_and_large_models_are_not_dealt() -> None:
    part = Part(1, 4, deals=True)
    assert part.deal(config_fields.DEALT_TOKENS) == slice(256, 512)
    assert part.deal(896) is part.deal(1032) is Part(1, 4).deal(4096) is None
    blueprints: Callable[..., Any] = RECIPE.blueprint
    from openinfer.recipes.engine import Source

    for size, flags, deals in (
        ("Flash", {}, True),
        ("Flash", {"batch_invariant": True}, False),
        ("Pro", {}, False),
    ):
        source = Source(RECIPE.published()[size])
        assert blueprints(source, RECIPE.options(**flags), ranks=8).config.part.deals is deals
