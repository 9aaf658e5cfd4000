"""The body of /v1/responses, and the chat it stands for. Items of answers are kept for a while, answers are not."""

import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from openinfer.frontend.chat import text_of
from openinfer.frontend.errors import APIError, NotSupported
from openinfer.frontend.http.body import (
    MAX_TOOLS,
    AnyBody,
    CommonBody,
    FunctionSpec,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaSpec,
    MinP,
    Positive,
    Seed,
    TextFormat,
    ToolName,
    common_body,
    typed,
)
from openinfer.frontend.http.chat import Chat, chat_messages, content_of, result_of, warn
from openinfer.frontend.http.openai.chat_body import tool_object, verbosity_warnings
from openinfer.frontend.http.shapes import encode
from openinfer.frontend.http.text.thoughts import thinking_options

_TEXT_KINDS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_THOUGHT = "openinfer-thought-1."
_SERVICE_ITEMS = frozenset(
    f"{name}_call"
    for name in ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp")
) | {"mcp_list_tools", "tool_search_call", "tool_search_output"}
"""Items of a service's own tools. The answers that came of them are in the history as text."""
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


def carried(thought: str) -> str:
    """A thought as encrypted_content: a client that stores nothing sends it back as it is, and often nothing else of
    the thought. It is the thought itself with a digest, so that any server can read it, after a restart too."""
    raw = thought.encode()
    return _THOUGHT + base64.urlsafe_b64encode(hashlib.sha256(raw).digest()[:16] + raw).decode()


def _uncarried(value: object, where: str) -> str:
    try:
        head, raw = (str(value)[: len(_THOUGHT)], base64.urlsafe_b64decode(str(value)[len(_THOUGHT) :]))
        thought = raw[16:].decode()
        if head == _THOUGHT and carried(thought) == value:
            return thought
    except (binascii.Error, ValueError):
        pass
    raise APIError(
        f"{where}.encrypted_content is damaged, or not of this server: leave the reasoning item out",
        param="input",
        code="invalid_encrypted_content",
    )


class ResponseTool(FunctionSpec, kw_only=True):
    """One of `tools` that the model may call: the client's own function."""

    type: Literal["function"]


class Namespace(msgspec.Struct):
    """One of `tools`: functions of the client's own that share a name, such as those of an MCP server."""

    name: ToolName
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]


class ChosenTool(msgspec.Struct):
    """tool_choice, to force one."""

    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None


class AllowedTools(msgspec.Struct):
    """tool_choice, to offer some of the tools."""

    type: Literal["allowed_tools"]
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class Effort(msgspec.Struct):
    """reasoning. A summary is the thoughts themselves."""

    enabled: bool | None = None
    effort: str | None = None
    summary: str | None = None


class NamedSchema(JsonSchemaSpec, tag_field="type", tag="json_schema"):
    """text.format: JSON after a schema, whose name and `strict` change nothing here."""


class TextOptions(msgspec.Struct):
    """text: what the answer has to be. A verbosity is ignored."""

    format: TextFormat | JsonObjectFormat | NamedSchema | None = None
    verbosity: str | None = None


class ResponsesBody(AnyBody, kw_only=True):
    """POST /v1/responses."""

    refused: ClassVar = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), (None,)),
        "background": (None, False),
        "top_logprobs": (None, 0),
    }
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """Functions, and namespaces of functions. Others are left out of the prompt: only a service could run them."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Effort | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """An input that is too long is refused, never cut."""
    store: bool | None = None
    """false: the items of the answer are not kept for an item_reference. An answer itself never is."""
    include: Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDED)] | None = None
    """Parts on demand: reasoning.encrypted_content. Log-probabilities are refused; all others are there."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    think: bool | None = None


def responses_common(body: ResponsesBody) -> CommonBody:
    """The fields that all endpoints share. Raises APIError (400)."""
    if LOGPROBS in (body.include or ()):
        instead = "leave it out, or use /v1/chat/completions"
        raise NotSupported(f"include: {LOGPROBS} is not supported by this server: {instead}", "include")
    wanted = body.text.format if body.text else None
    form = JsonSchemaFormat(wanted) if isinstance(wanted, NamedSchema) else wanted
    return common_body(body, min_p=body.min_p, seed=body.seed, user=body.user, response_format=form)


