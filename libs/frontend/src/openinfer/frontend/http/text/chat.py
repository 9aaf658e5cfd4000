"""A chat as all chat endpoints understand it: checked messages and tools."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openinfer.frontend.errors import APIError

__all__ = ["Chat", "Content", "chat_messages", "content_of"]

MAX_MESSAGES = 4096
Content = str | list[dict[str, Any]]
"""A text, or several parts {type: "text", text}, which a template puts together in its own way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """One request, whatever endpoint it came through. messages: of chat_messages(); tools: OpenAI's tool objects."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    """none, auto, required, or the name of a tool after "tool "."""
    strict: Sequence[str] = ()
    """Names of the tools whose calls must keep their schema, also where the model may decide. With one such tool, the
    calls of all tools keep theirs."""
    parallel_calls: bool = True
    add_generation_prompt: bool = True
    continue_final: bool = False
    """The answer continues the last message, which is the assistant's."""
    effort: str | None = None
    """reasoning_effort."""
    budget: int | None = None
    """The most tokens of the thoughts."""
    budget_field: str = "thinking"
    separate: bool = True
    """Whether thoughts are separated from the content."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """Gets a text for each field of the request that changes nothing here."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chat_messages(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Check messages: contents become Content, arguments of calls objects. Raises APIError (400) naming the place."""
    if not messages:
        raise APIError("messages must hold at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise APIError(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def content_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> Content:
    """A content given as text or as parts of these kinds. Raises APIError (400) naming the place."""
    if isinstance(content, list):
        texts = [_part_text(part, where, kinds) for part in content]
        return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
    if not isinstance(content, str):
        raise APIError(f"{where} must be a string or a list of text parts", param=where.split("[")[0])
    return content


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise APIError(f"{where}.role must be a string such as 'user'", param="messages")
    if message.get("function_call"):
        raise APIError(f"{where}.function_call is not supported, use tool_calls", param="messages")
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise APIError(f"{where}.tool_calls must be a list", param="messages")
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""  # as clients write a turn that had calls only, was cut short, or gave no result
    checked["content"] = content_of(content, f"{where}.content")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise APIError(f"{where}.reasoning must be a string", param="messages")
        checked["reasoning"] = checked["reasoning_content"] = reasoning  # templates use either name
    return checked


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise APIError(f"{where} must have a function with a name", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            # Half a surrogate pair, which is no text, is an error to it.
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise APIError(f"{where}.function.arguments is not JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise APIError(f"{where}.function.arguments must be a JSON object", param="messages")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _part_text(part: object, where: str, kinds: Sequence[str]) -> str:
    if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise APIError(
        f"{where} holds a part of type {kind!r}, only {' and '.join(map(repr, kinds))} is supported",
        param=where.split("[")[0],
    )
