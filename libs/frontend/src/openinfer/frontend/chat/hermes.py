"""Qwen3 (and Hermes): `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, one call a pair of tags."""

import json

from openinfer.frontend.chat.forced import any_arguments
from openinfer.frontend.chat.output import repeated
from openinfer.frontend.chat.parts import Schemas, ToolCall
from openinfer.frontend.chat.streams import JsonStream
from openinfer.frontend.chat.values import Malformed, decode, encode
from openinfer.sampler.lark import Lark

__all__ = ["HermesFormat"]


class HermesFormat:
    """A ToolFormat."""

    opening, closing = "<tool_call>", "</tool_call>"

    def parse(self, body: str, schemas: Schemas) -> list[ToolCall] | None:
        try:
            call = decode(body)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
                return None
            arguments = call.get("arguments", {})
            if isinstance(arguments, str):  # JSON within JSON, as some write it
                arguments = decode(arguments)
            if not isinstance(arguments, dict):
                return None
            encode(call["name"])
            return [ToolCall(call["name"], encode(arguments))]
        except Malformed:
            return None

    def stream(self, schemas: Schemas) -> JsonStream:
        return JsonStream(schemas)

    def grammar(self, lark: Lark, schemas: Schemas, many: bool) -> str:
        end = lark.text("}\n" + self.closing)
        calls = [
            f"{lark.text(head)} {any_arguments(lark, name, schema)} {end}"
            for name, schema in schemas.items()
            for head in ['\n{"name": ' + json.dumps(name) + ', "arguments": ']
        ]
        return repeated(lark, self, lark.any_of(calls), many)
