"""The body of /v1/messages (Anthropic's API), and the chat it stands for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from openinfer.frontend.errors import APIError, NotSupported
from openinfer.frontend.http.body import (
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    AnyBody,
    CommonBody,
    FunctionSpec,
    JsonSchemaFormat,
    JsonSchemaSpec,
    Messages,
    Thinking,
    ToolName,
    common_body,
    typed,
)
from openinfer.frontend.http.chat import Chat, chat_messages, content_of, result_of, warn
from openinfer.frontend.http.openai.chat_body import tool_object
from openinfer.frontend.http.params import MAX_STOP_CHARS
from openinfer.frontend.http.text.thoughts import SWITCHES, thinking_options

StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class MessageTool(msgspec.Struct):
    """One of `tools` that the model may call: the client's own."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """tool_choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(msgspec.Struct):
    """output_format: JSON after a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """output_config, where newer clients have the format and an effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct):
    """metadata."""

    user_id: str | None = None


class Edit(msgspec.Struct):
    """One of context_management's edits. keep: of the thoughts; without it those of the last turn."""

    type: str
    keep: Literal["all"] | dict[str, Any] | None = None


class ContextManagement(msgspec.Struct):
    """context_management."""

    edits: Annotated[list[Edit], msgspec.Meta(max_length=16)] | None = None


class MessagesBody(AnyBody, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens."""

    refused: ClassVar = {"mcp_servers": (None, []), "container": (None,)}
    messages: Messages
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """Tools with a type are left out of the prompt: only the service, or a model trained on them, knows them."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Without it the model does not think."""
    enable_thinking: bool | None = None
    think: bool | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None


def messages_common(body: MessagesBody) -> CommonBody:
    """The fields that all endpoints share."""
    wanted = body.output_format or (body.output_config.format if body.output_config else None)
    form = JsonSchemaFormat(JsonSchemaSpec(wanted.schema)) if wanted else None
    user = body.metadata.user_id if body.metadata else None
    return common_body(body, stop=body.stop_sequences, user=user, response_format=form)


def messages_chat(body: MessagesBody, variables: frozenset[str], defaults: Mapping[str, Any]) -> Chat:
    """variables: of the server's template; defaults: those that it sets. Raises APIError (400) naming the place."""
    warnings: list[str] = []
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": content_of(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _turn(message, f"messages[{index}]", warnings)
    if body.context_management:
        _clear(messages, body.context_management)
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and not last.get("tool_calls")
    if continues and not last["content"]:
        messages.pop()
        continues = False
        warn(warnings, "the last message of the assistant has no text, and is left out")
    tools = _tools(body.tools or (), warnings)
    switches = {"thinking": body.thinking, "enable_thinking": body.enable_thinking, "think": body.think}
    options = thinking_options(switches, variables, warnings)
    if all(value is None for value in switches.values()) and not SWITCHES & defaults.keys():
        options = dict.fromkeys(SWITCHES & variables, False)
    choice = body.tool_choice
    kinds = {None: "auto", "auto": "auto", "none": "none", "any": "required"}
    return Chat(
        messages=chat_messages(messages, warnings),
        tools=[tool_object(FunctionSpec(tool.name, tool.description, tool.input_schema)) for tool in tools],
        tool_choice=kinds.get(choice.type if choice else None) or f"tool {choice.name if choice else ''}",
        strict=[tool.name for tool in tools if tool.strict],
        continue_final=continues,
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        options=options,
        warnings=warnings,
        budget=body.thinking.budget_tokens if body.thinking else None,
        effort=body.output_config.effort if body.output_config else None,
    )


def _tools(tools: Sequence[dict[str, Any]], warnings: list[str]) -> list[MessageTool]:
    found, left_out = [], []
    for index, tool in enumerate(tools):
        if isinstance(kind := tool.get("type"), str) and kind != "custom":
            left_out.append(kind)
        else:
            found.append(typed(tool, MessageTool, "tools", f"tools[{index}]"))
    if left_out:
        named = ", ".join(dict.fromkeys(left_out))
        warn(warnings, f"tools of type {named} are left out: this server has none of its own")
    return found


def _clear(messages: list[dict[str, Any]], wanted: ContextManagement) -> None:
    for index, edit in enumerate(wanted.edits or ()):
        where = f"context_management.edits[{index}]"
        if not edit.type.startswith("clear_thinking_"):
            problem = "is not supported by this server: send the messages that are to be read"
            raise NotSupported(f"{where} of type {edit.type!r} {problem}", "context_management")
        if edit.keep == "all":
            continue
        kept = edit.keep or {"type": "thinking_turns", "value": 1}
        count = kept.get("value")
        if kept.get("type") != "thinking_turns" or type(count) is not int or count < 1:
            raise APIError(
                f'{where}.keep must be "all" or {{"type": "thinking_turns", "value": a number above 0}}',
                param="context_management",
            )
        for message in [message for message in messages if message.get("reasoning")][:-count]:
            message["reasoning"] = ""


def _turn(message: dict[str, Any], where: str, warnings: list[str]) -> list[dict[str, Any]]:
    """One message of Anthropic's is several of OpenAI's where it holds results."""
    role, content = message.get("role"), message.get("content")
    if role in ("ctx", "msg"):  # as Claude Code marks what the user did not write
        role = "user"
    if role not in ("user", "assistant", "system"):
        raise APIError(f"{where}.role must be 'user' or 'assistant'", param="messages")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": role, "reasoning": "", "tool_calls": []}
    texts: list[Any] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            result = block.get("content") or ""
            if isinstance(result, list):
                result = [_as_text(part) for part in result]
            said = result_of(result, f"{where}.content[{index}]", ("text",), warnings)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            turn["tool_calls"].append({"id": block.get("id"), "function": function})
        elif kind == "thinking" and role == "assistant":
            turn["reasoning"] += str(block.get("thinking") or "")
        elif role == "assistant" and isinstance(kind, str) and kind != "text":
            if kind != "redacted_thinking":
                warn(warnings, f"blocks of type {kind} in the history are left out")
        else:
            texts.append(_as_text(block))
    if texts or role == "assistant" or not results:
        turn["content"] = content_of(texts, f"{where}.content")
        return [*results, turn]
    return results


def _as_text(block: object) -> object:
    """A document that is text, or a found text, as a block of text; any other block as it is."""
    if not isinstance(block, dict) or block.get("type") not in ("document", "search_result"):
        return block
    source = block.get("source") if block["type"] == "document" else {**block, "type": "content"}
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "content", "content": [*parts]} if all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            return {"type": "text", "text": "\n".join(part["text"] for part in parts)}
    return block
