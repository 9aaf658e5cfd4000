"""Prefix hits of DeepSeek-V4: the window, the states of the compressors and the entries at a multiple of 128 tokens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from openinfer.frontend.contract import ResetPrefixCache
from openinfer.recipes.deepseek_v4.cache import WINDOW, groups
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.engine import Source
from openinfer.tensor import float32

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"


def chats(count: int, shared: int, seed: int = 0) -> list[list[int]]:
    """Prompts that begin with the same `shared` tokens and go on by themselves."""
    rng = random.Random(seed)
    system = [rng.randrange(3, 480) for _ in range(shared)]
    return [system + [rng.randrange(3, 480) for _ in range(rng.randrange(10, 40))] for _ in range(count)]


def run_one_by_one(run, prompts):
    for prompt in prompts:
        run.submit(prompt, 4, ignore_eos=True)
        run.finish()
    return [run.outcomes[n].tokens for n in range(len(prompts))]


@pytest.mark.parametrize(
    ("shared", "found"), [(100, 0), (300, 256), pytest.param(128, 128, marks=pytest.mark.slow)]
)
def test_a_shared_prompt_hits_from_the_second_request_on(session, shared, found):
    prompts = chats(3, shared)
    run = session(TINY, max_model_len=512)
    tokens = run_one_by_one(run, prompts)
    assert [run.outcomes[n].cached for n in range(3)] == [0, found, found]
    assert run.engine.stats().prefix_hit_tokens == 2 * found
    alone = session(TINY, max_model_len=512, enable_prefix_caching=False)
    assert run_one_by_one(alone, prompts) == tokens


@pytest.mark.parametrize("budget", [33, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 128, 512))])
def test_an_answer_is_part_of_the_next_prompt(session, budget):
    """Pages that decode steps have filled are found as those of prompts are, however the prompt was cut."""
    (prompt,) = chats(1, 230)
    run = session(TINY, max_model_len=512, max_num_batched_tokens=budget)
    run.submit(prompt, 50, ignore_eos=True)
    run.finish()
    longer = [*prompt, *run.outcomes[0].tokens, 7]
    assert 256 < len(longer) < 384
    run.submit(longer, 12, ignore_eos=True)
    run.finish()
    assert run.outcomes[1].cached == 256
    alone = session(TINY, max_model_len=512, enable_prefix_caching=False)
    alone.submit(longer, 12, ignore_eos=True)
    alone.finish()
    assert alone.outcomes[0].tokens == run.outcomes[1].tokens


@pytest.mark.parametrize(
    "lost", ["window", "csa_state", "index_state", "csa_entries", "index_keys", "hca_entries"]
)
def test_a_lost_part_is_noticed(session, lost):
    """Negative controls: with one of the cached tensors changed, a request that starts from it says something else."""
    (prompt,) = chats(1, 260, seed=5)
    run = session(TINY, max_model_len=512, activation_quantization="off")
    run.submit(prompt[:258], 8, ignore_eos=True, logprobs=1)
    run.finish()
    cached = getattr(run.engine.runner.model.cache, lost).numpy()
    cached[:] = np.roll(cached, 1, axis=-1) * np.float32(1.5)
    run.submit(prompt[:258], 8, ignore_eos=True, logprobs=1)
    run.finish()
    assert run.outcomes[1].cached == 256
    before, after = ([entry.logprob for entry in run.outcomes[n].logprobs] for n in (0, 1))
    assert np.abs(np.array(before) - np.array(after)).max() > 0.01


def test_a_long_sequence_holds_no_more_pages_than_its_window_needs(session):
    (prompt,) = chats(1, 340)
    run = session(TINY, max_model_len=1024)
    run.submit(prompt, 40, ignore_eos=True)  # the page of 384 tokens ends
    pool, most, fullest = run.engine.pool, 0, 0
    while run.open:
        run.step()
        if len(run.outcomes[0].tokens) > 2:
            most = max(most, pool.num_used(WINDOW))
            fullest = max(fullest, run.engine.stats().kv_used_tokens)
    assert most <= 3  # that of the last token, the one before it, and one ahead
    assert 128 <= fullest <= run.engine.info.kv_capacity_tokens
    assert pool.num_used(WINDOW) == 0
    assert run.engine.stats().kv_used_tokens == 0


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_prompts_pass_through_a_window_group_that_is_smaller_than_they_are(session, caching):
    """What comes out is what comes out of an engine with pages for all, however chunks are cut and whoever waits."""
    prompts = [*chats(2, 400, seed=1), *chats(2, 150, seed=2), chats(1, 600, seed=4)[0]]
    flags = {"max_model_len": 1024, "max_num_batched_tokens": 300, "enable_prefix_caching": caching}
    roomy = session(TINY, **flags)
    page = groups(Config.parse(Source.read(TINY).config), float32, (2, 2))[0].block_bytes
    tight = session(TINY, kv_cache_memory_bytes=10 * page, **flags)
    pool, most = tight.engine.pool, 0
    assert (pool.groups[WINDOW].num_blocks, tight.engine.info.max_model_len) == (5, 1024)
    for run in (roomy, tight):
        for prompt in prompts:
            run.submit(prompt, 6, ignore_eos=True)
        while run.open:
            run.step()
            most = max(most, pool.num_used(WINDOW))
            run.engine.pool.check_integrity()
    assert 2 <= most <= 4  # the longest prompt lies on five
    assert [tight.outcomes[n].tokens for n in range(5)] == [roomy.outcomes[n].tokens for n in range(5)]
    assert all([t.reason for t in tight.outcomes[n].terminals] == ["length"] for n in range(5))
    assert pool.num_free == pool.num_total


def test_reset_forgets_both_groups(session):
    (prompt,) = chats(1, 200)
    run = session(TINY, max_model_len=512)
    run_one_by_one(run, [prompt])
    run.engine.control(ResetPrefixCache())
    run.submit(prompt, 4, ignore_eos=True)
    run.finish()
    assert run.outcomes[1].cached == 0
    assert run.outcomes[1].tokens == run.outcomes[0].tokens
