"""Anthropic's official client against /v1/messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import pydantic
from run import raises

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
ASK: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
GREEDY: dict[str, Any] = {"model": "qwen3-tiny", "extra_body": {"temperature": 0}}
"""The API knows a temperature; this version of the client has no parameter for it."""

QUIET: dict[str, Any] = {
    "model": "qwen3-tiny",
    "max_tokens": 200,
    "messages": ASK,
    "thinking": {"type": "disabled"},
}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    with client(real) as c:
        options: dict[str, Any] = {
            "max_tokens": 24,
            "messages": ASK,
            "thinking": {"type": "disabled"},
            **GREEDY,
        }
        whole = c.messages.create(**options)
        assert whole.usage.output_tokens <= 24
        with c.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text") != ""
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def check_a_tools_round(real: str, speaker: str) -> None:
    with client(speaker) as c:
        options: dict[str, Any] = {
            "model": "speaker",
            "max_tokens": 300,
            "tools": [WEATHER],
            "thinking": {"type": "adaptive"},
        }
        first = c.messages.create(messages=ASK, **options)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.stop_reason == "tool_use"
        use = first.content[-1]
        assert use.type == "tool_use"
        assert (use.name, use.input) == ("weather", {"city": "Bonn", "days": 2})
        with c.messages.stream(messages=ASK, **options) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        assert {"thinking", "text", "input_json"} <= kinds
        assert [b.model_dump(exclude={"id"}) for b in streamed.content] == [
            b.model_dump(exclude={"id"}) for b in first.content
        ]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = c.messages.create(messages=turns, system="Be brief.", **options)
        assert [block.text for block in second.content if block.type == "text"] == [
            "It will be sunny in Bonn."
        ]
        assert second.stop_reason == "end_turn"


def check_counts_and_models(real: str, speaker: str) -> None:
    with client(real) as c:
        counted = c.messages.count_tokens(model="qwen3-tiny", messages=ASK).input_tokens
        usage = c.messages.create(model="qwen3-tiny", messages=ASK, max_tokens=1).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert [model.id for model in c.models.list()] == ["qwen3-tiny"]
        assert c.models.retrieve("qwen3-tiny").id == "qwen3-tiny"


def check_refusals_are_typed(real: str, speaker: str) -> None:
    with client(real) as c:
        for error, word, fields in (
            (anthropic.NotFoundError, "other", {"model": "other"}),
            (anthropic.BadRequestError, "max_tokens", {"max_tokens": 0}),
            (anthropic.BadRequestError, "temperature", {"extra_body": {"temperature": 9}}),
        ):
            with raises(error, word):
                c.messages.create(**{"model": "qwen3-tiny", "max_tokens": 1, "messages": ASK, **fields})


def check_many_at_once(real: str, speaker: str) -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=real, api_key="x", max_retries=0) as c:
            answers = [c.messages.create(max_tokens=9, messages=ASK, **GREEDY) for _ in range(8)]
            return [repr(answer.content) for answer in await asyncio.gather(*answers)]

    assert len(set(asyncio.run(main()))) == 1


def check_forced_tools(real: str, speaker: str) -> None:
    cities = {"type": "string", "enum": ["Bonn", "Paris"]}
    schema = {
        "type": "object",
        "properties": {"city": cities},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"name": "pick", "input_schema": schema}
    with client(real) as c:
        for kind in ({"type": "any"}, {"type": "tool", "name": "pick"}):
            choice: Any = {**kind, "disable_parallel_tool_use": True}
            answer = c.messages.create(
                model="qwen3-tiny",
                max_tokens=200,
                messages=ASK,
                tools=[tool],
                tool_choice=choice,
                thinking={"type": "disabled"},
            )
            (use,) = [block for block in answer.content if block.type == "tool_use"]
            assert use.name == "pick"
            assert use.input["city"] in ("Bonn", "Paris")
            assert answer.stop_reason == "tool_use"


def check_structured_output(real: str, speaker: str) -> None:
    class Answer(pydantic.BaseModel, extra="forbid"):
        city: Literal["Bonn", "Paris"]
        wet: bool

    with client(real) as c:
        answer = c.messages.parse(**QUIET, output_format=Answer)
    assert isinstance(answer.parsed_output, Answer)
