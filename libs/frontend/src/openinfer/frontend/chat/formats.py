"""The formats in which models write calls. Each is one value, which the readers and the forced grammars follow."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from openinfer.frontend.chat.forced import HELD, any_arguments, bare_value, each_argument
from openinfer.frontend.chat.json_calls import JsonReader
from openinfer.frontend.chat.parts import Schemas
from openinfer.frontend.chat.python_calls import PythonReader
from openinfer.frontend.chat.tag_calls import TagReader
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.lark import Lark

DSML = "｜DSML｜"
NAME, TEXT, ID = "{name}", "{text}", "{id}"
_MEMBER = r'\s*,\s*"(?:id|type|index)"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'


@dataclass(frozen=True, kw_only=True)
class JsonFormat:
    """Calls as JSON objects, each with its own markers or all in one list.

    opening, closing: around a call, or a list of calls. head: what stands before the arguments. wrapped: it opens an
    object, which is closed behind them. listed: the calls between the markers are a JSON list. bare: a call may begin a
    line without an opening. end_call: what stands behind the arguments where all calls of a turn stand in one block.
    A head has `{name}`, or `{id}`, which is `functions.{name}:` and a number.
    """

    opening: str
    closing: str = ""
    line: str = "\n"
    call: str = '{"name": {name}, "arguments": '
    listed: bool = False
    end_call: str = ""

    @cached_property
    def wrapped(self) -> bool:
        return self.call.startswith('{"')

    @cached_property
    def head(self) -> re.Pattern[str]:
        """The beginning of a call up to its arguments, with the name as first group."""
        if self.wrapped:
            return re.compile(
                (r"[\s\[]*" if self.listed else r"\s*")
                + r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
            )
        head = re.escape(self.call).replace(re.escape(NAME), r"\s*([\w.-]+)")
        head = head.replace(re.escape(ID), r"\s{0,9}(?:functions\.)?([\w.-]{1,128})(:\d{1,9})?\s{0,9}")
        return re.compile(r"\s{0,9}" + head + r"\s*(?=\{)")

    @cached_property
    def start(self) -> str:
        """What a head begins with, before the name."""
        return self.call.partition("{")[0]

    def call_id(self, head: re.Match[str]) -> str:
        """The id that a head gives its call, as the model was trained to write it; empty where it gives none."""
        return f"functions.{head[1]}{head[2]}" if ID in self.call and head[2] else ""

    @cached_property
    def tail(self) -> re.Pattern[str]:
        """What stands behind the arguments of a call."""
        return re.compile(r"\s*" + re.escape(self.end_call) if self.end_call else rf"(?:{_MEMBER})*\s*\}}")

    @cached_property
    def bare(self) -> re.Pattern[str] | None:
        """Where a call without opening may begin."""
        if self.end_call:
            return re.compile(f"(?={re.escape(self.bare_start)})")
        return re.compile(r"^[ \t]*(?=\{)", re.MULTILINE) if self.wrapped else None

    @cached_property
    def bare_start(self) -> str:
        """What such a call begins with."""
        return self.start if self.end_call else "{"

    @cached_property
    def between(self) -> re.Pattern[str]:
        """What stands between the calls of a block."""
        return re.compile(r"\s*" if self.closing else r"[\s,;]*")

    @cached_property
    def end(self) -> re.Pattern[str]:
        """The end of a block."""
        return re.compile(r"\s*" + (r"\]" if self.listed else re.escape(self.closing)))

    def reader(self, schemas: Schemas, *, bare: bool, marked: bool) -> JsonReader:
        """A reader of one call, of a tool on offer where it is bare. marked: its opening was there."""
        return JsonReader(self, schemas, bare=bare, marked=marked)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        """The grammar after `opening` for a forced call of one of these tools, `closing` included. many: further calls
        may follow, in as many blocks as the format takes. Raises InvalidGrammar for a schema that cannot be forced."""
        end = self.end_call or "}" * self.wrapped + self.line + self.closing

        def head(name: str) -> str:
            call = self.line + self.call.replace(NAME, json.dumps(name) if self.wrapped else name)
            before, numbered, after = call.partition(ID)
            if not numbered:
                return lark.text(call)
            return f"{lark.text(f'{before}functions.{name}:')} /[0-9]{{1,3}}/ {lark.text(after)}"

        calls = [
            f"{head(name)} {any_arguments(lark, name, schema)} {lark.text(end)}"
            for name, schema in schemas.items()
        ]
        call, again = lark.any_of(calls), ", " if self.listed else self.line + self.opening
        more = lark.rule(call if self.end_call else f"{lark.text(again)} {call}") if many else ""
        written = f"{call} {more}{{0,{MAX_CALLS - 1}}}" if many else call
        written += f" {lark.text(self.closing)}" * bool(self.end_call)
        return f'"[" {written} "]"' if self.listed else written


@dataclass(frozen=True, kw_only=True)
class TagFormat:
    """Calls whose arguments stand between tags, as bare text without escapes.

    opening, closing: around a block. call, end_call: around a call, with `{name}` for its name; or the name alone, and
    a block is a call. parameter, end_parameter: around a value, with `{name}`, and `{text}` where the format says
    whether it is text or JSON. pad: a line break on each side of a value, which is no part of it. line: between tags.
    shared: all calls of a turn stand in one block.
    """

    opening: str
    closing: str
    call: str
    end_call: str
    parameter: str
    end_parameter: str
    pad: str = ""
    line: str = "\n"
    shared: bool = False
    between: ClassVar = re.compile(r"\s*")

    @cached_property
    def says_text(self) -> bool:
        return TEXT in self.parameter

    @cached_property
    def bare_start(self) -> str:
        """What a call begins with, before the name."""
        return self.call.partition(NAME)[0]

    @cached_property
    def call_tag(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + (self._pattern(self.call) if self.bare_start else r'([^\s<>"]+)(?=\s*<)'))

    @cached_property
    def half_call(self) -> re.Pattern[str]:
        """What may still become the opening tag of a call."""
        return _half(self.call) if self.bare_start else re.compile(r'[^\s<>"]*\s*')

    @cached_property
    def half_parameter(self) -> re.Pattern[str]:
        """What may still become the opening tag of a parameter."""
        return _half(self.parameter)

    @cached_property
    def parameter_tag(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + self._pattern(self.parameter))

    @cached_property
    def bare(self) -> re.Pattern[str] | None:
        return re.compile(f"(?={re.escape(self.bare_start)})") if self.bare_start else None

    @cached_property
    def end(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + re.escape(self.closing))

    @cached_property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """The beginnings of all tags, by name."""
        marks = (
            ("parameter", self.parameter.partition(NAME)[0]),
            ("end_parameter", self.end_parameter),
            ("call", self.bare_start),
            ("end_call", self.end_call),
            ("opening", self.opening),
            ("closing", self.closing),
        )
        return tuple((name, mark) for name, mark in marks if mark)

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """Any whole tag, in a group of its name."""
        written = {
            "parameter": re.sub(r"\((?!\?)", "(?:", self._pattern(self.parameter)),
            "call": re.sub(r"\((?!\?)", "(?:", self._pattern(self.call)),
        }
        return re.compile(
            "|".join(f"(?P<{name}>{written.get(name, re.escape(mark))})" for name, mark in self.marks)
        )

    def before_tag(self, text: str, start: int) -> int:
        """Where a tag may have begun that ends behind the text; the text's length if none has."""
        halves = (self.half_parameter, *((self.half_call,) if self.bare_start else ()))
        at = text.find("<", max(start, len(text) - MAX_TAG))
        while at >= 0:
            rest = text[at:]
            begins = any(mark.startswith(rest) for _, mark in self.marks)
            if begins or any(half.fullmatch(rest) for half in halves):
                return at
            at = text.find("<", at + 1)
        return len(text)

    def reader(self, schemas: Schemas, *, bare: bool, marked: bool) -> TagReader:
        """As JsonFormat.reader."""
        return TagReader(self, schemas, bare=bare, marked=marked)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        """As JsonFormat.grammar."""

        def write(name: str, schema: Mapping[str, Any]) -> str:
            text, other = bare_value(lark, schema, self.end_parameter, self.closing, before=self.pad)
            if not self.says_text:
                # Free text may read as another type of the schema's, and then is that: it needs no expression.
                if text and other and schema.keys() & HELD:
                    text = lark.any_of([text, other])
                opened = lark.text(self.parameter.replace(NAME, name) + self.pad)
                return f"{opened} {text or other} {lark.text(self.line)}"
            values = [
                f"{lark.text(self.parameter.replace(NAME, name).replace(TEXT, flag) + self.pad)} {value}"
                for flag, value in (("true", text), ("false", other))
                if value
            ]
            return f"{lark.any_of(values)} {lark.text(self.line)}"

        end_call = lark.text(self.end_call + self.line if self.end_call else "")
        calls = [
            f"{lark.text(self.call.replace(NAME, name) + self.line)} {each_argument(lark, name, schema, write)} "
            + end_call
            for name, schema in schemas.items()
        ]
        call, end = lark.any_of(calls), lark.text(self.closing)
        begin = lark.text(NEWLINE if self.bare_start else "")
        if self.shared or not many:
            return f"{begin} {call}{f'{{1,{MAX_CALLS}}}' if many else ''} {end}"
        more = lark.rule(f"{lark.text(NEWLINE + self.opening)} {begin} {call} {end}")
        return f"{begin} {call} {end} {more}{{0,{MAX_CALLS - 1}}}"

    def _pattern(self, tag: str) -> str:
        """The expression of an opening tag: its name is a group, and so is its flag, which may be left out."""
        before, _, after = tag.partition(NAME)
        before, after = re.escape(before), re.sub(r"><|>\\\n<", r">\\s*<", re.escape(after))
        if self.says_text and re.escape(TEXT) in after:
            after = re.sub(
                r'\\?"\\ (\w+)=\\?"' + re.escape(re.escape(TEXT)) + r'\\?"',
                r'"(?: \1="(true|false)")?',
                after,
            )
        return f'{before}([^{"<" * ("<" in after)}">\\n]+){after}'


