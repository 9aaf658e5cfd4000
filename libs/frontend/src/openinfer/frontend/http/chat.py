"""A chat as all chat endpoints understand it: checked messages and tools."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openinfer.frontend.errors import APIError

MAX_MESSAGES = 4096
Content = str | list[dict[str, Any]]
"""A text, or several parts {type: "text", text}, which a template puts together in its own way."""
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
"""A line that Claude Code puts before its system prompt. It is not for the model, and it differs between sessions: all
after it would have to be computed again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """One request, whatever endpoint it came through. messages: of chat_messages(); tools: OpenAI's tool objects."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    """none, auto, required, or the name of a tool after "tool "."""
    strict: Sequence[str] = ()
    """Tools whose calls must keep their schema, also where the model may decide. Then the calls of all tools do."""
    parallel_calls: bool = True
    add_generation_prompt: bool = True
    continue_final: bool = False
    """The answer continues the last message, which is the assistant's."""
    effort: str | None = None
    budget: int | None = None
    """The most tokens of the thoughts."""
    budget_field: str = "thinking"
    separate: bool = True
    """Whether thoughts are separated from the content."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """Gets a text for each field of the request that changes nothing here."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chat_messages(
    messages: Sequence[Mapping[str, Any]] | None, warnings: list[str] | None = None
) -> list[dict[str, Any]]:
    """Check messages: contents become Content, arguments of calls objects. `warnings` gets a text for what the prompt
    cannot hold. Raises APIError (400) naming the place."""
    warnings = [] if warnings is None else warnings
    if not messages:
        raise APIError("messages must hold at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise APIError(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role, after = message.get("role"), found[-1]["role"] if found else ""
        results = role == "tool" or (role == "user" and after == "tool")
        checked = _message(message, f"messages[{index}]", warnings, results)
        if checked["role"] != "system" or checked["content"]:
            found.append(checked)
    return found


def content_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> Content:
    """A content given as text or as parts of these kinds. Raises APIError (400) naming the place."""
    if isinstance(content, list):
        texts = [_part_text(part, where, kinds) for part in content]
        return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
    if not isinstance(content, str):
        raise APIError(f"{where} must be a string or a list of text parts", param=where.split("[")[0])
    return content


def result_of(content: object, where: str, kinds: Sequence[str], warnings: list[str]) -> Content:
    """Do the work of content_of for a tool's result: what is not text is named in its place. Refused, it would end an
    agent's session, because the history of all later requests has it."""
    if not isinstance(content, list):
        return content_of(content, where, kinds)
    texts: list[object] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            part = {"type": kinds[0], "text": f"[{kind}: left out, because this model reads only text]"}
            warn(
                warnings, f"parts of type {kind} in results of tools are left out: this model reads only text"
            )
        texts.append(part)
    return content_of(texts, where, kinds)


def _unbilled(content: Content) -> Content:
    if isinstance(content, str):
        return _BILLING.sub("", content)
    first, *others = content
    text = _BILLING.sub("", first["text"])
    return content_of([*([{**first, "text": text}] if text else []), *others], "content")


def warn(warnings: list[str], text: str) -> None:
    """Add a text that is not there yet."""
    if text not in warnings:
        warnings.append(text)


def _message(message: Mapping[str, Any], where: str, warnings: list[str], results: bool) -> dict[str, Any]:
    """results: the message is a tool's result, or follows one. There clients put what a result cannot hold."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise APIError(f"{where}.role must be a string such as 'user'", param="messages")
    if message.get("function_call"):
        raise APIError(f"{where}.function_call is not supported, use tool_calls", param="messages")
    checked = dict(message)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise APIError(f"{where}.tool_calls must be a list", param="messages")
        checked["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]", warnings) for i, call in enumerate(calls)
        ]
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""  # as clients write a turn that had calls only, was cut short, or gave no result
    if results:
        checked["content"] = result_of(content, f"{where}.content", ("text",), warnings)
    else:
        checked["content"] = content_of(content, f"{where}.content")
    if role in ("system", "developer"):
        checked["content"] = _unbilled(checked["content"])
    if (reasoning := message.get("reasoning") or message.get("reasoning_content")) is not None:
        if not isinstance(reasoning, str):
            raise APIError(f"{where}.reasoning must be a string", param="messages")
        checked["reasoning"] = checked["reasoning_content"] = reasoning  # templates use either name
    else:  # a null would be written as None
        checked.pop("reasoning", None), checked.pop("reasoning_content", None)
    return checked


def _call(call: object, where: str, warnings: list[str]) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f"{where} must have a function with a name", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _arguments(arguments, warnings)
    if not isinstance(arguments, dict):
        raise APIError(f"{where}.function.arguments must be a JSON object", param="messages")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(text: str, warnings: list[str]) -> dict[str, Any]:
    """What a model wrote for its arguments. It may have been cut, and a chat with such a call must go on."""
    try:
        # Half a surrogate pair, which is no text, is an error to it.
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    warn(warnings, "arguments of calls that are no JSON objects are raw_arguments in the prompt")
    return {"raw_arguments": text}


def _part_text(part: object, where: str, kinds: Sequence[str]) -> str:
    if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise APIError(
        f"{where} holds a part of type {kind!r}, only {' and '.join(map(repr, kinds))} is supported",
        param=where.split("[")[0],
    )
