"""What a chat is made of: messages and what renders them; content, reasoning and tool calls of an answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]
"""role, content (str, or parts [{type: "text", text}]), and where they apply: reasoning, tool_calls [{id, function:
{name, arguments: object}}], tool_call_id."""


class RendererSpec(NamedTuple):
    """How any process makes a Renderer: call `target` ("package.module:name") with JSON `kwargs`."""

    target: str
    kwargs: dict[str, Any]


def template_spec(
    source: str, special_tokens: Mapping[str, str], with_tools: str | None = None
) -> RendererSpec:
    """How a process makes a ChatTemplate."""
    kwargs = {"source": source, "special_tokens": dict(special_tokens), "with_tools": with_tools}
    return RendererSpec("openinfer.frontend.chat_template:ChatTemplate", kwargs)


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
    """One call; arguments is the JSON text of an object, or its beginning where Arguments follow. id: the one that the
    model gave it, if it does so; its template shows results by it."""

    name: str
    arguments: str
    id: str = ""


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