def _half(tag: str) -> re.Pattern[str]:
    """The beginning of an opening tag, in or behind its name; it may be of two tags."""
    before, _, after = tag.partition(NAME)
    name = r"[^<>\n]*(?:<[^<>]*(?:>\s*(?:<[^<>]*)?)?)?" if "<" in after else r"[^>\n]*"
    return re.compile(re.escape(before) + name)


class PythonFormat:
    """Calls as a list of Python's, `[f(a=1), g(b="x")]`, at the beginning of a line or behind a marker."""

    opening, closing, bare_start, call, end_call = "<|python_start|>", "", "[", "", ""
    bare = re.compile(r"^[ \t]*(?=\[)", re.MULTILINE)
    between, end = re.compile(r"\s*"), re.compile(r"(?!)")

    def reader(self, schemas: Schemas, *, bare: bool, marked: bool) -> PythonReader:
        """As JsonFormat.reader."""
        return PythonReader(schemas, bare=bare)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        """As JsonFormat.grammar. Values are JSON, with a comma behind each."""

        def write(name: str, schema: Mapping[str, Any]) -> str:
            if not name.isidentifier():
                raise InvalidGrammar(f"the parameter {name!r} cannot be written in this model's calls")
            return f"{lark.text(name + '=')} {lark.json(schema)} {lark.text(', ')}"

        calls = [
            f"{lark.text(name + '(')} {each_argument(lark, name, schema, write)} {lark.text(')')}"
            for name, schema in schemas.items()
        ]
        call = lark.any_of(calls)
        more = lark.rule(f"{lark.text(', ')} {call}") + f"{{0,{MAX_CALLS - 1}}}" if many else ""
        return f'"[" {call} {more} "]"'


