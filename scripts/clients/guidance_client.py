"""guidance: its models for vLLM's servers and OpenAI's, with a choice, a pattern, a schema and a grammar."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from guidance import assistant, gen, guidance, select, system, user
from guidance import json as gen_json
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


@guidance(stateless=True)
def report(lm: Any) -> Any:
    return (
        lm
        + "It is "
        + select(["sunny", "wet"], name="weather")
        + " for "
        + gen("days", regex="[0-9]")
        + " days."
    )


def asked(lm: Any) -> Any:
    with system():
        lm += "Be short."
    with user():
        lm += "Weather?"
    return lm


def check_text(demo: str) -> None:
    for make in (OpenAI, VLLMModel):
        lm = asked(make("qwen3", base_url=f"{demo}/v1", api_key="x", echo=False))
        with assistant():
            lm += gen("said")
        assert lm["said"].startswith("I cannot look up the weather"), (make, lm["said"])


def check_constraints(demo: str) -> None:
    start = asked(VLLMModel("qwen3", base_url=f"{demo}/v1", api_key="x", echo=False))
    with assistant():
        lm = start + select(["sunny", "wet"], name="weather")
    assert lm["weather"] in ("sunny", "wet")
    with assistant():
        lm = start + gen("code", regex="[a-f]{3}-[0-9]{2}")
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", lm["code"])
    with assistant():
        lm = start + gen_json("answer", schema=Answer)
    assert Answer.model_validate(json.loads(lm["answer"]))


def check_a_grammar(demo: str) -> None:
    lm = asked(VLLMModel("qwen3", base_url=f"{demo}/v1", api_key="x", echo=False))
    with assistant():
        lm += report()
    assert lm["weather"] in ("sunny", "wet")
    assert lm["days"].isdigit()
