"""A pool of a third of what the requests need: nothing fails, nothing hangs, and no token changes."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

DEMO = Path(__file__).parents[1] / "demo" / "qwen3"


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


def counts(event: dict[str, Any]) -> tuple[int, int, int] | None:
    """Prompt, cached and generated tokens that an event of a stream tells of, on any of the APIs."""
    usage = event.get("usage") or (event.get("message") or event.get("response") or {}).get("usage")
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    return prompt, details["cached_tokens"], usage.get("completion_tokens", usage.get("output_tokens"))


def test_counts_under_preemption(start):
    """Answers on all APIs in a pool of a third of what they need: what usage says never falls, and never more of a
    prompt is cached than it has."""
    page = 16 * 2 * 6 * 128 * 4
    live = start(
        DEMO, "--kv-cache-memory-bytes", str(18 * page), "--max-model-len", "256", "--max-num-seqs", "8"
    )
    ask = "Count from one to one hundred in words, and then back."
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": ask}], "max_tokens": 100,
                                 "ignore_eos": True, "stream_options": options},
        "/v1/completions": {"prompt": ask, "max_tokens": 100, "ignore_eos": True, "stream_options": options},
        "/v1/messages": {"messages": [{"role": "user", "content": ask}], "max_tokens": 70},
        "/v1/responses": {"input": ask, "max_output_tokens": 70},
    }  # fmt: skip

    def follow(number: int) -> list[tuple[int, int, int]]:
        path = list(bodies)[number % len(bodies)]
        body = bodies[path] | {"stream": True, "temperature": 1.0}
        answer = httpx.post(f"{live.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [found for line in lines if (found := counts(json.loads(line)))]

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(follow, range(8)))
    metrics = httpx.get(f"{live.url}/metrics").text
    found = re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)$", metrics, re.M)
    assert found is not None
    assert float(found[1]) > 0
    for stream in streams:
        assert stream
        assert stream == sorted(stream)
        assert len({(prompt, cached) for prompt, cached, _ in stream}) == 1
        assert all(0 <= cached < prompt for prompt, cached, _ in stream)
