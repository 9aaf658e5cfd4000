"""The checkpoint's own chat template, rendered in a sandbox as model authors expect it."""

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openinfer.frontend.chat import Message, RendererSpec
from openinfer.frontend.errors import APIError, ModelFilesError
from openinfer.frontend.model_files import read_text

__all__ = ["ChatTemplate", "find_template", "template_spec"]

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
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """Turns messages into the text of a prompt. A Renderer. `source` is its Jinja source.

    Making one runs the template: where the source is not to be trusted, a RenderPool makes it from `template_spec`.

    source: Jinja source; ModelFilesError if it does not compile.
    special_tokens: names and texts that the template may mention (bos_token, eos_token, ...).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.spec = template_spec(source, special_tokens)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source))) - _OURS
        self._systems_anywhere = self._takes(_SYSTEMS)

    def _takes(self, messages: Sequence[Message]) -> bool:
        try:
            self._template.render(self._special_tokens, messages=messages, tools=None)
        except _REFUSALS:
            return False
        return True

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
        message, the first, those behind the first join it, and later ones are turns of the user.
        Raises APIError (400) when the template refuses the messages or kwargs name what is not theirs.
        """
        reserved = sorted(_OURS.intersection(kwargs or ()))
        if reserved:
            raise APIError(
                f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        variables = {**self._special_tokens, **(kwargs or {})}
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if not self._systems_anywhere:
            messages = _one_system(messages)
        try:
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
    return [{**leading[0], "content": "\n\n".join(m["content"] for m in leading)}, *later]


def template_spec(source: str, special_tokens: Mapping[str, str]) -> RendererSpec:
    """How a process makes a ChatTemplate."""
    kwargs = {"source": source, "special_tokens": dict(special_tokens)}
    return RendererSpec("openinfer.frontend.chat_template:ChatTemplate", kwargs)


def find_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """Source of the template: chat_template.jinja, else tokenizer_config.json's chat_template, else None."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ModelFilesError(
            f"chat_template in tokenizer_config.json is a {type(found).__name__}; it must be a string, or a list of "
            "objects with a name and a template"
        )
    return found


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
