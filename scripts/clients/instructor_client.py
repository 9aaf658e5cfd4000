"""instructor: typed answers, with its retries."""

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather."""

    city: str
    days: int


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0), mode=mode)


def check_json_in_markdown(real: str, speaker: str) -> None:
    answer = client(speaker, instructor.Mode.MD_JSON).chat.completions.create(
        model="speaker",
        messages=[{"role": "user", "content": "Weather in Bonn?"}],
        response_model=Weather,
        max_retries=0,
    )
    assert answer.model_dump() == {"city": "Bonn", "days": 2}
