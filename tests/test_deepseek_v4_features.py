"""What the DeepSeek-V4 recipe honours beside greedy tokens: log-probabilities of prompts and answers, penalties,
masks; any two of them together, in any company."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
SAMPLING = {
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": [(7, 4.0), (11, -50.0)]},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(3, 500))},
    "temperature": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
}
ENGINES = {
    "short chunks": {"max_num_batched_tokens": 33},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 100},
    "a small pool": {"kv_cache_memory_bytes": 10 << 20, "max_num_batched_tokens": 64},
    "eager, not rounded": {"enforce_eager": True, "activation_quantization": "off"},
}


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("tokens", [50, 512, pytest.param(1, marks=pytest.mark.slow)])
def test_log_probabilities_of_prompts_are_the_goldens(deepseek, session, tokens):
    rows = 1 if tokens == 1 else 8
    flags = {"max_num_batched_tokens": tokens, "activation_quantization": "off"}
    run = session(deepseek.path, max_num_seqs=rows, **flags)
    indices = [1, 2] if tokens == 1 else range(deepseek.num_prompts)
    asked = {run.submit(deepseek.prompt(n), 3, ignore_eos=True, prompt_logprobs=2): n for n in indices}
    run.finish()
    for request, index in asked.items():
        outcome, prompt = run.outcomes[request], deepseek.prompt(index)
        assert outcome.tokens == deepseek.greedy(index)[:3]
        assert len(outcome.prompt_logprobs) == len(prompt) - 1
        exact = log_softmax(deepseek.numbers[f"p{index}.logits_fp32"])
        positions = deepseek.facts["prompts"][index]["logit_positions"]
        for position, row in zip(positions, exact, strict=True):
            if position + 1 < len(prompt):
                entry = outcome.prompt_logprobs[position]
                assert entry.logprob == pytest.approx(row[prompt[position + 1]], abs=1e-3)
                np.testing.assert_allclose(entry.top_logprobs, row[entry.top_token_ids], atol=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "a small pool" else n for n in ENGINES]
)
def test_any_two_in_any_company_are_what_they_are_alone(session, name):
    rng = random.Random(3)
    shared = [rng.randrange(3, 600) for _ in range(130)]
    pairs = list(itertools.combinations(SAMPLING, 2))
    prompts = [shared + [rng.randrange(3, 600) for _ in range(rng.randrange(1, 30))] for _ in pairs]
    options = [
        {"ignore_eos": True, **SAMPLING[a], **SAMPLING[b], **({"seed": 1} if "temperature" in (a, b) else {})}
        for a, b in pairs
    ]
    rounding = {"activation_quantization": ENGINES[name].get("activation_quantization", "on")}
    alone = session(TINY, max_num_seqs=1, max_model_len=256, enable_prefix_caching=False, **rounding)
    together = session(TINY, max_num_seqs=9, max_model_len=256, **ENGINES[name])
    for run in (alone, together):
        for prompt, chosen in zip(prompts, options, strict=True):
            run.submit(prompt, 10, **chosen)
        run.finish()
    plain = set()
    for n, pair in enumerate(pairs):
        one, other = alone.outcomes[n], together.outcomes[n]
        assert other.tokens == one.tokens, pair
        assert [type(t) for t in other.terminals] == [type(t) for t in one.terminals]
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        plain.add(tuple(one.tokens))
    assert len(plain) > len(pairs) // 2  # the options do something
    if name != "no prefix cache":
        assert any(outcome.cached for outcome in together.outcomes.values())
