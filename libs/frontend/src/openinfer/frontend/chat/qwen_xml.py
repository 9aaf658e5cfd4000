"""Qwen3.5: `<tool_call>\n<function=NAME>\n<parameter=P>\nvalue\n</parameter>\n</function>\n</tool_call>`.

Values are bare text; the tool's JSON schema says what they are.
"""

import re
from typing import Any

from openinfer.frontend.chat.output import Schemas, ToolCall
from openinfer.frontend.chat.values import Malformed, encode, typed

__all__ = ["QwenXmlFormat"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_END_FUNCTION = re.compile(r"\s*</function>")
_END_PARAMETER = "</parameter>"


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

    def _function(self, body: str, position: int, schemas: Schemas) -> tuple[ToolCall, int]:
        opened = _FUNCTION.match(body, position)
        if opened is None:
            raise Malformed
        name, position = opened[1].strip(), opened.end()
        properties = schemas.get(name, {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(body, position):
            end = body.find(_END_PARAMETER, parameter.end())
            if end < 0:
                raise Malformed
            value = body[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            key = parameter[1].strip()
            schema = properties.get(key)
            arguments[key] = typed(value, schema if isinstance(schema, dict) else {})
            position = end + len(_END_PARAMETER)
        closed = _END_FUNCTION.match(body, position)
        if closed is None or not name:
            raise Malformed
        return ToolCall(name, encode(arguments)), closed.end()
