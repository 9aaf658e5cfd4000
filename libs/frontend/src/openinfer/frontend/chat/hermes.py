"""Qwen3 (and Hermes): `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, one call a pair of tags."""

from openinfer.frontend.chat.output import Schemas, ToolCall
from openinfer.frontend.chat.values import Malformed, decode, encode

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
