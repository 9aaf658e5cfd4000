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
from openinfer.frontend.http.shapes import encode, error_body, named_event
from openinfer.frontend.http.text.reader import Reader, new_call_id
from openinfer.frontend.http.tokenizer import Tokenizer


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
        self._reader = Reader(tokenizer)
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
            begun = self._event("response.created", response=response)
            begun += self._event("response.in_progress", response=response)
        return begun + b"".join([self._grow(part) for part in parts])

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        status = _status(choices[0])
        closed = self._close(status)
        self._keep()
        response = self._response(status, usage)
        return closed + self._event(f"response.{status}", response=response)

    def broken(self, error: APIError) -> bytes:
        closed = self._close("incomplete", broken=True)
        response = self._response("failed", None)
        code = "server_error" if error.status >= 500 or error.code is None else error.code
        response["error"] = {"code": code, "message": str(error)}
        return closed + self._event("response.failed", response=response)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        for part in self._taken(choice):
            self._grow(part)
        self._close(_status(choice))
        self._keep()
        return encode(self._response(_status(choice), usage))

    def refusal(self, error: APIError) -> bytes:
        return error_body(error)

    def _taken(self, choice: Choice) -> list[Part]:
        if choice.parser is not None:
            self._cut = choice.parser.cut
        return self._reader.take(choice).parts

    def _keep(self) -> None:
        if self._body.store is not False:
            self._kept.keep(self._items)

    def _grow(self, part: Part) -> bytes:
        """Add a part; the events that say so."""
        said = b""
        if isinstance(part, Arguments):
            self._items[-1]["arguments"] += part.text
            return self._event("response.function_call_arguments.delta", **self._place(), delta=part.text)
        if type(part) is not self._open or isinstance(part, ToolCall):
            said = self._close("completed") + self._begin(part)
        place = self._place()
        if isinstance(part, ToolCall):
            return said + self._event("response.function_call_arguments.delta", **place, delta=part.arguments)
        self._text.append(part.text)
        if isinstance(part, Content):
            return said + self._event(
                "response.output_text.delta", **place, content_index=0, delta=part.text, logprobs=[]
            )
        said += self._event("response.reasoning_text.delta", **place, content_index=0, delta=part.text)
        if self._summarizes:
            said += self._event(
                "response.reasoning_summary_text.delta", **place, summary_index=0, delta=part.text
            )
        return said

    def _begin(self, part: ToolCall | Content | Reasoning) -> bytes:
        self._open = type(part)
        self._text = []
        item: dict[str, Any]
        match part:
            case ToolCall(name, arguments, identity):
                item = {"type": "function_call", "id": _new("fc"), "call_id": identity or new_call_id()}
                item |= self._names.get(name, {"name": name})
                item |= {"arguments": arguments, "status": "in_progress"}
                shown = {**item, "arguments": ""}
            case Content():
                item = {"type": "message", "id": _new("msg"), "role": "assistant", "content": []}
                shown = item = {**item, "status": "in_progress"}
            case Reasoning():
                item = {"type": "reasoning", "id": _new("rs"), "summary": [], "content": []}
                if self._carries:
                    item["encrypted_content"] = None
                shown = item = {**item, "status": "in_progress"}
        self._items.append(item)
        said = self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        if not isinstance(part, ToolCall):
            begun = _text_part(part, "")
            said += self._event("response.content_part.added", **self._place(), content_index=0, part=begun)
        if isinstance(part, Reasoning) and self._summarizes:
            empty = {"type": "summary_text", "text": ""}
            said += self._event(
                "response.reasoning_summary_part.added", **self._place(), summary_index=0, part=empty
            )
        return said

    def _close(self, status: str, broken: bool = False) -> bytes:
        """End the item that grows. status: that of a text. broken: no more is known of it."""
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        item, place, index = self._items[-1], self._place(), len(self._items) - 1
        item["status"] = status
        if kind is ToolCall:
            # A call may be whole in an answer that is cut, and cut in one that is not.
            cut = broken or self._calls in self._cut
            item["status"] = "incomplete" if cut else "completed"
            self._calls += 1
            said = self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
            return said + self._event("response.output_item.done", output_index=index, item=item)
        text = "".join(self._text)
        done = _text_part(Content(text) if kind is Content else Reasoning(text), text)
        item["content"] = [done]
        if kind is Reasoning and self._carries:
            item["encrypted_content"] = carried(text)
        name = "output_text" if kind is Content else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if kind is Content else {}
        said = self._event(f"response.{name}.done", **place, content_index=0, text=text, **extra)
        said += self._event("response.content_part.done", **place, content_index=0, part=done)
        if kind is Reasoning and self._summarizes:
            summary = {"type": "summary_text", "text": text}
            item["summary"] = [summary]
            place["summary_index"] = 0
            said += self._event("response.reasoning_summary_text.done", **place, text=text)
            said += self._event("response.reasoning_summary_part.done", **place, part=summary)
        return said + self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._plan.stream:
            return b""
        said = named_event(kind, sequence_number=self._sequence, **fields)
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


def _text_part(part: Content | Reasoning, text: str) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
