"""litellm, by its routes for OpenAI's servers, vLLM's, and Anthropic's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
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