ToolFormat = JsonFormat | TagFormat | PythonFormat
MAX_TAG = 256
MAX_CALLS = 16
"""Of a forced answer: a model that repeats itself comes to an end."""
NEWLINE = "\n"
_HERMES = JsonFormat(opening="<tool_call>", closing="</tool_call>")
_QWEN_XML = TagFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    call="<function={name}>",
    end_call="</function>",
    parameter="<parameter={name}>",
    end_parameter="</parameter>",
    pad="\n",
)
_SEP = "｜tool▁sep｜"


def _deepseek(call: str, end: str = "") -> JsonFormat:
    return JsonFormat(
        opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>", line="",
        call=f"<｜tool▁call▁begin｜>{call}", end_call=f"{end}<｜tool▁call▁end｜>",
    )  # fmt: skip


def _glm(line: str) -> TagFormat:
    return TagFormat(
        opening="<tool_call>", closing="</tool_call>", call=NAME, end_call="", line=line,
        parameter=f"<arg_key>{NAME}</arg_key>{line}<arg_value>", end_parameter="</arg_value>",
    )  # fmt: skip


def _dsml(block: str) -> TagFormat:
    return TagFormat(
        opening=f"<{DSML}{block}>", closing=f"</{DSML}{block}>", call=f'<{DSML}invoke name="{{name}}">',
        end_call=f"</{DSML}invoke>", parameter=f'<{DSML}parameter name="{{name}}" string="{{text}}">',
        end_parameter=f"</{DSML}parameter>", shared=True,
    )  # fmt: skip


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "deepseek_v3": _deepseek(f"function<{_SEP}>{NAME}\n```json\n", "\n```"),
        "deepseek_v31": _deepseek(f"{NAME}<{_SEP}>"),
        "deepseek_v32": _dsml("function_calls"),
        "deepseek_v4": _dsml("tool_calls"),
        "glm45": _glm("\n"),
        "glm47": _glm(""),
        "hermes": _HERMES,
        "kimi_k2": JsonFormat(
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
            line="",
            call=f"<|tool_call_begin|>{ID}<|tool_call_argument_begin|>",
            end_call="<|tool_call_end|>",
        ),
        "llama3_json": JsonFormat(opening="<|python_tag|>", line="", call='{"name": {name}, "parameters": '),
        "mistral": JsonFormat(opening="[TOOL_CALLS]", line="", listed=True),
        "mistral_args": JsonFormat(opening="[TOOL_CALLS]", line="", call="{name}[ARGS]"),
        "pythonic": PythonFormat(),
        "qwen3_coder": _QWEN_XML,
        "qwen3_xml": _QWEN_XML,
    }
)
"""--tool-call-parser: name to format, under the names that users of vLLM know."""

