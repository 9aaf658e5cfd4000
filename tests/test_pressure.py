"""A pool of a third of what the requests need: nothing fails, nothing hangs, and no token changes."""

import random

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_500_requests_in_a_third_of_the_pool(tiny, session, prefix_caching):
    rng = random.Random(5)
    prompts = [tiny.prompt(k)[: rng.randrange(1, 120)] for k in (2, 3, 4) for _ in range(12)]
    jobs = [(rng.randrange(len(prompts)), rng.randrange(4, 90)) for _ in range(500)]
    roomy = session(tiny.path, max_num_seqs=1)
    longest = [max((n for k, n in jobs if k == index), default=1) for index in range(len(prompts))]
    alone = [roomy.submit(prompt, n, ignore_eos=True) for prompt, n in zip(prompts, longest, strict=True)]
    roomy.finish()

    rows, page = 24, 16 * 2 * 4 * 2 * 128 * 4
    mean = sum(len(prompts[k]) + n for k, n in jobs) / len(jobs)
    pages = int(rows * mean / 3 / 16) + 1
    run = session(
        tiny.path, max_num_seqs=rows, kv_cache_memory_bytes=pages * page, enable_prefix_caching=prefix_caching
    )
    asked = [run.submit(prompts[k], n, ignore_eos=True) for k, n in jobs]
    run.finish()
    for request, (k, n) in zip(asked, jobs, strict=True):
        assert run.outcomes[request].tokens == roomy.outcomes[alone[k]].tokens[:n]
        assert [t.reason for t in run.outcomes[request].terminals] == ["length"]
    assert run.engine.stats().preemptions > 0
