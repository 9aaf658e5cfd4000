"""Budgets of thoughts through `openinfer serve`: kept with everything else that a request may ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

GOLDENS = Path(__file__).parent / "goldens"
HI = [{"role": "user", "content": "Name a place."}]
WITHIN = [*HI, {"role": "assistant", "content": "<think>\nWell,"}]
"""A prompt that ends inside a thought."""
BEGUN = {"messages": WITHIN, "continue_final_message": True, "add_generation_prompt": False}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
END_THINK = 399
"""Of the golden checkpoints' tokenizer."""


@pytest.fixture(scope="module")
def http(tiny: Any, start: Callable[..., Any]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=start(tiny.path, "--max-num-seqs", "16").url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(start: Callable[..., Any]) -> Iterator[httpx.Client]:
    """Its template begins each answer with a thought."""
    server = start(GOLDENS / "qwen3_5-tiny", "--max-num-seqs", "4")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def post(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    answer = http.post(path, json={"seed": 4, "temperature": 1.0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def closings(choice: dict[str, Any]) -> int:
    """How many tokens come until the thought is closed."""
    return int(choice["token_ids"].index(END_THINK)) + 1


@pytest.mark.parametrize("field", ["thinking_token_budget", "max_thinking_tokens", "thinking_budget"])
def test_the_thought_is_closed_when_its_budget_is_spent(http: httpx.Client, field: str) -> None:
    for budget in (1, 7, 20):
        body = post(http, **BEGUN, **{field: budget}, max_tokens=40, return_token_ids=True)
        (choice,) = body["choices"]
        assert closings(choice) == budget
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    free = post(http, **BEGUN, max_tokens=40, return_token_ids=True)["choices"][0]
    assert END_THINK not in free["token_ids"]


def test_what_comes_before_and_after_is_the_models_own(http: httpx.Client) -> None:
    asked = {"max_tokens": 40, "temperature": 0, "return_token_ids": True}
    free = post(http, **{**BEGUN, **asked})["choices"][0]["token_ids"]
    kept = post(http, **{**BEGUN, **asked}, thinking_token_budget=9)["choices"][0]["token_ids"]
    assert kept[:8] == free[:8]
    assert kept[8] == END_THINK
    loose = post(http, **{**BEGUN, **asked}, thinking_token_budget=999)["choices"][0]["token_ids"]
    assert loose == free


def test_several_choices_streams_and_cached_prefixes(http: httpx.Client) -> None:
    options = {
        **BEGUN,
        "seed": 3,
        "n": 3,
        "max_thinking_tokens": 12,
        "max_tokens": 30,
        "return_token_ids": True,
    }
    whole = [choice["token_ids"] for choice in post(http, **options)["choices"]]
    assert all(11 <= tokens.index(END_THINK) <= 14 for tokens in whole)  # noise cuts characters
    assert len({tuple(tokens) for tokens in whole}) == 3
    streamed: dict[int, list[int]] = {}
    body = {"seed": 4, "temperature": 1.0, "stream": True, **options}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    assert [streamed[index] for index in range(3)] == whole


def test_an_answer_after_a_schema_follows_the_closed_thought(http: httpx.Client) -> None:
    for budget in (2, 11):
        body = post(http, **BEGUN, thinking_token_budget=budget, response_format=FORMAT, max_tokens=100)
        message = body["choices"][0]["message"]
        assert 0 <= json.loads(message["content"])["n"] <= 99
        spent = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert budget <= spent <= budget + 3


def test_messages_and_efforts(thinker: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 15}
    body = {"messages": HI, "max_tokens": 40, "thinking": thinking, "temperature": 0}
    answer = thinker.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    blocks = answer.json()["content"]
    assert [block["type"] for block in blocks][:1] == ["thinking"]
    assert 15 < answer.json()["usage"]["output_tokens"] <= 40
    chat = post(thinker, messages=HI, thinking=thinking, max_tokens=40, return_token_ids=True)
    assert 15 <= closings(chat["choices"][0]) <= 18
    # An effort bounds the thoughts too, and is heard of only where there is room for more.
    assert (
        "warning"
        not in thinker.post(
            "/v1/chat/completions", json={"messages": HI, "reasoning_effort": "low", "max_tokens": 5}
        ).headers
    )


def test_a_model_that_does_not_think_is_left_alone(http: httpx.Client) -> None:
    asked = {"messages": HI, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    free = post(http, **asked)["choices"][0]["token_ids"]
    assert post(http, **asked, thinking_token_budget=5)["choices"][0]["token_ids"] == free


def test_a_budget_below_minus_one_is_refused_by_name(http: httpx.Client) -> None:
    for field in ("thinking_token_budget", "max_thinking_tokens", "thinking_budget"):
        refused = http.post("/v1/chat/completions", json={"messages": HI, field: -2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_a_budget_of_minus_one_is_none(http: httpx.Client) -> None:
    asked = {"messages": HI, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    free = post(http, **asked)["choices"][0]["token_ids"]
    assert post(http, **asked, thinking_token_budget=-1)["choices"][0]["token_ids"] == free
