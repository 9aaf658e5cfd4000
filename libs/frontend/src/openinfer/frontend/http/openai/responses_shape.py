"""Answers of /v1/responses in OpenAI's form: a list of items; a stream has an event for each growth of an item."""

import time
import uuid
from collections.abc import Container, Sequence
from typing import Any

from openinfer.frontend.chat import Arguments, Content, Part, Reasoning, ToolCall
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.openai.responses_body import (
    ENCRYPTED,
    KeptItems,
    ResponsesBody,
    carried,
    flattened,
)
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.shapes import encode, named_event
from openinfer.frontend.http.text.reader import new_call_id, take_piece
from openinfer.frontend.http.tokenizer import Tokenizer

_TEXTS: dict[type[Part], tuple[str, dict[str, Any]]] = {
    Content: ("output_text", {"logprobs": []}),
    Reasoning: ("reasoning_text", {}),
}
"""What a text is called, and what its events have besides."""


class ResponsesShape:
    """A Shape, for one choice."""

    def __init__(self, body: ResponsesBody, plan: Plan, tokenizer: Tokenizer | None, kept: KeptItems) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._body, self._plan, self._kept = body, plan, kept
        self._summarizes = body.reasoning is not None and body.reasoning.summary not in (None, "none")
        self._carries = ENCRYPTED in (body.include or ())
        # The model calls a tool of a namespace by one name, and the client knows it by two.
        self._names = {
            tool.name: {"name": name} if space is None else {"name": name, "namespace": space}
            for (space, name), tool in flattened(body.tools or (), []).items()
        }
        self._tokenizer = tokenizer
        self._cut: Container[int] = ()  # calls that ended before they were whole
        self._items: list[dict[str, Any]] = []
        self._open: type[Part] | None = None
        self._text: list[str] = []
        self._calls = 0
        self._sequence = 0

    def events(self, choice: Choice) -> bytes:
        parts = self._taken(choice)
        begun = b""
        if self._sequence == 0:
            response = self._response("in_progress", None)
            begun = self._event("created", response=response)
            begun += self._event("in_progress", response=response)
        return begun + b"".join([self._grow(part) for part in parts])

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        status = _status(choices[0])
        closed = self._close(status)
        self._keep()
        return closed + self._event(status, response=self._response(status, usage))

    def broken(self, error: APIError) -> bytes:
        closed = self._close("incomplete", broken=True)
        response = self._response("failed", None)
        code = "server_error" if error.status >= 500 or error.code is None else error.code
        response["error"] = {"code": code, "message": str(error)}
        return closed + self._event("failed", response=response)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        for part in self._taken(choice):
            self._grow(part)
        self._close(_status(choice))
        self._keep()
        return encode(self._response(_status(choice), usage))

    def _taken(self, choice: Choice) -> list[Part]:
        if choice.parser is not None:
            self._cut = choice.parser.cut
        return take_piece(choice, self._tokenizer).parts

    def _keep(self) -> None:
        if self._body.store is not False:
            self._kept.keep(self._items)

    def _grow(self, part: Part) -> bytes:
        said = b""
        if isinstance(part, Arguments):
            self._items[-1]["arguments"] += part.text
            return self._item_event("function_call_arguments.delta", delta=part.text)
        if type(part) is not self._open or isinstance(part, ToolCall):
            said = self._close("completed") + self._begin(part)
        if isinstance(part, ToolCall):
            return said + self._item_event("function_call_arguments.delta", delta=part.arguments)
        self._text.append(part.text)
        name, more = _TEXTS[type(part)]
        said += self._item_event(f"{name}.delta", content_index=0, delta=part.text, **more)
        if isinstance(part, Reasoning) and self._summarizes:
            said += self._item_event("reasoning_summary_text.delta", summary_index=0, delta=part.text)
        return said

    def _begin(self, part: ToolCall | Content | Reasoning) -> bytes:
        self._open = type(part)
        self._text = []
        item: dict[str, Any]
        match part:
            case ToolCall(name, arguments, identity):
                item = {"type": "function_call", "id": _new("fc"), "call_id": identity or new_call_id()}
                item |= self._names.get(name, {"name": name}) | {"arguments": arguments}
            case Content():
                item = {"type": "message", "id": _new("msg"), "role": "assistant", "content": []}
            case Reasoning():
                item = {"type": "reasoning", "id": _new("rs"), "summary": [], "content": []}
                if self._carries:
                    item["encrypted_content"] = None
        item["status"] = "in_progress"
        self._items.append(item)
        if isinstance(part, ToolCall):
            return self._shown("added", {**item, "arguments": ""})
        said = self._shown("added", item)
        said += self._item_event("content_part.added", content_index=0, part=_text_part(type(part), ""))
        if isinstance(part, Reasoning) and self._summarizes:
            empty = {"type": "summary_text", "text": ""}
            said += self._item_event("reasoning_summary_part.added", summary_index=0, part=empty)
        return said

    def _close(self, status: str, broken: bool = False) -> bytes:
        """End the item that grows. status: that of a text. broken: no more is known of it."""
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        item = self._items[-1]
        item["status"] = status
        if kind is ToolCall:
            # A call may be whole in an answer that is cut, and cut in one that is not.
            cut = broken or self._calls in self._cut
            item["status"] = "incomplete" if cut else "completed"
            self._calls += 1
            whole = {"name": item["name"], "arguments": item["arguments"]}
            return self._item_event("function_call_arguments.done", **whole) + self._shown("done", item)
        text, (name, more) = "".join(self._text), _TEXTS[kind]
        done = _text_part(kind, text)
        item["content"] = [done]
        if kind is Reasoning and self._carries:
            item["encrypted_content"] = carried(text)
        said = self._item_event(f"{name}.done", content_index=0, text=text, **more)
        said += self._item_event("content_part.done", content_index=0, part=done)
        if kind is Reasoning and self._summarizes:
            summary = {"type": "summary_text", "text": text}
            item["summary"] = [summary]
            said += self._item_event("reasoning_summary_text.done", summary_index=0, text=text)
            said += self._item_event("reasoning_summary_part.done", summary_index=0, part=summary)
        return said + self._shown("done", item)

    def _shown(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"output_item.{what}", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._plan.stream:
            return b""
        said = named_event(f"response.{kind}", sequence_number=self._sequence, **fields)
        self._sequence += 1
        return said

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        body, sampling = self._body, self._plan.sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._plan.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage(usage) if usage else None,
            "user": body.user,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            # No token costs more for being kept in the prefix cache.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _text_part(kind: type[Part], text: str) -> dict[str, Any]:
    name, more = _TEXTS[kind]
    return {"type": name, "text": text, **({"annotations": []} if kind is Content else {}), **more}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
