"""Answers of /v1/messages in Anthropic's form: a list of blocks; a stream has an event for each growth of a block."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from openinfer.frontend.chat import Arguments, Content, Part, Reasoning, ToolCall
from openinfer.frontend.errors import APIError, TooLong
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.shapes import KINDS, encode, named_event
from openinfer.frontend.http.text.reader import take_piece
from openinfer.frontend.http.tokenizer import Tokenizer

SIGNATURE = "b3BlbmluZmVy"
"""The signature of all thoughts: clients send back only those that have one. It is not checked."""


class MessagesShape:
    """A Shape, for one choice."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = plan.model
        self._tokenizer = tokenizer
        self._open: type[Part] | None = None
        self._count = 0  # blocks begun
        self._called = False
        self._begun = False

    def events(self, choice: Choice) -> bytes:
        if not choice.started and not choice.done:
            return b""  # until it is known how much of the prompt is cached, which the first event says
        parts = take_piece(choice, self._tokenizer).parts
        said = b""
        if not self._begun:
            self._begun = True
            said = named_event("message_start", message=self._message([], (None, None), Usage([choice], 1)))
        return said + b"".join([self._grow(part) for part in parts])

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        reason, stop = self._reason(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = named_event("message_delta", delta=delta, usage=_usage(usage))
        return self._close() + last + named_event("message_stop")

    def broken(self, error: APIError) -> bytes:
        return b"event: error\ndata: " + messages_error(error) + b"\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        blocks: list[dict[str, Any]] = []
        kind: type[Part] | None = None
        for part in take_piece(choice, self._tokenizer).parts:
            assert not isinstance(part, Arguments)  # what is not streamed has whole calls
            if type(part) is kind and isinstance(part, Content | Reasoning):
                name = "text" if isinstance(part, Content) else "thinking"
                blocks[-1][name] += part.text
            else:
                kind = type(part)
                blocks.append(_block(part))
                if isinstance(part, ToolCall):
                    self._called = True
                    blocks[-1]["input"] = json.loads(part.arguments)
        return encode(self._message(blocks, self._reason(choice), usage))

    def _grow(self, part: Part) -> bytes:
        said = b""
        begins = type(part) is not self._open or isinstance(part, ToolCall)
        if begins and not isinstance(part, Arguments):
            said = self._close()
            self._open = type(part)
            self._called = self._called or isinstance(part, ToolCall)
            block = _block(part if isinstance(part, ToolCall) else type(part)(""))
            if "signature" in block:
                block["signature"] = ""
            said += named_event("content_block_start", index=self._count, content_block=block)
            self._count += 1
        match part:
            case ToolCall(_, text) | Arguments(text):
                delta = {"type": "input_json_delta", "partial_json": text}
            case Content(text):
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
        return said + self._delta(delta)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return named_event("content_block_delta", index=self._count - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        said = b""
        if self._open is Reasoning:
            said = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        return said + named_event("content_block_stop", index=self._count - 1)

    def _reason(self, choice: Choice) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if choice.finish_reason == "length":
            return "max_tokens", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return ("tool_use" if self._called else "end_turn"), None

    def _message(
        self, blocks: list[dict[str, Any]], reason: tuple[str | None, str | None], usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason[0],
            "stop_sequence": reason[1],
            "usage": _usage(usage),
        }


def messages_error(error: APIError) -> bytes:
    """Anthropic's error object."""
    kinds = {**KINDS, 413: "request_too_large"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": _words(error)}})


def _words(error: APIError) -> str:
    """The message. Agents know a chat that is too long by Anthropic's words, and read the numbers in them."""
    if not isinstance(error, TooLong):
        return f"prompt is too long: {error}" if error.code == "context_length_exceeded" else str(error)
    if error.output is None:
        return f"prompt is too long: {error.prompt} tokens > {min(error.context, error.prompt - 1)} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.output} > {error.context}, "
        "decrease input length or `max_tokens` and try again"
    )


def _block(part: ToolCall | Content | Reasoning) -> dict[str, Any]:
    match part:
        case ToolCall(name, _, given):
            identity = given or f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": identity, "name": name, "input": {}}
        case Content(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts what came from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
