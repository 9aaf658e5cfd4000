"""How this server's model writes chats: a Chat in; prompt text, grammar and output parser out."""

import dataclasses
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from openinfer.frontend.chat import OutputParser, ToolFormat, text_of
from openinfer.frontend.chat.formats import TOOL_FORMATS
from openinfer.frontend.chat.output import END_THINK, THINK
from openinfer.frontend.chat.parts import Schemas
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.chat import Chat
from openinfer.frontend.http.text.structured import unkept
from openinfer.frontend.http.text.thoughts import Where, effort_options
from openinfer.frontend.render_pool import RenderPool
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.form import Grammar
from openinfer.sampler.lark import Lark

SMALL_SIZE = 16384
"""Larger chats, in characters and items, are rendered apart from the others."""
RENDER_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The format in which this server's model writes chats.

    renderer: None refuses chats. options: the template's variables where a request gives no others. tools: None refuses
    tools. reasoning: split `<think>` from the content. guard: None lets text of special tokens become those.
    """

    renderer: RenderPool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: ToolFormat | None = None
    reasoning: bool = False
    guard: "SpecialTokenGuard | None" = None

    async def prompt(self, chat: Chat) -> list[str]:
        """The prompt's text, in parts that are encoded apart. Raises APIError (400) naming the field."""
        if self.renderer is None:
            raise APIError("this server has no chat template; use /v1/completions", param="messages")
        tools = self._tools_on_offer(chat)
        if tools and not self.renderer.shows_tools:
            chat.warnings.append("the model does not see the tools: its chat template has no place for them")
        marker = f"<{uuid.uuid4().hex}>" if chat.continue_final else ""
        messages = _with_marker(chat.messages, marker) if marker else chat.messages
        call = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": chat.add_generation_prompt and not marker,
            "kwargs": self._options(self.renderer, chat),
        }
        cut = uuid.uuid4().hex
        large = _larger_than(SMALL_SIZE, call)
        if self.guard is not None:
            call |= self.guard.cut(messages, tools, cut)
        text = await self.renderer.render(call, large, RENDER_TIMEOUT_S)
        before, found, _ = text.partition(marker) if marker else (text, "", "")
        if marker and not found:
            raise APIError(
                "this model's chat template changes or leaves out the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return before.split(cut)

    def parser(self, chat: Chat, prompt: str, streams: bool) -> Callable[[], OutputParser] | None:
        """Makes the parsers for what follows `prompt`; None when all of it is content. streams: calls as they come."""
        tools = self.tools if self._tools_on_offer(chat) else None
        reasoning = self.reasoning and chat.separate
        if tools is None and not reasoning:
            return None
        return partial(
            OutputParser,
            reasoning=reasoning,
            tools=tools,
            schemas=_schemas(chat),
            in_reasoning=_thinking(prompt, chat) == "within",
            max_calls=None if chat.parallel_calls else 1,
            streams=streams,
        )

    def grammar(self, chat: Chat, prompt: str, content: Grammar | None) -> Grammar | None:
        """The grammar of all text after `prompt`: thoughts, then `content`, or the calls that the chat asks for. None
        where the model is free. Raises APIError (400), which names the part that cannot be forced."""
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
        if not schemas or self.tools is None:
            assert content is not None
            return lark.content(content)
        opening = self.tools.opening
        if not forced and content is None:  # free text, in which a call that begins must become one
            many = chat.parallel_calls
            call = lark.rule(f"{lark.until(opening)} {self.tools.grammar(lark, schemas, many=many)}")
            return f"{call}{'*' if many else '?'} {lark.without(opening)}"
        many = chat.parallel_calls and not chat.tool_choice.startswith("tool ")  # which asks for one call
        calls = f"{lark.text(opening)} {self.tools.grammar(lark, schemas, many=many)}"
        return calls if forced or content is None else lark.any_of([calls, lark.content(content)])

    def _thoughts(self, lark: Lark, where: Where) -> str:
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
        form = self.tools
        tools = f"{form.opening} {form.call} {form.end_call} {form.closing}" if form else ""
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
            formats = ", ".join(TOOL_FORMATS)
            raise APIError(
                f"tools are not supported by this server: start it with --tool-call-parser, and one of {formats}",
                param="tools",
            )
        return chat.tools

    def _options(self, renderer: RenderPool, chat: Chat) -> dict[str, Any]:
        found = {} if chat.effort is None else effort_options(chat.effort, renderer.variables)
        if found is None:
            chat.warnings.append(
                f"reasoning effort {chat.effort} is ignored: this model's chat template has no such thing"
            )
            found = {}
        return {**self.options, **found, **chat.options}


class SpecialTokenGuard:
    """Keeps the text of special tokens in messages and tools from becoming these tokens: it is cut after its first
    character, and the parts are encoded one by one. special, added: the texts of special tokens, and of all that stand
    beside the vocabulary, such as `</think>`, which an assistant's own turns may have."""

    def __init__(self, special: Iterable[str], added: Iterable[str]) -> None:
        self._special, self._added = _beginnings(special), _beginnings(added)

    def cut(self, messages: Sequence[Mapping[str, Any]], tools: Any, mark: str) -> dict[str, Any]:
        """Messages and tools with the mark where their text is cut. Raises APIError (400)."""
        try:
            return {
                "messages": [
                    _cut(message, self._special if message["role"] == "assistant" else self._added, mark)
                    for message in messages
                ],
                "tools": _cut(tools or None, self._added, mark),
            }
        except RecursionError as error:
            raise APIError(f"the chat cannot be written as a prompt: {error}", param="messages") from error


def _beginnings(texts: Iterable[str]) -> re.Pattern[str]:
    found = "|".join(map(re.escape, texts)) or r"(?!)"
    return re.compile(f"(?={found})(.)", re.DOTALL)


def _cut(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    match value:
        case str():
            return pattern.sub(rf"\g<1>{mark}", value)
        case dict():
            return {_cut(key, pattern, mark): _cut(inner, pattern, mark) for key, inner in value.items()}
        case list() | tuple():
            return [_cut(inner, pattern, mark) for inner in value]
    return value


def _larger_than(limit: int, value: object) -> bool:
    """Whether a JSON value has more characters and items than `limit`; looks at no more than it needs to know."""
    left, values = limit, [value]
    while values and left >= 0:
        one = values.pop()
        if isinstance(one, str | Mapping | list | tuple):
            left -= len(one)
            if left >= 0 and not isinstance(one, str):
                values += [*one, *one.values()] if isinstance(one, Mapping) else one
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
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + marker}]
    *parts, end = content
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + marker}]}]


def _thinking(prompt: str, chat: Chat) -> Where:
    if chat.continue_final:
        return "within" if THINK in text_of(chat.messages[-1]["content"]).rpartition(END_THINK)[2] else "over"
    text = prompt.rstrip()
    return "within" if text.endswith(THINK) else "over" if text.endswith(END_THINK) else "before"