def responses_chat(body: ResponsesBody, kept: KeptItems, variables: frozenset[str]) -> Chat:
    """kept: what items may refer to. variables: of the template. Raises APIError (400) naming the item."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise APIError("input must be a text or hold at least one item", param="input")
    warnings = verbosity_warnings(body.text.verbosity if body.text else None)
    if body.truncation == "auto":
        warnings.append("truncation auto is ignored: an input that is too long is refused")
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.get("type") == "item_reference":
            item = kept.find(item.get("id"), where)
        _add(messages, item, where, warnings)
    tools = [*flattened(body.tools or (), warnings).values()]
    choice, tools = _choice(body.tool_choice or "auto", tools)
    reasoning = body.reasoning or Effort()
    switches = {
        "enable_thinking": body.enable_thinking,
        "think": body.think,
        "reasoning.enabled": reasoning.enabled,
    }
    options = thinking_options(switches, variables, warnings)
    return Chat(
        messages=chat_messages(messages, warnings),
        tools=[tool_object(tool) for tool in tools],
        tool_choice=choice,
        strict=[tool.name for tool in tools if tool.strict],
        parallel_calls=body.parallel_tool_calls is not False,
        effort=reasoning.effort,
        options={**options, **(body.chat_template_kwargs or {})},
        warnings=warnings,
    )


def flattened(
    tools: Sequence[dict[str, Any]], warnings: list[str]
) -> dict[tuple[str | None, str], ResponseTool]:
    """The functions, by their namespace and their name there; their own name is the one that the model calls.
    `warnings` gets a text about other tools. Raises APIError (400) naming the place."""
    found: dict[tuple[str | None, str], ResponseTool] = {}
    left_out: dict[str, None] = {}

    def add(tool: dict[str, Any], space: str | None, where: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise APIError(f"{where}.type must be a string such as 'function'", param="tools")
        if kind == "namespace" and space is None:
            inner = typed(tool, Namespace, "tools", where)
            for index, one in enumerate(inner.tools):
                add(one, inner.name, f"{where}.tools[{index}]")
        elif kind == "function":
            function = typed(tool, ResponseTool, "tools", where)
            name, function.name = function.name, flat(space, function.name)
            if function.name in {one.name for one in found.values()}:
                raise APIError(f"{where}: two tools have the name {function.name!r}", param="tools")
            found[space, name] = function
        else:
            left_out[kind] = None

    for index, tool in enumerate(tools):
        add(tool, None, f"tools[{index}]")
    if len(found) > MAX_TOOLS:
        raise APIError(f"{len(found)} functions in tools, at most {MAX_TOOLS} are allowed", param="tools")
    if left_out:
        named = ", ".join(left_out)
        warn(warnings, f"tools of type {named} are left out: this server runs no tools of its own")
    return found


def flat(namespace: Any, name: Any) -> Any:
    """The name by which the model calls a tool."""
    return f"{namespace}__{name}" if namespace and isinstance(namespace, str) else name


def _choice(choice: str | dict[str, Any], tools: list[ResponseTool]) -> tuple[str, list[ResponseTool]]:
    if isinstance(choice, str):
        return choice, tools
    if choice.get("type") == "function":
        chosen = typed(choice, ChosenTool, "tool_choice", "tool_choice")
        return f"tool {flat(chosen.namespace, chosen.name)}", tools
    if choice.get("type") == "allowed_tools":
        allowed = typed(choice, AllowedTools, "tool_choice", "tool_choice")
        names = {flat(tool.get("namespace"), tool.get("name")) for tool in allowed.tools}
        return allowed.mode, [tool for tool in tools if tool.name in names]
    asked = f"tool_choice asks for a tool of type {choice.get('type')!r}"
    raise NotSupported(f"{asked}, and this server runs no tools of its own", "tool_choice")


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str, warnings: list[str]) -> None:
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
            turn = _assistant_turn(messages)
            turn["reasoning"] = turn.get("reasoning", "") + _thought(item, where)
        case "function_call":
            _call(messages, item, flat(item.get("namespace"), item.get("name")), item.get("arguments"))
        case "custom_tool_call":
            _call(messages, item, item.get("name"), {"input": item.get("input")})
        case "local_shell_call" | "shell_call" | "apply_patch_call" as kind:
            details = item.get("action") or item.get("operation")
            _call(messages, item, kind.removesuffix("_call"), details if isinstance(details, dict) else {})
        case (
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
            | "apply_patch_call_output"
        ) as kind:
            output = item.get("output")
            if kind == "shell_call_output":  # a list of what each command said
                output = json.dumps(output)
            said = result_of(output or "", f"{where}.output", _TEXT_KINDS, warnings)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        case kind if kind in _SERVICE_ITEMS:
            warn(warnings, f"items of type {kind} are left out: a service's tool made them")
        case kind:
            raise APIError(f"{where} is of type {kind!r}, which is not supported", param="input")


def _thought(item: dict[str, Any], where: str) -> str:
    if (carried_thought := item.get("encrypted_content")) is not None:
        return _uncarried(carried_thought, where)
    # Some clients send a summary back, and nothing else of what they got.
    content = item.get("content") or item.get("summary")
    thought = content_of(content or "", f"{where}.content", ("reasoning_text", "summary_text"))
    return text_of(thought, "\n")


def _call(messages: list[dict[str, Any]], item: dict[str, Any], name: object, arguments: object) -> None:
    call = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
    _assistant_turn(messages).setdefault("tool_calls", []).append(call)


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "reasoning": ""})
    return messages[-1]