REASONING_FORMATS = ("deepseek_v4", "kimi_k2", "qwen3")
"""--reasoning-parser: all of them are `<think>...</think>` at the start, opened by the prompt or by the model."""

_OF_QWEN = {"hermes", "qwen3_xml"}
_DEFAULTS = (("qwen3_5", "qwen3_xml", "qwen3"), ("qwen3", "hermes", "qwen3"), ("deepseek_v4",) * 3)
_IN_TEMPLATES = (
    (f"<{DSML}function_calls", "deepseek_v32"),
    (f"<{DSML}", "deepseek_v4"),
    (f"tool['type'] + '<{_SEP}>'", "deepseek_v3"),
    (f"<{_SEP}>", "deepseek_v31"),
    ("<|im_system|>tool_declare", "kimi_k2"),
    ("<function=", "qwen3_xml"),
    ("</arg_key>\n<arg_value>", "glm45"),
    ("<arg_key>", "glm47"),  # GLM-4.7's and GLM-5's
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("(params_name1=", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
"""What a template that writes calls has in it, and their format."""


def default_formats(model_type: str, templates: Sequence[str | None] = ()) -> tuple[str | None, str | None]:
    """Names of the tool and the reasoning format of config.json's model_type, or of a chat template; None where neither
    says one. Models of one type may be trained on other calls: Qwen3-Coder and Qwen3-Coder-Next on XML."""
    texts = [text for text in templates if text and "tool" in text]
    found = next((name for mark, name in _IN_TEMPLATES if any(mark in text for text in texts)), None)
    if model_type == "deepseek_v32" and not any(templates):  # V3.2-Exp has a template, and V3.1's calls
        return "deepseek_v32", "deepseek_v4"
    for prefix, tools, reasoning in _DEFAULTS:
        if model_type.startswith(prefix):
            return found if {found, tools} == _OF_QWEN else tools, reasoning
    return found, "qwen3" if any("</think>" in text for text in templates if text) else None
