"""llama-index: its model for compatible servers, whole, streamed, with a tool, and typed."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

called: list[tuple[str, int]] = []


def weather(city: str, days: int) -> str:
    """Tells the weather."""
    called.append((city, days))
    return "sunny"


def model(url: str, name: str, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=name, api_base=f"{url}/v1", api_key="x", is_chat_model=True, max_retries=0, **options
    )


def check_noise_streams_as_it_comes(real: str, speaker: str) -> None:
    llm = model(real, "qwen3-tiny", max_tokens=12, temperature=0)
    ask = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="hi")]
    whole = llm.chat(ask).message.content
    assert [*llm.stream_chat(ask)][-1].message.content == whole


def check_a_call(real: str, speaker: str) -> None:
    llm = model(speaker, "speaker", is_function_calling_model=True)
    called.clear()
    answer = llm.predict_and_call([FunctionTool.from_defaults(weather)], user_msg="Weather in Bonn?")
    assert str(answer) == "sunny"
    assert called == [("Bonn", 2)]


class Answer(BaseModel):
    """Bounded, because a model of random weights would write an endless text."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=0, le=9)


def check_typed_answers(real: str, speaker: str) -> None:
    quiet = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    llm = model(
        *(real, "qwen3-tiny"),
        max_tokens=200,
        is_function_calling_model=True,
        additional_kwargs=quiet,
        temperature=0,
    )
    answer = llm.as_structured_llm(Answer).chat([ChatMessage(role="user", content="Weather?")])
    assert isinstance(answer.raw, Answer)
