"""langchain-openai: chat, text, tools and structured output, over chat completions and responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
"""Noise would think for ever, and a schema holds only after the thoughts."""


@tool
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return f"sunny in {city} for {days} days"


def chat(url: str, model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="x", model=model, max_retries=0, **options)


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    model = chat(real, "qwen3-tiny", temperature=0, max_tokens=24, stream_usage=True)
    whole = model.invoke("hi")
    pieces = list(model.stream("hi"))
    assert len(pieces) > 2
    assert "".join(piece.content for piece in pieces) == whole.content != ""
    counted = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    assert counted == [whole.usage_metadata["output_tokens"]]
    assert len(model.batch(["a", "b", "c"])) == 3
    assert asyncio.run(model.ainvoke("hi")).content == whole.content


def check_logprobs(real: str, speaker: str) -> None:
    answer = chat(real, "qwen3-tiny", max_tokens=4, logprobs=True, top_logprobs=3).invoke("hi")
    content = answer.response_metadata["logprobs"]["content"]
    assert 0 < len(content) <= 4
    assert all(len(one["top_logprobs"]) == 3 for one in content)


def check_completions(real: str, speaker: str) -> None:
    model = OpenAI(
        base_url=f"{real}/v1", api_key="x", model="qwen3-tiny", max_tokens=8, temperature=0, max_retries=0
    )
    assert model.invoke("Hello") == "".join(model.stream("Hello"))


def check_a_tools_round(real: str, speaker: str) -> None:
    for responses in (False, True):
        model = chat(speaker, "speaker", use_responses_api=responses).bind_tools([weather])
        ask = HumanMessage("Weather in Bonn?")
        first = model.invoke([ask])
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Bonn", "days": 2})
        streamed: Any = None
        for piece in model.stream([ask]):
            streamed = piece if streamed is None else streamed + piece
        assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage)
        last = model.invoke([ask, first, result])
        assert last.text == "It will be sunny in Bonn.", last


class Answer(BaseModel):
    """The weather; bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


@tool
def pick(city: Literal["Bonn", "Paris"], wet: bool) -> str:
    """Picks one."""
    return city


def check_structured_output(real: str, speaker: str) -> None:
    model = chat(real, "qwen3-tiny", max_tokens=200, extra_body=QUIET)
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Answer, method=method).invoke("Weather in Bonn?")
        assert isinstance(answer, Answer), (method, answer)
    over_responses = chat(real, "qwen3-tiny", max_tokens=200, use_responses_api=True, extra_body=QUIET)
    assert isinstance(over_responses.with_structured_output(Answer).invoke("Weather in Bonn?"), Answer)


def check_forced_tools(real: str, speaker: str) -> None:
    model = chat(real, "qwen3-tiny", max_tokens=200, seed=1, extra_body=QUIET)
    for choice in ("any", "pick"):
        # Without strict the schema lets further properties come, and noise would add them without end.
        tools = model.bind_tools([pick], tool_choice=choice, parallel_tool_calls=False, strict=True)
        (call,) = tools.invoke("hi").tool_calls
        assert call["name"] == "pick"
        assert pick.invoke(call["args"]) in ("Bonn", "Paris")
