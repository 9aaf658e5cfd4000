"""smolagents: its model for compatible servers, whole, streamed and with a tool."""

from __future__ import annotations

import json

from smolagents import ChatMessage, MessageRole, OpenAIModel, tool


@tool
def weather(city: str, days: int) -> str:
    """Tells the weather.

    Args:
        city: where
        days: how many
    """
    return "sunny"


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def check_text_and_streams(real: str, speaker: str) -> None:
    model = OpenAIModel("speaker", api_base=f"{speaker}/v1", api_key="x")
    whole = model(ask("hi")).content
    assert whole == "Hello there, friend."
    assert "".join(piece.content or "" for piece in model.generate_stream(ask("hi"))) == whole


def check_a_call(real: str, speaker: str) -> None:
    model = OpenAIModel("speaker", api_base=f"{speaker}/v1", api_key="x", tool_choice="auto")
    (call,) = model(ask("Weather in Bonn?"), tools_to_call_from=[weather]).tool_calls
    arguments = call.function.arguments
    assert call.function.name == "weather"
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"city": "Bonn", "days": 2}


def check_stop_strings(real: str, speaker: str) -> None:
    model = OpenAIModel("speaker", api_base=f"{speaker}/v1", api_key="x")
    stops = ["Observation:", "Calling tools:", "</code>", "<end_code>", "friend"]
    assert model(ask("hi"), stop_sequences=stops).content.strip() == "Hello there,"
