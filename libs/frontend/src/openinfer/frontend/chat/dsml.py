"""DeepSeek-V4: a block of `<｜DSML｜invoke name="f">` with typed parameters, all calls of a turn in one block."""

import re
from collections.abc import Mapping
from typing import Any

from openinfer.frontend.chat.forced import bare_value, each_argument
from openinfer.frontend.chat.parts import Schemas, ToolCall
from openinfer.frontend.chat.streams import ParameterStream
from openinfer.frontend.chat.values import Malformed, decode, encode
from openinfer.sampler.lark import Lark

__all__ = ["DSML", "DsmlFormat"]

DSML = "｜DSML｜"
_INVOKE = re.compile(rf'\s*<{DSML}invoke name="([^"\n]+)">')
_PARAMETER = re.compile(rf'\s*<{DSML}parameter name="([^"\n]+)" string="(true|false)">')
_END_INVOKE = re.compile(rf"\s*</{DSML}invoke>")
_INVOKE_LINE, _END_INVOKE_LINE = f'<{DSML}invoke name="%s">\n', f"</{DSML}invoke>\n"
_END_PARAMETER = f"</{DSML}parameter>"


class DsmlFormat:
    """A ToolFormat."""

    opening, closing = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"

    def parse(self, body: str, schemas: Schemas) -> list[ToolCall] | None:
        calls, position = [], 0
        try:
            while position < len(body.rstrip()):
                call, position = self._invoke(body, position)
                calls.append(call)
        except Malformed:
            return None
        return calls or None

    def stream(self, schemas: Schemas) -> ParameterStream:
        def is_text(name: str, opened: re.Match[str]) -> bool:
            return opened[2] == "true"

        def read(name: str, opened: re.Match[str], value: str) -> str:
            return encode(decode(value))

        marks = (_INVOKE, _PARAMETER, _END_PARAMETER, _END_INVOKE)
        return ParameterStream(schemas, *marks, is_text, read, trims=False)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        """All calls of a turn stand in one block."""
        newline = lark.text("\n")

        def write(name: str, schema: Mapping[str, Any]) -> str:
            text, other = bare_value(lark, schema, _END_PARAMETER, self.closing)
            heads = (f'<{DSML}parameter name="{name}" string="{flag}">' for flag in ("true", "false"))
            values = [
                f"{lark.text(head)} {value}"
                for head, value in zip(heads, (text, other), strict=True)
                if value
            ]
            return f"{lark.any_of(values)} {newline}"

        calls = [
            f"{lark.text(_INVOKE_LINE % name)} {each_argument(lark, name, schema, write)} "
            f"{lark.text(_END_INVOKE_LINE)}"
            for name, schema in schemas.items()
        ]
        return f"{newline} {lark.any_of(calls)}{'+' if many else ''} {lark.text(self.closing)}"

    def _invoke(self, body: str, position: int) -> tuple[ToolCall, int]:
        opened = _INVOKE.match(body, position)
        if opened is None:
            raise Malformed
        position = opened.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(body, position):
            end = body.find(_END_PARAMETER, parameter.end())
            if end < 0:
                raise Malformed
            value = body[parameter.end() : end]
            arguments[parameter[1]] = value if parameter[2] == "true" else decode(value)
            position = end + len(_END_PARAMETER)
        closed = _END_INVOKE.match(body, position)
        if closed is None:
            raise Malformed
        return ToolCall(opened[1], encode(arguments)), closed.end()
