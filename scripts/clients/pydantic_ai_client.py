"""pydantic-ai: tools with dates, typed answers, streams, on both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUIET: Any = {"max_tokens": 300, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def models(url: str, name: str) -> list[Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="x")
    return [OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)]


def check_a_tools_round(real: str, speaker: str) -> None:
    called: list[tuple[str, int]] = []

    def weather(city: str, days: int) -> str:
        """Tells the weather."""
        called.append((city, days))
        return "sunny"

    async def main() -> None:
        for model in models(speaker, "speaker"):
            agent = Agent(model, instructions="Help.", tools=[weather])
            called.clear()
            assert (await agent.run("Weather in Bonn?")).output == "It will be sunny in Bonn."
            async with agent.iter("Weather in Bonn?") as steps:
                async for node in steps:
                    if Agent.is_model_request_node(node):
                        async with node.stream(steps.ctx) as stream:
                            assert [event async for event in stream]
            assert steps.result.output == "It will be sunny in Bonn."
            assert called == [("Bonn", 2)] * 2

    asyncio.run(main())


class Booking(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    day: datetime.date
    until: datetime.datetime | None
    rooms: list[Literal[1, 2, 3]] = Field(max_length=2)
    by: dict[Literal["a", "b"], int] = Field(max_length=1)


def check_typed_answers_with_dates(real: str, speaker: str) -> None:
    async def main() -> None:
        for model in models(real, "qwen3-tiny"):
            agent = Agent(model, output_type=Booking, model_settings=QUIET, retries=0)
            for seed in (1, 2):
                result = await agent.run("Book.", model_settings={**QUIET, "seed": seed})
                assert isinstance(result.output.day, datetime.date)

    asyncio.run(main())
