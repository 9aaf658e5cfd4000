"""outlines: its models for OpenAI's servers and vLLM's, with types, a pattern, choices and a grammar."""

from __future__ import annotations

import re
from typing import Any, Literal

import openai
import outlines
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field

QUIET: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "max_tokens": 200}
"""Noise would think for ever, and a schema holds only after the thoughts."""
GRAMMAR = 'start: city " " /[0-9]/\ncity: "Bonn" | "Paris"\n'


class Answer(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


def check_chats_and_streams(real: str, speaker: str) -> None:
    ask = Chat([{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}])
    for make in (outlines.from_openai, outlines.from_vllm):
        model = make(client(speaker), "speaker")
        assert model(ask) == model("hi") == "Hello there, friend."
        assert "".join(model.stream(ask)) == "Hello there, friend."


def check_types(real: str, speaker: str) -> None:
    for make in (outlines.from_openai, outlines.from_vllm):
        answer = make(client(real), "qwen3-tiny")("Weather?", Answer, **QUIET)
        assert Answer.model_validate_json(answer)


def check_patterns_choices_and_grammars(real: str, speaker: str) -> None:
    model = outlines.from_vllm(client(real), "qwen3-tiny")
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", model("?", Regex("[a-f]{3}-[0-9]{2}"), **QUIET))
    assert model("?", Literal["yes", "no"], **QUIET) in ("yes", "no")
    assert re.fullmatch("(Bonn|Paris) [0-9]", model("?", CFG(GRAMMAR), **QUIET))
    assert re.fullmatch("(Bonn|Paris) [0-9]", "".join(model.stream("?", CFG(GRAMMAR), **QUIET)))
