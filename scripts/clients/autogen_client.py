"""autogen: its model client, an assistant that reflects on a tool's result, streams, typed answers."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, StructuredMessage
from autogen_core.models import ModelInfo, SystemMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def client(url: str, name: str, **options: Any) -> OpenAIChatCompletionClient:
    info = ModelInfo(
        vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
    )
    return OpenAIChatCompletionClient(
        model=name, base_url=f"{url}/v1", api_key="x", model_info=info, max_retries=0, **options
    )


def check_texts_and_streams(speaker: str) -> None:
    async def main() -> None:
        model = client(speaker, "speaker")
        ask = [SystemMessage(content="Be short."), UserMessage(content="hi", source="user")]
        whole = await model.create(ask)
        assert whole.content == "Hello there, friend."
        *pieces, last = [piece async for piece in model.create_stream(ask, include_usage=True)]
        assert "Hello there, friend." in "".join(pieces)
        assert last.content == "Hello there, friend."
        assert last.usage.completion_tokens > 0

    asyncio.run(main())


def check_an_assistant_uses_its_tool(speaker: str) -> None:
    called = []

    async def weather(city: str, days: int) -> str:
        """Tells the weather."""
        called.append((city, days))
        return "sunny"

    async def main(stream: bool) -> None:
        agent = AssistantAgent(
            "helper",
            model_client=client(speaker, "speaker"),
            tools=[weather],
            reflect_on_tool_use=True,
            model_client_stream=stream,
        )
        messages = [message async for message in agent.run_stream(task="Weather in Bonn?")]
        assert messages[-1].messages[-1].content == "It will be sunny in Bonn."
        assert any(isinstance(one, ModelClientStreamingChunkEvent) for one in messages) == stream

    asyncio.run(main(False))
    asyncio.run(main(True))
    assert called == [("Bonn", 2)] * 2


def check_typed_answers(demo: str) -> None:
    async def main() -> None:
        agent = AssistantAgent("typist", model_client=client(demo, "qwen3"), output_content_type=Answer)
        last = (await agent.run(task="Where?")).messages[-1]
        assert isinstance(last, StructuredMessage)
        assert isinstance(last.content, Answer)

    asyncio.run(main())
