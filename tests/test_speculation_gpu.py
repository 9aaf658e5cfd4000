"""Drafts on a GPU: the tokens without drafts where kernels are batch-invariant, else log-probabilities as of a
prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark_form import write_dspark

from openinfer.recipes.engine.testing import Planted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEMO = Path(__file__).parents[1] / "demo"
RESTLESS = "openinfer.recipes.engine.testing.restless:fcfs"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
DSPARK = '{"method": "dspark"}'
FLAGS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 256 << 20,
}
ASKED = {
    "greedy": {"logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 3, "logprobs": 0},
    "penalties": {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "scored": {"prompt_logprobs": 1, "temperature": 1.0, "seed": 5},
    "min_tokens": {"temperature": 1.2, "seed": 6, "top_k": 20, "min_tokens": 20},
    "stop tokens": {"ignore_eos": True, "stop_token_ids": tuple(range(300, 316))},
    "bad words": {"temperature": 1.0, "seed": 8, "bad_words_token_ids": ((261,), (280, 290))},
    "n, first": {"temperature": 1.0, "seed": 9},
    "n, second": {"temperature": 1.0, "seed": 10},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def pair(session_of_module: Callable[..., Any], request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A batch-invariant engine without drafts, and one whose drafts come in every step, with preemptions and chunks."""
    path, alike = DEMO / request.param, {**FLAGS, "batch_invariant": True}
    plain = session_of_module(path, **alike, enable_prefix_caching=False)
    small = {"max_num_batched_tokens": 32, "scheduling_policy": RESTLESS}
    drafted = session_of_module(path, speculative_config=NGRAM, **alike, **small)
    yield plain, drafted
    for one in (plain, drafted):
        one.engine.close()


@pytest.fixture(scope="module")
def session_of_module() -> Callable[..., Any]:
    """session_of_module(path, **flags): an engine driven by hand, which the caller closes."""
    from openinfer.cli import recipes
    from openinfer.recipes.engine.startup import build
    from openinfer.recipes.engine.testing import Session

    return lambda path, **flags: Session(build(recipes.find(path), path, **flags).engine)


def prompts_of(count: int) -> list[list[int]]:
    """Prompts that begin alike for 70 tokens."""
    rng = np.random.default_rng(7)
    shared = rng.integers(20, 400, 70).tolist()
    return [[*shared, *rng.integers(20, 400, 5 + 3 * n).tolist()] for n in range(count)]


def test_tokens_are_those_without_drafts(pair: tuple[Any, Any]) -> None:
    plain, drafted = pair
    asked = [(prompt, 40, options) for prompt in prompts_of(4) for options in ASKED.values()]
    wanted, answers = plain.outcomes_of(asked), list[list[int]]()
    answers += [prompt + want.tokens for (prompt, _, _), want in zip(asked, wanted, strict=True)]
    drafting = drafted.engine.runner.drafting
    drafting.make_drafter = lambda: Planted(answers)
    drafting.costs = None
    found = drafted.outcomes_of(asked)
    for (_, _, options), want, got in zip(asked, wanted, found, strict=True):
        assert got.tokens == want.tokens, options
        for mine, theirs in zip(want.logprobs, got.logprobs, strict=True):
            assert mine is None or abs(mine.logprob - theirs.logprob) < 1e-4
    stats = drafted.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    # Which drafts are asked for depends on when steps end; the first one of a row is right in three of four.
    assert 0.4 * stats.draft_tokens < stats.accepted_draft_tokens < 0.75 * stats.draft_tokens
    assert (stats.compiles_after_ready, stats.allocations_after_ready) == (0, 0)


