"""DeepSeek-V4's engine on a GPU, by the tiny model: the published rounding,
and a loop under which nothing is compiled."""

from __future__ import annotations

import numpy as np
import pytest

from openinfer.recipes.engine.forced import Forced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

FLAGS = {
    "device": "cuda",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
}


def test_the_published_rounding(session, deepseek):
    """In bf16 a random tiny model amplifies the noise of FP8 (the goldens' README): what is compared is the size of the
    difference, which for another prompt is far larger."""
    engine = session(deepseek.path, **FLAGS).engine
    errors = []
    for index in (1, 2, 3):
        forced, prompt = Forced(engine), deepseek.prompt(index)
        logits = forced.feed(forced.join(1, prompt), len(prompt), 512)
        forced.leave()
        expected = deepseek.numbers[f"p{index}.logits_fp32_actq"][-1]
        errors.append(float(np.sqrt(np.mean((logits[0] - expected) ** 2))))
        other = deepseek.numbers[f"p{index}.logits_fp32_actq"][0]
        assert np.sqrt(np.mean((logits[0] - other) ** 2)) > 2
    assert max(errors) < 1.2, errors
    assert np.median(errors) < 0.7, errors


def test_requests_share_prefixes_and_end(session, deepseek):
    run = session(deepseek.path, activation_quantization="off", **FLAGS)
    prompts = [deepseek.prompt(4), deepseek.prompt(3), deepseek.prompt(4), deepseek.prompt(2)]
    for prompt in prompts[:2]:
        run.submit(prompt, 32, ignore_eos=True)
    run.finish()
    for prompt in prompts[2:]:
        run.submit(prompt, 32, ignore_eos=True)
    run.finish()
    assert run.outcomes[2].cached == 256
    assert all(len(outcome.tokens) == 32 for outcome in run.outcomes.values())
    # Greedy tokens of bf16 follow those of float32 for a while, and are not gated further.
    same = [
        sum(a == b for a, b in zip(run.outcomes[n].tokens, deepseek.greedy(index), strict=True))
        for n, index in enumerate((4, 3, 4, 2))
    ]
    assert sum(same) > 64, same
    assert run.engine.stats().compiles_after_ready == 0
