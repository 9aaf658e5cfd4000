"""semantic-kernel: its chat and text services, streams, an agent with a plug-in, typed answers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

called: list[tuple[str, int]] = []


class Weather:
    """A plug-in."""

    @kernel_function(name="weather", description="Tells the weather.")
    def weather(self, city: Annotated[str, "where"], days: Annotated[int, "how many"]) -> str:
        called.append((city, days))
        return "sunny"


class Answer(BaseModel):
    """Bounded, because a small model would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def service(url: str, name: str) -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=name, async_client=client)


def check_texts_and_streams(real: str, speaker: str) -> None:
    async def main() -> None:
        history = ChatHistory(system_message="Be short.")
        history.add_user_message("hi")
        settings = OpenAIChatPromptExecutionSettings()
        chat = service(speaker, "speaker")
        assert str(await chat.get_chat_message_content(history, settings)) == "Hello there, friend."
        pieces = [str(piece) async for piece in chat.get_streaming_chat_message_content(history, settings)]
        assert "".join(pieces) == "Hello there, friend."
        client = AsyncOpenAI(base_url=f"{real}/v1", api_key="x", max_retries=0)
        text = OpenAITextCompletion(ai_model_id="qwen3-tiny", async_client=client)
        options = OpenAITextPromptExecutionSettings(max_tokens=5, temperature=0)
        assert str(await text.get_text_content("Hello", options))

    asyncio.run(main())


def check_an_agent_uses_its_plug_in(speaker: str) -> None:
    async def main() -> None:
        agent = ChatCompletionAgent(service=service(speaker, "speaker"), name="helper", plugins=[Weather()])
        assert str(await agent.get_response("Weather in Bonn?")) == "It will be sunny in Bonn."
        pieces = [str(piece) async for piece in agent.invoke_stream("Weather in Bonn?")]
        assert "".join(pieces).endswith("It will be sunny in Bonn.")

    called.clear()
    asyncio.run(main())
    assert called == [("Bonn", 2)] * 2


def check_typed_answers(demo: str) -> None:
    async def main() -> None:
        history = ChatHistory()
        history.add_user_message("Where?")
        settings = OpenAIChatPromptExecutionSettings(response_format=Answer, max_completion_tokens=300)
        answer = await service(demo, "qwen3").get_chat_message_content(history, settings)
        assert Answer.model_validate_json(str(answer))

    asyncio.run(main())
