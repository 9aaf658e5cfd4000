"""The parts of a model's text: content, reasoning and tool calls."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["TOOL_NAME", "Arguments", "Content", "Part", "Reasoning", "Schemas", "ToolCall", "overlap"]

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
"""What a tool may be called that is not on offer."""
Schemas = Mapping[str, Mapping[str, Any] | None]
"""Name of a tool -> JSON schema of its parameters; None for a tool without."""


class Reasoning(NamedTuple):
    """Text the model thought."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class ToolCall(NamedTuple):
    """One call; arguments is the JSON text of an object, or its beginning where Arguments follow."""

    name: str
    arguments: str


class Arguments(NamedTuple):
    """More of the arguments of the last call; only where calls are streamed."""

    text: str


Part = Reasoning | Content | ToolCall | Arguments


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of text that is a beginning of marker (and not all of it)."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
