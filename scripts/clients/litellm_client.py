"""litellm, by its routes for OpenAI's servers, vLLM's, and Anthropic's."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel, ConfigDict, Field
from run import raises

ASK = [{"role": "user", "content": "Weather in Bonn?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
litellm.telemetry = False
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
"""Noise would think for ever, and a schema holds only after the thoughts."""


def routes(url: str, model: str) -> list[dict[str, Any]]:
    return [
        {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "x", "num_retries": 0},
        {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "x", "num_retries": 0},
        {"model": f"anthropic/{model}", "api_base": url, "api_key": "x", "num_retries": 0},
    ]


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    for route in routes(real, "qwen3-tiny"):
        options: dict[str, Any] = {"messages": ASK, "max_tokens": 24, "temperature": 0, **route}
        whole = litellm.completion(**options)
        text = "".join(
            piece.choices[0].delta.content or "" for piece in litellm.completion(**options, stream=True)
        )
        assert text == (whole.choices[0].message.content or ""), route
        assert whole.usage.completion_tokens <= 24

    async def main() -> str:
        return (await litellm.acompletion(**options)).choices[0].message.content or ""

    assert asyncio.run(main()) == text


def check_text(real: str, speaker: str) -> None:
    route = routes(real, "qwen3-tiny")[0] | {"model": "text-completion-openai/qwen3-tiny"}
    answer = litellm.text_completion(prompt="Hello", max_tokens=5, temperature=0, **route)
    assert isinstance(answer.choices[0].text, str)


def check_a_tools_round(real: str, speaker: str) -> None:
    for route in routes(speaker, "speaker"):
        options: dict[str, Any] = {"max_tokens": 300, "tools": [WEATHER], **route}
        message = litellm.completion(messages=ASK, **options).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather", route
        assert json.loads(call.function.arguments) == {"city": "Bonn", "days": 2}
        if not route["model"].startswith("anthropic/"):  # an API whose models think only on request
            assert message.reasoning_content.strip() == "I need the weather.", route
        pieces = list(litellm.completion(messages=ASK, stream=True, **options))
        streamed = litellm.stream_chunk_builder(pieces, messages=ASK).choices[0].message
        assert [json.loads(one.function.arguments) for one in streamed.tool_calls] == [
            {"city": "Bonn", "days": 2}
        ]
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        last = litellm.completion(messages=[*ASK, message.model_dump(), result], **options)
        assert last.choices[0].message.content == "It will be sunny in Bonn.", route


def check_responses(real: str, speaker: str) -> None:
    answer = litellm.responses(input="hi", max_output_tokens=40, **routes(speaker, "speaker")[0])
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert texts == ["Hello there, friend."]


def check_refusals_are_typed(real: str, speaker: str) -> None:
    route = routes(real, "qwen3-tiny")[0]
    with raises(litellm.NotFoundError, "other"):
        litellm.completion(messages=ASK, max_tokens=1, **{**route, "model": "openai/other"})
    with raises(litellm.BadRequestError, "max_tokens"):
        litellm.completion(messages=ASK, max_tokens=10**6, **route)


class Answer(BaseModel):
    """The weather; bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


PICK = {"type": "function", "function": {"name": "pick", "parameters": Answer.model_json_schema()}}


def check_structured_output(real: str, speaker: str) -> None:
    for route in routes(real, "qwen3-tiny")[:2]:
        answer = litellm.completion(
            messages=ASK, max_tokens=200, response_format=Answer, extra_body=QUIET, **route
        )
        assert Answer.model_validate_json(answer.choices[0].message.content)


def check_forced_tools(real: str, speaker: str) -> None:
    # Its route for vLLM takes additionalProperties out of tools, and noise would then add without end.
    route = routes(real, "qwen3-tiny")[0]
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        options: dict[str, Any] = {"max_tokens": 200, "tools": [PICK], "parallel_tool_calls": False, **route}
        answer = litellm.completion(messages=ASK, tool_choice=choice, extra_body=QUIET, **options)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "pick"
        assert Answer.model_validate_json(call.function.arguments)
