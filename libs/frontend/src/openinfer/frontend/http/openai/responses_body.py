"""The body of /v1/responses, and the chat it stands for. Items of answers are kept for a while, answers are not."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from openinfer.frontend.chat import text_of
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.body import (
    MAX_TOOLS,
    CommonBody,
    FunctionSpec,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaSpec,
    TextFormat,
    ToolName,
)
from openinfer.frontend.http.openai.chat_body import tool_object, verbosity_warnings
from openinfer.frontend.http.shapes import encode
from openinfer.frontend.http.text.chat import Chat, chat_messages, content_of

__all__ = ["KeptItems", "ResponsesBody", "responses_chat", "responses_common"]

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_TEXT_KINDS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
MAX_INCLUDED = 16
MAX_ITEMS = 4096
MAX_BYTES = 32 << 20


class KeptItems:
    """Items of answers by id, the newest last. The oldest are dropped when the items are too many or too large."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, tuple[dict[str, Any], int]] = OrderedDict()
        self._bytes = 0

    def keep(self, items: Iterable[dict[str, Any]]) -> None:
        """Keep the items of an answer that is complete."""
        for item in items:
            size = len(encode(item))
            self._items[item["id"]] = item, size
            self._bytes += size
        while len(self._items) > MAX_ITEMS or self._bytes > MAX_BYTES:
            _, (_, size) = self._items.popitem(last=False)
            self._bytes -= size

    def find(self, identity: object, where: str) -> dict[str, Any]:
        """The item of an item_reference. Raises APIError (400)."""
        if isinstance(identity, str) and identity in self._items:
            return self._items[identity][0]
        raise APIError(
            f"{where} is an item_reference to {identity!r}, which this server does not keep (any more): send the item "
            "itself, as clients do with store: false",
            param="input",
            code="item_not_found",
        )


class ResponseTool(FunctionSpec, kw_only=True):
    """One of `tools` that the model may call: the client's own function."""

    type: Literal["function"]


class ChosenTool(msgspec.Struct):
    """tool_choice, to force one."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(msgspec.Struct):
    """tool_choice, to offer some of the tools."""

    type: Literal["allowed_tools"]
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class Effort(msgspec.Struct):
    """reasoning. A summary is the thoughts themselves."""

    effort: str | None = None
    summary: str | None = None


class NamedSchema(JsonSchemaSpec, tag_field="type", tag="json_schema"):
    """text.format: JSON after a schema, whose name and `strict` change nothing here."""


class TextOptions(msgspec.Struct):
    """text: what the answer has to be. A verbosity is ignored."""

    format: TextFormat | JsonObjectFormat | NamedSchema | None = None
    verbosity: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses; None is a field that was not given."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """Tools that are not functions are left out of the prompt, because only a service could run them."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Effort | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """An input that is too long is refused, never cut."""
    store: bool | None = None
    """false: the items of the answer are not kept for an item_reference. An answer itself never is."""
    include: Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDED)] | None = None
    """Parts that the answer has only on demand. Here that is only the log-probabilities; the answer has all others."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
}
"""Known fields that are not honoured, each with the values that change nothing."""


def responses_common(body: ResponsesBody) -> CommonBody:
    """The fields that all endpoints share. Raises APIError (400)."""
    if LOGPROBS in (body.include or ()):
        raise APIError(
            f"include: {LOGPROBS} is not supported by this server: leave it out, or use /v1/chat/completions",
            param="include",
            code="unsupported",
        )
    names = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "user")
    wanted = body.text.format if body.text else None
    return CommonBody(
        **{name: getattr(body, name) for name in names},
        response_format=JsonSchemaFormat(wanted) if isinstance(wanted, NamedSchema) else wanted,
    )


def responses_chat(body: ResponsesBody, kept: KeptItems) -> Chat:
    """kept: what items may refer to. Raises APIError (400) naming the item."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise APIError("input must be a text or hold at least one item", param="input")
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.get("type") == "item_reference":
            item = kept.find(item.get("id"), where)
        _add(messages, item, where)
    warnings = _ignored(body)
    tools = _functions(body.tools or (), warnings)
    choice, tools = _choice(body.tool_choice or "auto", tools)
    return Chat(
        messages=chat_messages(messages),
        tools=[tool_object(tool) for tool in tools],
        tool_choice=choice,
        strict=[tool.name for tool in tools if tool.strict],
        parallel_calls=body.parallel_tool_calls is not False,
        effort=body.reasoning.effort if body.reasoning else None,
        options=body.chat_template_kwargs or {},
        warnings=warnings,
    )


def _functions(tools: Sequence[dict[str, Any]], warnings: list[str]) -> list[ResponseTool]:
    """The tools that are functions; `warnings` gets a text about the others."""
    found, left_out = [], []
    for index, tool in enumerate(tools):
        if tool.get("type") == "function":
            found.append(_typed(tool, ResponseTool, "tools", f"tools[{index}]"))
        elif isinstance(tool.get("type"), str):
            left_out.append(tool["type"])
        else:
            raise APIError(f"tools[{index}].type must be a string such as 'function'", param="tools")
    if left_out:
        named = ", ".join(dict.fromkeys(left_out))
        warnings.append(f"tools of type {named} are left out: this server runs no tools of its own")
    return found


def _choice(choice: str | dict[str, Any], tools: list[ResponseTool]) -> tuple[str, list[ResponseTool]]:
    """tool_choice as Chat has it, and the tools that it leaves."""
    if isinstance(choice, str):
        return choice, tools
    if choice.get("type") == "function":
        return f"tool {_typed(choice, ChosenTool, 'tool_choice', 'tool_choice').name}", tools
    if choice.get("type") == "allowed_tools":
        allowed = _typed(choice, AllowedTools, "tool_choice", "tool_choice")
        names = {tool.get("name") for tool in allowed.tools}
        return allowed.mode, [tool for tool in tools if tool.name in names]
    raise APIError(
        f"tool_choice asks for a tool of type {choice.get('type')!r}, and this server runs no tools of its own",
        param="tool_choice",
        code="unsupported",
    )


def _typed(value: dict[str, Any], kind: type[_Kind], field: str, where: str) -> _Kind:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise APIError(f"{where}: {error}".replace("`", ""), param=field) from error


def _ignored(body: ResponsesBody) -> list[str]:
    warnings = verbosity_warnings(body.text.verbosity if body.text else None)
    if body.truncation == "auto":
        warnings.append("truncation auto is ignored: an input that is too long is refused")
    return warnings


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Items of one turn (reasoning, text, calls) become one message of the assistant."""
    match item.get("type", "message"):
        case "message":
            role, content = item.get("role"), item.get("content")
            if role == "assistant":
                said = "" if content is None else content_of(content, f"{where}.content", _TEXT_KINDS)
                _assistant_turn(messages)["content"] += text_of(said)
            else:
                said = content_of(content, f"{where}.content", _TEXT_KINDS)
                messages.append({"role": "system" if role == "developer" else role, "content": said})
        case "reasoning":
            # Some clients send a summary back, and nothing else of what they got.
            content = item.get("content") or item.get("summary")
            thought = content_of(content or "", f"{where}.content", ("reasoning_text", "summary_text"))
            turn = _assistant_turn(messages)
            turn["reasoning"] = turn.get("reasoning", "") + text_of(thought, "\n")
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "function": function}
            _assistant_turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            said = content_of(item.get("output"), f"{where}.output", _TEXT_KINDS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        case kind:
            raise APIError(f"{where} is of type {kind!r}, which is not supported", param="input")


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "reasoning": ""})
    return messages[-1]
