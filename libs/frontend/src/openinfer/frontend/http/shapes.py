"""OpenAI's response shapes: completions and chat, whole and streamed. Pure: choices in, bytes out."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from openinfer.frontend.contract import TokenLogprobs
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.tokenizer import Tokenizer

__all__ = ["DONE_EVENT", "ChatShape", "CompletionShape", "Shape", "error_body", "error_event"]

DONE_EVENT = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails


class _Completion(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Message(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChoice(msgspec.Struct):
    index: int
    message: _Message | UnsetType
    delta: _Message | UnsetType
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class _Response(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[_Completion | _ChatChoice]
    usage: _UsageBody | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Shape(Protocol):
    """How one endpoint words its answers. Taking from a choice empties it."""

    def events(self, choice: Choice) -> bytes:
        """Server-sent events for what the choice has gathered; b"" when that says nothing yet."""

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream with include_usage."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


class CompletionShape:
    """/v1/completions."""

    def __init__(self, model: str, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self._head = (f"cmpl-{uuid.uuid4().hex}", "text_completion", int(time.time()), model)
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._text_offsets: dict[int, int] = {}

    def events(self, choice: Choice) -> bytes:
        if not _has_news(choice, self._plan):
            return b""
        return _event(_Response(*self._head, [self._choice(choice)]))

    def usage_event(self, usage: Usage) -> bytes:
        return _event(_Response(*self._head, [], _usage(usage)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(_Response(*self._head, [self._choice(choice) for choice in choices], _usage(usage)))

    def _choice(self, choice: Choice) -> _Completion:
        text, token_ids, logprobs = choice.take()
        ids: list[int] | UnsetType = UNSET
        prompt: list[int] | UnsetType = UNSET
        if self._plan.return_token_ids:
            ids = token_ids
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                prompt = choice.request.prompt_token_ids
        return _Completion(
            choice.index,
            text,
            self._logprobs(choice.index, token_ids, logprobs) if logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            ids,
            prompt,
        )

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """OpenAI's four parallel lists; offsets are characters from the start of the generated text."""
        tokens, values, tops, offsets = [], [], [], []
        offset = self._text_offsets.get(index, 0)
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            token = _token_text(self._tokenizer, token_id)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            values.append(entry.logprob if entry else None)
            tops.append(self._top(token, entry) if entry else None)
        self._text_offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: str, entry: TokenLogprobs) -> dict[str, float] | None:
        if not self._plan.sampling.logprobs:
            return None
        top = {
            _token_text(self._tokenizer, top_id): value
            for top_id, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(token, entry.logprob)
        return top


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, model: str, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self._head = (f"chatcmpl-{uuid.uuid4().hex}", "chat.completion.chunk", int(time.time()), model)
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def events(self, choice: Choice) -> bytes:
        if not _has_news(choice, self._plan):
            return b""
        first = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            role = _ChatChoice(choice.index, UNSET, _Message("assistant", ""), None, None, None)
            prompt = choice.request.prompt_token_ids if self._plan.return_token_ids else UNSET
            first = _event(_Response(*self._head, [role], prompt_token_ids=prompt))
        text, token_ids, logprobs = choice.take()
        body = self._choice(
            choice, UNSET, _Message(content=text) if text else _Message(), token_ids, logprobs
        )
        return first + _event(_Response(*self._head, [body]))

    def usage_event(self, usage: Usage) -> bytes:
        return _event(_Response(*self._head, [], _usage(usage)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        bodies = []
        for choice in choices:
            text, token_ids, logprobs = choice.take()
            bodies.append(self._choice(choice, _Message("assistant", text), UNSET, token_ids, logprobs))
        prompt = choices[0].request.prompt_token_ids if self._plan.return_token_ids else UNSET
        identity, _, created, model = self._head
        return _encode(_Response(identity, "chat.completion", created, model, bodies, _usage(usage), prompt))

    def _choice(
        self,
        choice: Choice,
        message: _Message | UnsetType,
        delta: _Message | UnsetType,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
    ) -> _ChatChoice:
        return _ChatChoice(
            choice.index,
            message,
            delta,
            self._logprobs(token_ids, logprobs) if logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            token_ids if self._plan.return_token_ids else UNSET,
        )

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs | None]) -> dict[str, Any]:
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            if entry is None:
                continue
            tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            content.append(
                self._token(token_id, entry.logprob)
                | {"top_logprobs": [self._token(top_id, value) for top_id, value in tops]}
            )
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None
        return {"token": _token_text(self._tokenizer, token_id), "logprob": logprob, "bytes": raw}


def error_body(error: APIError) -> bytes:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return _encode({"error": fields})


def error_event(error: APIError) -> bytes:
    """The same as an event of a stream that had begun."""
    return b"data: " + error_body(error) + b"\n\n"


def _has_news(choice: Choice, plan: Plan) -> bool:
    ids = choice.token_ids if plan.return_token_ids else choice.logprobs
    return bool(choice.text or ids) or choice.finish_reason is not None


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"


def _event(response: _Response) -> bytes:
    return b"data: " + _encode(response) + b"\n\n"


def _usage(usage: Usage) -> _UsageBody:
    total = usage.prompt_tokens + usage.completion_tokens
    return _UsageBody(
        usage.prompt_tokens, usage.completion_tokens, total, _PromptDetails(usage.cached_tokens)
    )
