"""The DeepSeek-V4 recipe behind `openinfer serve`, over a real socket; config.json chooses recipe and chat format."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend.chat import DeepSeekV4Renderer

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def body(prompt: list[int] | list[list[int]], **options: Any) -> dict[str, Any]:
    defaults = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **defaults, **options}


def test_greedy_tokens_are_the_goldens(deepseek: Any, start: Callable[..., Any]) -> None:
    url = start(deepseek.path, "--activation-quantization", "off").url
    prompts = [deepseek.prompt(index) for index in range(deepseek.num_prompts)]
    answer = httpx.post(f"{url}/v1/completions", json=body(prompts), timeout=120)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for choice in choices:
        assert choice["token_ids"] == deepseek.greedy(choice["index"]), f"prompt {choice['index']}"
        assert choice["finish_reason"] == "length"


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as its authors publish it: without a Jinja template."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_chats_are_rendered_by_code_and_read_in_this_familys_format(
    as_published: Path, start: Callable[..., Any]
) -> None:
    facts = json.loads((TINY / "golden.json").read_text())
    cases = [c for c in facts["chat_cases"] if c["add_generation_prompt"]]
    with httpx.Client(base_url=start(as_published).url, timeout=60) as client:
        for case in cases:
            thinking = case["enable_thinking"]
            request = {
                "messages": case["messages"],
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "chat_template_kwargs": {} if thinking is None else {"thinking": thinking},
            }
            text = DeepSeekV4Renderer().render(case["messages"], kwargs=request["chat_template_kwargs"])
            assert text == case["text"]
            chat = client.post("/v1/chat/completions", json=request).json()
            assert chat["usage"]["prompt_tokens"] == len(case["ids"])
            message = chat["choices"][0]["message"]
            assert bool(message.get("reasoning")) == bool(thinking)
            assert bool(message["content"]) == (not thinking)
        tools = client.post("/v1/chat/completions", json={**request, "tools": [TOOL]})
        assert tools.status_code == 200, tools.text
        assert tools.json()["usage"]["prompt_tokens"] > len(case["ids"]) + 50
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages = [{"role": "user", "content": [image]}]
        refused = client.post("/v1/chat/completions", json={**request, "messages": messages})
        assert refused.status_code == 400
        assert "image_url" in refused.text


def test_a_prefix_is_found_at_multiples_of_128_tokens(start: Callable[..., Any]) -> None:
    rng = random.Random(11)
    prompt = [rng.randrange(3, 540) for _ in range(300)]
    with httpx.Client(base_url=start(TINY).url, timeout=60) as client:
        answers = [
            client.post("/v1/completions", json=body(ids, max_tokens=8)).json()
            for ids in (prompt, prompt, prompt[:257], prompt[:256], prompt[:100])
        ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 256, 256, 128, 0]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


def test_answers_take_the_form_of_a_schema_and_have_log_probabilities(start: Callable[..., Any]) -> None:
    """What the engine shares with the others: grammars after the thoughts, log-probabilities, several choices."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    request = {
        "messages": [{"role": "user", "content": "Is it?"}],
        "chat_template_kwargs": {"thinking": False},
        "response_format": asked,
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 3,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = httpx.post(f"{start(TINY).url}/v1/chat/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == 3
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"ok"}
        entries = choice["logprobs"]["content"]
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def some_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Greedy and seeded ones, prompts from 1 to 200 tokens of which some begin alike, 1 to 24 new tokens."""
    shared = [rng.randrange(3, 540) for _ in range(130)]
    requests = []
    for n in range(10):
        own = [rng.randrange(3, 540) for _ in range(rng.randint(1, 70))]
        options: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 12, 24])}
        if n % 2:
            options |= {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": n}
        requests.append(body([*shared, *own] if n % 3 else own, **options))
    return requests


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


def test_32_mixed_streams_give_what_each_gives_alone_and_leave_nothing(start: Callable[..., Any]) -> None:
    server = start(TINY, "--max-num-seqs", "24", "--max-num-batched-tokens", "96")
    rng = random.Random(7)
    requests = some_requests(rng)
    jobs = [(n % len(requests), rng.choice([None, None, None, 1, 3, 10])) for n in range(32)]
    rng.shuffle(jobs)

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            alone = [await stream(client, request, None) for request in requests]
            together = await asyncio.gather(*(stream(client, requests[n], drop) for n, drop in jobs))
            return alone, together

    alone, together = asyncio.run(run())
    for (n, drop), tokens in zip(jobs, together, strict=True):
        assert tokens == (alone[n] if drop is None else alone[n][: len(tokens)])
    assert server.settled() == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
