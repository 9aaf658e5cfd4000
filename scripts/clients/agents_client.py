"""openai-agents: an agent that calls a tool, hands over, and streams, on both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from run import raises

set_tracing_disabled(True)
QUIET = ModelSettings(max_tokens=200, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
called: list[tuple[str, int]] = []


@function_tool
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    called.append((city, days))
    return "sunny"


@asynccontextmanager
async def models(url: str, name: str) -> AsyncIterator[tuple[Any, Any]]:
    """Over chat completions, and over responses."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield (
            OpenAIChatCompletionsModel(model=name, openai_client=client),
            OpenAIResponsesModel(model=name, openai_client=client),
        )


async def uses_its_tool(model: Any) -> None:
    agent = Agent(name="A", instructions="Help.", model=model, tools=[weather])
    called.clear()
    result = await Runner.run(agent, "Weather in Bonn?", max_turns=3)
    assert result.final_output == "It will be sunny in Bonn.", result.final_output
    assert called == [("Bonn", 2)]
    assert result.context_wrapper.usage.requests == 2
    streamed = Runner.run_streamed(agent, "Weather in Bonn?", max_turns=3)
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert streamed.final_output == "It will be sunny in Bonn."
    assert called == [("Bonn", 2)] * 2


def check_an_agent_uses_its_tool(real: str, speaker: str) -> None:
    async def main() -> None:
        async with models(speaker, "speaker") as both:
            for model in both:
                await uses_its_tool(model)

    asyncio.run(main())


def check_noise(real: str, speaker: str) -> None:
    async def main() -> None:
        async with models(real, "qwen3-tiny") as (chat, responses):
            settings = ModelSettings(max_tokens=12, temperature=0)
            agent = Agent(name="A", model=chat, model_settings=settings)
            texts = [(await Runner.run(agent, "hi", max_turns=1)).final_output for _ in range(2)]
            assert texts[0] == texts[1] != ""
            cut = Agent(name="A", model=responses, model_settings=settings)
            with raises(ModelBehaviorError, "max_output_tokens"):
                await Runner.run(cut, "hi", max_turns=1)

    asyncio.run(main())


class Answer(BaseModel):
    """The weather; bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


@function_tool
def pick(city: Literal["Bonn", "Paris"]) -> str:
    """Picks one."""
    called.append((city, 0))
    return "picked"


def check_typed_answers(real: str, speaker: str) -> None:
    async def main() -> None:
        async with models(real, "qwen3-tiny") as both:
            for model in both:
                agent = Agent(name="A", model=model, output_type=Answer, model_settings=QUIET)
                assert isinstance((await Runner.run(agent, "hi", max_turns=1)).final_output, Answer)

    asyncio.run(main())


def check_a_forced_tool(real: str, speaker: str) -> None:
    async def main() -> None:
        async with models(real, "qwen3-tiny") as both:
            for model in both:
                called.clear()
                agent = Agent(
                    name="A",
                    model=model,
                    tools=[pick],
                    model_settings=replace(QUIET, tool_choice="required", parallel_tool_calls=False),
                    tool_use_behavior="stop_on_first_tool",
                )
                assert (await Runner.run(agent, "hi", max_turns=2)).final_output == "picked"
                assert [city for city, _ in called] in (["Bonn"], ["Paris"])

    asyncio.run(main())
