"""Qwen3.5: `<tool_call>\n<function=NAME>\n<parameter=P>\nvalue\n</parameter>\n</function>\n</tool_call>`.

Values are bare text; the tool's JSON schema says what they are.
"""

import re
from collections.abc import Mapping
from typing import Any

from openinfer.frontend.chat.forced import HELD, bare_value, each_argument
from openinfer.frontend.chat.output import repeated
from openinfer.frontend.chat.parts import Schemas, ToolCall
from openinfer.frontend.chat.streams import ParameterStream
from openinfer.frontend.chat.values import Malformed, encode, kinds, typed
from openinfer.sampler.lark import Lark

__all__ = ["QwenXmlFormat"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_END_FUNCTION = re.compile(r"\s*</function>")
_END_PARAMETER = "</parameter>"
NEWLINE = "\n"


class QwenXmlFormat:
    """A ToolFormat."""

    opening, closing = "<tool_call>", "</tool_call>"

    def parse(self, body: str, schemas: Schemas) -> list[ToolCall] | None:
        calls, position = [], 0
        try:
            while position < len(body.rstrip()):
                call, position = self._function(body, position, schemas)
                calls.append(call)
        except Malformed:
            return None
        return calls or None

    def stream(self, schemas: Schemas) -> ParameterStream:
        def schema_of(name: str, opened: re.Match[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            parameters = schemas.get(name) or {}
            properties = parameters.get("properties")
            schema = properties.get(opened[1].strip()) if isinstance(properties, dict) else None
            return schema if isinstance(schema, dict) else {}, parameters

        def is_text(name: str, opened: re.Match[str]) -> bool:
            return kinds(*schema_of(name, opened)) in (set(), {"string"})

        def read(name: str, opened: re.Match[str], value: str) -> str:
            return encode(typed(value.removeprefix(NEWLINE).removesuffix(NEWLINE), *schema_of(name, opened)))

        marks = (_FUNCTION, _PARAMETER, _END_PARAMETER, _END_FUNCTION)
        return ParameterStream(schemas, *marks, is_text, read, trims=True)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        def write(name: str, schema: Mapping[str, Any]) -> str:
            text, other = bare_value(lark, schema, _END_PARAMETER, self.closing, before="\n")
            # Free text may read as another type of the schema's, and then is that: it needs no expression of its own.
            if text and other and schema.keys() & HELD:
                text = lark.any_of([text, other])
            return f"{lark.text(f'<parameter={name}>' + NEWLINE)} {text or other} {lark.text(NEWLINE)}"

        functions = [
            f"{lark.text(f'{NEWLINE}<function={name}>{NEWLINE}')} {each_argument(lark, name, schema, write)} "
            f"{lark.text(f'</function>{NEWLINE}{self.closing}')}"
            for name, schema in schemas.items()
        ]
        return repeated(lark, self, lark.any_of(functions), many)

    def _function(self, body: str, position: int, schemas: Schemas) -> tuple[ToolCall, int]:
        opened = _FUNCTION.match(body, position)
        if opened is None:
            raise Malformed
        name, position = opened[1].strip(), opened.end()
        parameters = schemas.get(name) or {}
        properties = parameters.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(body, position):
            end = body.find(_END_PARAMETER, parameter.end())
            if end < 0:
                raise Malformed
            value = body[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            key = parameter[1].strip()
            schema = properties.get(key)
            arguments[key] = typed(value, schema if isinstance(schema, dict) else {}, parameters)
            position = end + len(_END_PARAMETER)
        closed = _END_FUNCTION.match(body, position)
        if closed is None or not name:
            raise Malformed
        return ToolCall(name, encode(arguments)), closed.end()
