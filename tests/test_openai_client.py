"""The official client against the CPU engine: what people write in their first hour. Random weights answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
MODEL = "qwen3-tiny"
ASK: Any = [{"role": "user", "content": "Weather in Bonn?"}]
QUIET: Any = {"chat_template_kwargs": {"enable_thinking": False}}
"""Noise would think for ever, and a schema holds only after the thoughts."""


class Weather(pydantic.BaseModel, extra="forbid"):
    """Every field is bounded: noise would write an endless text."""

    city: Literal["Bonn", "Paris"]
    days: Literal[1, 2, 3]
    wet: bool


TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}


@pytest.fixture(scope="module")
def client(start: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{start(TINY).url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("n", [1, 3])
def test_completions(client: openai.OpenAI, n: int) -> None:
    options: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 12, "seed": 5, "n": n, "logprobs": 2}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == list(range(n))
    texts = dict.fromkeys(range(n), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(n)}
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)  # ids without text share a key
    assert usage == whole.usage
    assert len(set(texts.values())) == n


@pytest.mark.parametrize("n", [1, 2])
def test_chat(client: openai.OpenAI, n: int) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 12, "seed": 5, "n": n, "extra_body": QUIET}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    texts = dict.fromkeys(range(n), "")
    reasons = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        assert choice.message.role == "assistant"
        assert texts[choice.index] == choice.message.content != ""
        assert reasons[choice.index] == choice.finish_reason == "length"
        assert len(choice.logprobs.content) == 12
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= 0
    assert whole.usage.completion_tokens == 12 * n


def test_responses(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "input": "hi",
        "max_output_tokens": 9,
        "temperature": 0,
        "extra_body": QUIET,
    }
    whole = client.responses.create(**options)
    *events, last = client.responses.create(**options, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert (last.type, whole.status) == ("response.incomplete", "incomplete")
    assert "".join(deltas) == last.response.output_text == whole.output_text != ""
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tools(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 200, "seed": 1, "extra_body": QUIET}
    first = client.chat.completions.create(
        messages=ASK, tool_choice=choice, parallel_tool_calls=False, **options
    )
    (call,) = first.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert Weather.model_validate_json(call.function.arguments)
    assert first.choices[0].finish_reason == "tool_calls"
    arguments = ""
    for chunk in client.chat.completions.create(
        messages=ASK, tool_choice=choice, parallel_tool_calls=False, stream=True, **options
    ):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments or ""
    assert json.loads(arguments) == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*ASK, first.choices[0].message, result]
    assert (
        client.chat.completions.create(messages=turns, **{**options, "max_tokens": 3}).usage.completion_tokens
        == 3
    )


def test_structured_parse(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Weather, max_tokens=200, seed=seed, extra_body=QUIET
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Weather, max_tokens=200, seed=1, extra_body=QUIET
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    parsed = client.responses.parse(
        model=MODEL, input="hi", text_format=Weather, max_output_tokens=200, extra_body=QUIET
    )
    assert isinstance(parsed.output_parsed, Weather)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (openai.BadRequestError, {"max_tokens": 0}, "max_tokens"),
        (openai.BadRequestError, {"temperature": 3}, "temperature"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.NotFoundError, {"model": "other"}, "model"),
    ],
)
def test_refusals_are_typed(
    client: openai.OpenAI, kind: type[openai.APIStatusError], fields: Any, param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 1, **fields})
    assert caught.value.param == param
