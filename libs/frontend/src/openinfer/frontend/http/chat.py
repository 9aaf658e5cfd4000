"""A chat as all chat endpoints understand it: checked messages and tools in, prompt text and output parser out."""

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from openinfer.frontend.chat import OutputParser, ToolFormat
from openinfer.frontend.chat.output import END_THINK, THINK
from openinfer.frontend.chat.parts import Schemas
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.structured import unkept
from openinfer.frontend.http.thoughts import Where, effort_options
from openinfer.frontend.render_pool import RenderPool
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.grammar import Grammar
from openinfer.sampler.lark import Lark

__all__ = ["Chat", "ChatFormat", "ParserFactory", "chat_messages", "text_of"]

ParserFactory = Callable[[], OutputParser]
"""A new parser for each choice."""


MAX_MESSAGES = 4096
SMALL_SIZE = 16384
"""Larger chats, in characters and items, are rendered apart from the others."""
RENDER_TIMEOUT_S = 10.0


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The format in which this server's model writes chats.

    renderer: None refuses chats. options: the template's variables where a request gives no others. tools: None refuses
    tools. reasoning: split `<think>` from the content.
    """

    renderer: RenderPool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: ToolFormat | None = None
    reasoning: bool = False

    async def prompt(self, chat: Chat) -> str:
        """The prompt's text. Raises APIError (400) naming the field that cannot be honoured."""
        if self.renderer is None:
            raise APIError("this server has no chat template; use /v1/completions", param="messages")
        tools = self._tools_on_offer(chat)
        marker = f"<{uuid.uuid4().hex}>" if chat.continue_final else ""
        call = {
            "messages": _with_marker(chat.messages, marker) if marker else chat.messages,
            "tools": tools or None,
            "add_generation_prompt": chat.add_generation_prompt and not marker,
            "kwargs": self._options(self.renderer, chat),
        }
        text = await self.renderer.render(call, _larger_than(SMALL_SIZE, call), RENDER_TIMEOUT_S)
        if not marker:
            return text
        before, found, _ = text.partition(marker)
        if not found:
            raise APIError(
                "this model's chat template changes or leaves out the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return before

    def parser(self, chat: Chat, prompt: str, streams: bool) -> ParserFactory | None:
        """Makes the parsers for what follows `prompt`; None when all of it is content. streams: calls as they come."""
        tools = self.tools if self._tools_on_offer(chat) else None
        reasoning = self.reasoning and chat.separate
        if tools is None and not reasoning:
            return None
        schemas = _schemas(chat)

        def new() -> OutputParser:
            return OutputParser(
                reasoning=reasoning,
                tools=tools,
                schemas=schemas,
                in_reasoning=_thinking(prompt, chat) == "within",
                max_calls=None if chat.parallel_calls else 1,
                streams=streams,
            )

        return new

    def grammar(self, chat: Chat, prompt: str, content: Grammar | None) -> Grammar | None:
        """The grammar of all text after `prompt`: thoughts, then `content`, or the calls that the chat asks for.

        None where the model is free. Raises APIError (400), which names the part that cannot be forced."""
        schemas = _schemas(chat) if self._tools_on_offer(chat) else {}
        if chat.tool_choice.startswith("tool "):
            schemas = {name: schema for name, schema in schemas.items() if chat.tool_choice == f"tool {name}"}
        forced = bool(schemas) and chat.tool_choice != "auto"
        if not forced and not chat.strict and content is None:
            return None
        chat.warnings.extend(unkept("tools", schemas.values()))
        lark = Lark()
        try:
            thoughts = self._thoughts(lark, self.where(chat, prompt))
            if not schemas and not thoughts:
                return content
            return lark.grammar(f"{thoughts} {self._answer(lark, chat, schemas, content, forced)}")
        except InvalidGrammar as error:
            raise APIError(f"the tools cannot be forced: {error}", param="tools") from error

    def _answer(self, lark: Lark, chat: Chat, schemas: Schemas, content: Grammar | None, forced: bool) -> str:
        """The expression of the text after the thoughts."""
        if not schemas or self.tools is None:
            assert content is not None
            return lark.content(content)
        opening = self.tools.opening
        if not forced and content is None:  # free text, in which a call that begins must become one
            many = chat.parallel_calls
            call = lark.rule(f"{lark.until(opening)} {self.tools.grammar(lark, schemas, many=many)}")
            return f"{call}{'*' if many else '?'} {lark.without(opening)}"
        calls = f"{lark.text(opening)} {self.tools.grammar(lark, schemas, many=chat.parallel_calls)}"
        return calls if forced or content is None else lark.any_of([calls, lark.content(content)])

    def _thoughts(self, lark: Lark, where: Where) -> str:
        """The grammar of the thought that the model may begin with."""
        if where == "over":
            return ""
        rest = f"{lark.until(END_THINK)} /\\n{{0,2}}/"
        if where == "within":
            return rest
        return f"{lark.rule(f'{lark.text(THINK)} {rest}')}?"

    def where(self, chat: Chat, prompt: str) -> Where:
        """The model's place at the end of the prompt, if this server separates thoughts; "over" otherwise."""
        return _thinking(prompt, chat) if self.reasoning else "over"

    def markers(self) -> str:
        """All the markers a parser may look for: special tokens among them must not be skipped."""
        tools = f"{self.tools.opening} {self.tools.closing}" if self.tools else ""
        return f"{tools} <think> </think>" if self.reasoning else tools

    def _tools_on_offer(self, chat: Chat) -> Sequence[Mapping[str, Any]]:
        if chat.tool_choice == "none" or (not chat.tools and chat.tool_choice == "auto"):
            return ()
        names = [tool["function"]["name"] for tool in chat.tools]
        wanted = chat.tool_choice.removeprefix("tool ")
        if not names or (wanted != chat.tool_choice and wanted not in names):
            raise APIError(
                f"tool_choice asks for {'a call' if wanted == chat.tool_choice else repr(wanted)}; the tools given are "
                f"{', '.join(names) or 'none'}",
                param="tool_choice",
            )
        if self.tools is None:
            raise APIError(
                "tools are not supported by this server: start it with --tool-call-parser", param="tools"
            )
        return chat.tools

    def _options(self, renderer: RenderPool, chat: Chat) -> dict[str, Any]:
        if chat.effort is None:
            return {**self.options, **chat.options}
        found = effort_options(chat.effort, renderer.variables)
        if found is None:
            chat.warnings.append(
                f"reasoning effort {chat.effort} is ignored: this model's chat template has no such thing"
            )
            found = {}
        return {**self.options, **found, **chat.options}


def _larger_than(limit: int, value: object) -> bool:
    """Whether a JSON value has more characters and items than `limit`; looks at no more than it needs to know."""
    left = limit
    values = [value]
    while values and left >= 0:
        one = values.pop()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            left -= len(one)
            if left >= 0:
                values += one.keys()
                values += one.values()
        elif isinstance(one, list | tuple):
            left -= len(one)
            if left >= 0:
                values += one
    return left < 0


def _schemas(chat: Chat) -> Schemas:
    functions = [tool["function"] for tool in chat.tools]
    return {function["name"]: function.get("parameters") for function in functions}


def _with_marker(messages: Sequence[Mapping[str, Any]], marker: str) -> list[Mapping[str, Any]]:
    *before, last = messages
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        raise APIError(
            "continue_final_message needs a last message of the assistant, with content and without tool calls",
            param="continue_final_message",
        )
    return [*before, {**last, "content": last["content"] + marker}]


def _thinking(prompt: str, chat: Chat) -> Where:
    if chat.continue_final:
        return "within" if THINK in chat.messages[-1]["content"].rpartition(END_THINK)[2] else "over"
    text = prompt.rstrip()
    return "within" if text.endswith(THINK) else "over" if text.endswith(END_THINK) else "before"


def chat_messages(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Check messages: contents become text, arguments of calls objects. Raises APIError (400) naming the place."""
    if not messages:
        raise APIError("messages must hold at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise APIError(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def text_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A content given as text or as parts with text. Raises APIError (400) naming the place."""
    if isinstance(content, list):
        return "\n".join(_part_text(part, where, kinds) for part in content)
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
    checked["content"] = text_of(content, f"{where}.content")
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
