"""haystack: its chat generator, and an agent with a tool."""

from __future__ import annotations

from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}


def generator(url: str, model: str, **options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        Secret.from_token("x"), model, api_base_url=f"{url}/v1", max_retries=0, **options
    )


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    options = {"generation_kwargs": {"max_tokens": 12, "temperature": 0}}
    ask = [ChatMessage.from_system("Be short."), ChatMessage.from_user("hi")]
    whole = generator(real, "qwen3-tiny", **options).run(ask)["replies"][0]
    pieces: list[StreamingChunk] = []
    generator(real, "qwen3-tiny", streaming_callback=pieces.append, **options).run(ask)
    assert "".join(piece.content for piece in pieces) == whole.text


def check_an_agent_uses_its_tool(real: str, speaker: str) -> None:
    called = []

    def weather(city: str, days: int) -> str:
        called.append((city, days))
        return "sunny"

    tool = Tool("weather", "Tells the weather.", PARAMETERS, weather)
    agent = Agent(chat_generator=generator(speaker, "speaker"), tools=[tool])
    answer = agent.run(messages=[ChatMessage.from_user("Weather in Bonn?")])
    assert answer["messages"][-1].text == "It will be sunny in Bonn."
    assert called == [("Bonn", 2)]
