"""instructor: typed answers, in all its modes for OpenAI's servers."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

ASK: list[dict[str, str]] = [{"role": "user", "content": "Weather in Bonn?"}]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
"""Noise would think for ever, and a schema holds only after the thoughts."""


class Weather(BaseModel):
    """The weather. Every field is bounded: a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)
    wet: bool


class Where(BaseModel):
    """The object that the speaker sends."""

    city: str
    days: int


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0), mode=mode)


def check_json_in_markdown(real: str, speaker: str) -> None:
    answer = client(speaker, instructor.Mode.MD_JSON).chat.completions.create(
        model="speaker", messages=ASK, response_model=Where, max_retries=0
    )
    assert answer.model_dump() == {"city": "Bonn", "days": 2}


def check_forced_modes(real: str, speaker: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        for seed in range(4):
            answer = client(real, mode).chat.completions.create(
                model="qwen3-tiny",
                messages=ASK,
                response_model=Weather,
                max_retries=0,
                max_tokens=200,
                seed=seed,
                extra_body={**QUIET, "parallel_tool_calls": False},  # noise would call again and again
            )
            assert isinstance(answer, Weather)


def check_partial_answers_stream(real: str, speaker: str) -> None:
    pieces = list(
        client(real, instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            model="qwen3-tiny",
            messages=ASK,
            response_model=Weather,
            max_retries=0,
            max_tokens=200,
            extra_body=QUIET,
        )
    )
    assert len(pieces) > 1
    assert Weather.model_validate(pieces[-1].model_dump())
