"""mirascope: calls, streams, a tool's round and typed answers, over chats, responses and Anthropic's messages."""

from __future__ import annotations

from typing import Literal

from mirascope import llm
from pydantic import BaseModel, ConfigDict, Field

APIS = ("openai/{}:completions", "openai/{}:responses", "anthropic/{}")


def models(url: str, name: str) -> list[str]:
    """Point mirascope at a server; the model's names there, one for each API."""
    llm.register_provider("openai", api_key="x", base_url=f"{url}/v1")
    llm.register_provider("anthropic", api_key="x", base_url=url)
    return [api.format(name) for api in APIS]


@llm.tool
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return f"{city} {days}: sunny"


def check_calls_and_streams(real: str, speaker: str) -> None:
    for model in models(speaker, "speaker"):

        @llm.call(model, max_tokens=100)
        def greet() -> str:
            return "hi"

        answer = greet()
        assert answer.text() == "Hello there, friend.", model
        assert answer.resume("again").text() == "Hello there, friend."
        assert "".join(greet.stream().text_stream(sep="")) == "Hello there, friend."


def check_a_tools_round(real: str, speaker: str) -> None:
    for model in models(speaker, "speaker"):

        @llm.call(model, tools=[weather], max_tokens=100)
        def ask() -> str:
            return "Weather in Bonn?"

        answer = ask()
        outputs = answer.execute_tools()
        assert [output.result for output in outputs] == ["Bonn 2: sunny"], model
        assert answer.resume(outputs).text() == "It will be sunny in Bonn."
        stream = ask.stream()
        stream.finish()
        assert [output.result for output in stream.execute_tools()] == ["Bonn 2: sunny"], model


class Answer(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def check_typed_answers(real: str, speaker: str) -> None:
    """In its own modes: a schema and a forced call, where it can say that noise is not to think; JSON by prompt."""
    (model,) = models(real, "qwen3-tiny")[1:2]
    for mode in ("strict", "tool"):

        @llm.call(model, format=llm.format(Answer, mode=mode), max_tokens=300, thinking={"level": "none"})
        def ask() -> str:
            return "Weather?"

        assert isinstance(ask().parse(), Answer), mode
    for model in models(speaker, "speaker"):

        @llm.call(model, format=llm.format(Answer, mode="json"), max_tokens=100)
        def say() -> str:
            return "Weather in JSON?"

        assert say().parse() == Answer(city="Bonn", days=2), model
