"""The body of /v1/messages (Anthropic's API), and the chat it stands for."""

from typing import Annotated, Any, Literal

import msgspec

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.body import (
    MAX_TOOLS,
    CommonBody,
    FunctionSpec,
    JsonSchemaFormat,
    JsonSchemaSpec,
    Thinking,
    ToolName,
)
from openinfer.frontend.http.openai.chat_body import tool_object
from openinfer.frontend.http.params import MAX_STOP_CHARS, MAX_STOP_STRINGS
from openinfer.frontend.http.text.chat import Chat, chat_messages, content_of
from openinfer.frontend.http.text.thoughts import thinking_options

__all__ = ["MessagesBody", "messages_chat", "messages_common"]

StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class MessageTool(msgspec.Struct):
    """One of `tools`: the client's own. The service's tools (with another type) are refused."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
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


class MessagesBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens; None is a field that was not given."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: Annotated[list[MessageTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": (None, []),
    "container": (None,),
    "context_management": (None,),
}
"""Known fields that are not honoured, each with the values that change nothing."""


def messages_common(body: MessagesBody) -> CommonBody:
    """The fields that all endpoints share."""
    wanted = body.output_format or (body.output_config.format if body.output_config else None)
    return CommonBody(
        response_format=JsonSchemaFormat(JsonSchemaSpec(wanted.schema)) if wanted else None,
        model=body.model,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        stream=body.stream,
        user=body.metadata.user_id if body.metadata else None,
    )


def messages_chat(body: MessagesBody, variables: frozenset[str]) -> Chat:
    """variables: options of the server's template. Raises APIError (400) naming the place."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": content_of(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _turn(message, f"messages[{index}]")
    choice = body.tool_choice
    kinds = {None: "auto", "auto": "auto", "none": "none", "any": "required"}
    return Chat(
        messages=chat_messages(messages),
        tools=[
            tool_object(FunctionSpec(tool.name, tool.description, tool.input_schema))
            for tool in body.tools or ()
        ],
        tool_choice=kinds.get(choice.type if choice else None) or f"tool {choice.name if choice else ''}",
        strict=[tool.name for tool in body.tools or () if tool.strict],
        continue_final=bool(messages)
        and messages[-1]["role"] == "assistant"
        and not messages[-1].get("tool_calls"),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        options=thinking_options(body.thinking, variables),
        budget=body.thinking.budget_tokens if body.thinking else None,
        effort=body.output_config.effort if body.output_config else None,
    )


def _turn(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message of Anthropic's is several of OpenAI's where it holds results."""
    role, content = message.get("role"), message.get("content")
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
            said = content_of(block.get("content") or "", f"{where}.content[{index}]")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            turn["tool_calls"].append({"id": block.get("id"), "function": function})
        elif kind == "thinking" and role == "assistant":
            turn["reasoning"] += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts or role == "assistant" or not results:
        turn["content"] = content_of(texts, f"{where}.content")
        return [*results, turn]
    return results
