"""Requests to a server, and streams of it side by side: what the tests of each recipe's server share."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
IDLE = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


def body(prompt: list[int] | list[list[int]], **options: Any) -> dict[str, Any]:
    """A greedy request for 32 tokens of /v1/completions."""
    defaults = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **defaults, **options}


def check_greedy_tokens(url: str, golden: Any) -> None:
    """All prompts of a golden in one request get its greedy tokens."""
    prompts = [golden.prompt(index) for index in range(golden.num_prompts)]
    answer = httpx.post(f"{url}/v1/completions", json=body(prompts), timeout=120)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for choice in choices:
        assert choice["token_ids"] == golden.greedy(choice["index"]), f"prompt {choice['index']}"
        assert choice["finish_reason"] == "length"


def check_schema_and_logprobs(url: str, **template: Any) -> None:
    """What the engines share: grammars after the thoughts, log-probabilities, several choices. template: arguments of
    the chat template."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    request = {
        "messages": [{"role": "user", "content": "Is it?"}],
        "chat_template_kwargs": template,
        "response_format": asked,
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 3,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == 3
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"ok"}
        entries = choice["logprobs"]["content"]
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def mixed(rng: random.Random, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """A request for each prompt, alternating greedy and seeded, of 1 to 12 new tokens."""
    requests = []
    for n, prompt in enumerate(prompts):
        options: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 7, 12])}
        if n % 2:
            options |= {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": n}
        requests.append(body(prompt, **options))
    return requests


def prompts_that_begin_alike(rng: random.Random, vocabulary: int) -> list[list[int]]:
    """Ten prompts of 1 to 200 tokens; two thirds begin with the same 130 tokens."""
    shared = [rng.randrange(3, vocabulary) for _ in range(130)]
    owns = [[rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 70))] for _ in range(10)]
    return [[*shared, *own] if n % 3 else own for n, own in enumerate(owns)]


async def stream(client: httpx.AsyncClient, request: dict[str, Any], drop_after: int | None) -> list[int]:
    """The token ids of a streamed request; the connection is closed once `drop_after` of them have come."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return tokens
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                if drop_after is not None and len(tokens) >= drop_after:
                    return tokens
    raise AssertionError("the stream ended without [DONE]")


def check_streams(server: Any, requests: list[dict[str, Any]], count: int, rng: random.Random) -> None:
    """`count` streams at once, of which some are dropped, give what each request gives alone, and leave nothing."""
    jobs = [(n % len(requests), rng.choice([None, None, None, 1, 3, 10])) for n in range(count)]
    rng.shuffle(jobs)

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            alone = [await stream(client, request, None) for request in requests]
            together = await asyncio.gather(*(stream(client, requests[n], drop) for n, drop in jobs))
            return alone, together

    alone, together = asyncio.run(run())
    assert [len(tokens) for tokens in alone] == [request["max_tokens"] for request in requests]
    for (n, drop), tokens in zip(jobs, together, strict=True):
        assert tokens == alone[n][: None if drop is None else len(tokens)]
        assert drop is None or len(tokens) >= min(drop, len(alone[n]))
    assert server.settled() == IDLE
