"""Renderers, which turn messages into a prompt: a Jinja template, or code where a model's authors ship code."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Message", "Renderer", "RendererSpec", "text_of"]

Message = Mapping[str, Any]
"""role, content (str, or parts [{type: "text", text}]), and where they apply: reasoning, tool_calls [{id, function:
{name, arguments: object}}], tool_call_id."""


class RendererSpec(NamedTuple):
    """How any process makes a Renderer: call `target` ("package.module:name") with JSON `kwargs`."""

    target: str
    kwargs: dict[str, Any]


class Renderer(Protocol):
    """Turns messages into the text of a prompt."""

    @property
    def spec(self) -> RendererSpec:
        """How another process makes the same renderer: a server renders in one that it can kill."""

    @property
    def variables(self) -> frozenset[str]:
        """Names of the options that render() heeds in `kwargs`, such as enable_thinking."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. tools: OpenAI's tool objects. Raises errors.APIError (400) for messages it cannot take."""


def text_of(content: str | Sequence[Mapping[str, Any]], joint: str = "") -> str:
    """The content of a message as one text."""
    return content if isinstance(content, str) else joint.join(part["text"] for part in content)
