"""crewai: its models for OpenAI's servers and vLLM's, streams, a crew of one with a tool, typed answers."""

from __future__ import annotations

import os
from typing import Any, Literal

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel, ConfigDict, Field

called: list[tuple[str, int]] = []


@tool("weather")
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    called.append((city, days))
    return "sunny"


class Answer(BaseModel):
    """Bounded, because a small model would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def models(url: str, name: str, **options: Any) -> list[LLM]:
    where = {"base_url": f"{url}/v1", "api_key": "x", **options}
    return [LLM(model=name, custom_openai=True, **where), LLM(model=f"hosted_vllm/{name}", **where)]


def check_texts_and_streams(speaker: str) -> None:
    for stream in (False, True):
        for llm in models(speaker, "speaker", stream=stream):
            assert llm.call("hi").strip() == "Hello there, friend."


def check_a_crew_uses_its_tool(speaker: str) -> None:
    for llm in models(speaker, "speaker"):
        called.clear()
        agent = Agent(
            role="forecaster", goal="Tell the weather.", backstory="Knows it.", llm=llm, tools=[weather]
        )
        task = Task(description="Weather in Bonn?", expected_output="A sentence.", agent=agent)
        answer = Crew(agents=[agent], tasks=[task]).kickoff()
        assert str(answer) == "It will be sunny in Bonn."
        assert called == [("Bonn", 2)]


def check_typed_answers(demo: str) -> None:
    for llm in models(demo, "qwen3"):
        answer = llm.call("Where?", response_model=Answer)
        assert isinstance(
            answer if isinstance(answer, Answer) else Answer.model_validate_json(answer), Answer
        )
