"""The checkpoint's own chat template, rendered in a sandbox as model authors expect it."""

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openinfer.frontend.chat.parts import Message, template_spec, text_of
from openinfer.frontend.errors import APIError, ModelFilesError

_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError),
    *(AttributeError, OverflowError, MemoryError),
)
"""The exceptions that a template may raise over messages or options that it was not written for."""
_SYSTEMS = [
    {"role": role, "content": "x", "reasoning": "", "reasoning_content": ""}
    for role in ("system", "system", "user", "assistant", "system", "user")
]
"""Messages that some templates refuse: a system message that is not the first message."""
_CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}
_CHATS: Sequence[Sequence[tuple[str, dict[str, Any]]]] = (
    (("system", {}), ("user", {}), ("assistant", {}), ("user", {})),
    (("user", {}), ("assistant", {"tool_calls": [_CALL]}), ("tool", {"tool_call_id": "0"})),
    (("user", {}), ("assistant", {}), ("user", {})),
)
"""Chats of roles and further fields, of which a template takes at least one."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A Renderer from Jinja source; ModelFilesError if it does not compile.

    Making one runs the template: where the source is not to be trusted, a RenderPool makes it from `template_spec`.

    special_tokens: names and texts that the template may mention (bos_token, eos_token, ...).
    with_tools: the source for chats that have tools, where they have a template of their own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.spec = template_spec(source, special_tokens, with_tools)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source))) - _OURS
        self._systems_anywhere = self._said(_SYSTEMS) is not None
        self._takes_parts: Callable[[str], bool] = functools.cache(self._joins_parts)
        self._with_tools = None if with_tools is None else ChatTemplate(with_tools, special_tokens)
        if self._with_tools is not None:
            self.variables |= self._with_tools.variables

    def _said(self, messages: Sequence[Message]) -> str | None:
        """The prompt without any options; None if the template refuses the messages."""
        try:
            return self._template.render(self._special_tokens, messages=messages, tools=None)
        except _REFUSALS:
            return None

    def _with_content(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or self._takes_parts(message["role"]):
            return message
        return {**message, "content": text_of(content, "\n")}

    def _joins_parts(self, role: str) -> bool:
        """Whether the template takes a content that is parts, rather than a text, for messages of a role."""
        parts = [{"type": "text", "text": text} for text in ("QZ1", "QZ2")]
        for chat in _CHATS:
            if all(who != role for who, _ in chat):
                continue
            turns = [{"role": who, "content": parts if who == role else "x", **more} for who, more in chat]
            said = self._said(turns)
            if said is not None:
                between = said.partition("QZ1")[2].partition("QZ2")
                return bool(between[1]) and "type" not in between[0]  # a list that is written out has "type"
        return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. kwargs are the request's chat_template_kwargs, such as enable_thinking.

        A developer message is a system message where the template has no such role. Where the template takes one system
        message, the first, those behind the first join it, and later ones are turns of the user. Parts go to a template
        that takes parts, and become lines of one text elsewhere.
        Raises APIError (400) when the template refuses the messages or kwargs name what is not theirs.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
            )
        if reserved := sorted(_OURS.intersection(kwargs or ())):
            raise APIError(
                f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        variables = {**self._special_tokens, **(kwargs or {})}
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            messages = [self._with_content(message) for message in messages]
            if not self._systems_anywhere:
                messages = _one_system(messages)
            return self._template.render(
                variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except _REFUSALS as error:
            why = str(error) or type(error).__name__
            raise APIError(f"the chat template refuses these messages: {why}", param="messages") from error


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """The system messages at the front as one; each later one as a turn of the user, in its place."""
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    later = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[len(leading) :]]
    if not leading:
        return later
    return [{**leading[0], "content": "\n\n".join(text_of(m["content"]) for m in leading)}, *later]


class _Generation(Extension):
    """The tag `{% generation %}` of transformers. It marks what a model is trained on, and adds nothing to a prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