def test_a_grammar_has_the_tokens_without_drafts(pair: tuple[Any, Any]) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    from openinfer.frontend.http import Tokenizer
    from openinfer.sampler.form import Grammar

    table = Tokenizer.load(DEMO / "qwen3").token_table("")
    grammar = Grammar("regex", "(one|two), [a-e]{3,12}!")
    found = []
    for session in pair:
        session.engine.control(table)
        ids = [
            session.submit(prompt, 40, grammar=grammar, temperature=heat, seed=n)
            for n, prompt in enumerate(prompts_of(3))
            for heat in (0.0, 1.0)
        ]
        session.finish()
        found.append([session.outcomes[one].tokens for one in ids])
    assert found[0] == found[1]


def test_stop_strings_cut_the_same_text() -> None:
    pytest.importorskip("tokenizers")
    from openinfer.llm import LLM, SamplingParams

    found = []
    for config in (None, NGRAM):
        with LLM(str(DEMO / "qwen3"), **FLAGS, batch_invariant=True, speculative_config=config) as llm:
            texts = [f"Count from {n} to {n + 9}: {n}, {n + 1}, {n + 2}," for n in range(4)]
            for heat in (0.0, 0.8):
                sampling = SamplingParams(temperature=heat, seed=1)
                answers = llm.generate(texts, sampling, max_tokens=40, stop=["7", "er"])
                found.append([(one.text, one.finish_reason) for one in answers])
    assert found[:2] == found[2:]


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v4"])
def test_log_probabilities_are_the_models(session_of_module: Callable[..., Any], name: str) -> None:
    """Kernels are not batch-invariant here, so answers with drafts are scored as prompts."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(20, 400, 20 + 7 * n).tolist() for n in range(6)]
    small = {"max_num_batched_tokens": 64, "scheduling_policy": RESTLESS}
    drafted = session_of_module(DEMO / name, speculative_config=MTP, **small, **FLAGS)
    drafted.engine.runner.drafting.costs = None
    options = {"ignore_eos": True, "logprobs": 0}
    asked = [
        (prompt, 40, {**options, "temperature": 0.7 * (n % 2), "seed": n}) for n, prompt in enumerate(prompts)
    ]
    answers = drafted.outcomes_of(asked)
    ids = [
        drafted.submit(prompt + answer.tokens, 1, prompt_logprobs=1, disable_spec_decode=True)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    drafted.finish()
    errors, regrets = [], []
    for n, (prompt, answer, one) in enumerate(zip(prompts, answers, ids, strict=True)):
        scores = drafted.outcomes[one].prompt_logprobs[-len(answer.tokens) :]
        assert len(drafted.outcomes[one].prompt_logprobs) == len(prompt) + len(answer.tokens) - 1
        for mine, score in zip(answer.logprobs, scores, strict=True):
            errors.append(abs(mine.logprob - score.logprob))
            if n % 2 == 0:
                regrets.append(max(score.top_logprobs) - score.logprob)
    stats = drafted.engine.stats()
    drafted.engine.close()
    assert np.mean(errors) < 0.06
    assert np.quantile(errors, 0.99) < 0.3
    assert max(regrets) < 0.3
    assert stats.preemptions > 0
    assert stats.draft_tokens > 50
    assert stats.accepted_draft_tokens > 0.2 * stats.draft_tokens


def test_a_dspark_drafter_is_as_often_right(session_of_module: Any, deepseek: Any, tmp_path: Path) -> None:
    """Its Markov head knows the golden texts: in bf16 on a CPU 65 of 203 drafts are right."""
    flags = {**FLAGS, "activation_quantization": "off"}
    drafted = session_of_module(write_dspark(tmp_path / "model"), speculative_config=DSPARK, **flags)
    drafted.engine.runner.drafting.costs = None
    asked = [(deepseek.prompt(n), 32, {"ignore_eos": True}) for n in range(deepseek.num_prompts)]
    answers = drafted.outcomes_of(asked)
    stats = drafted.engine.stats()
    drafted.engine.close()
    same = [np.equal(one.tokens, deepseek.greedy(n)[:32]).mean() for n, one in enumerate(answers)]
    assert np.mean(same) > 0.5
    assert stats.draft_tokens > 100
    assert stats.accepted_draft_tokens > 0.2 * stats.draft_tokens
