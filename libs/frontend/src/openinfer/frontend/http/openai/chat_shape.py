"""Answers of /v1/chat/completions in OpenAI's form. Pure: choices in, bytes out."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from openinfer.frontend.chat import Arguments, Content, Part, Reasoning, ToolCall
from openinfer.frontend.contract import KVTransfer
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.openai.completions import (
    OpenAIShape,
    UsageBody,
    event,
    token_text,
    usage_body,
)
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.shapes import encode, fingerprint
from openinfer.frontend.http.text.reader import TextPiece, new_call_id, pieces, said, take_piece
from openinfer.frontend.http.tokenizer import Tokenizer


class _Function(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class _Call(msgspec.Struct, omit_defaults=True):
    function: _Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class _Message(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class _Choice(msgspec.Struct):
    index: int
    message: _Message | UnsetType = UNSET
    delta: _Message | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    """A whole answer, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[_Choice]
    usage: UsageBody | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    system_fingerprint: str = ""
    kv_transfer_params: KVTransfer | UnsetType = UNSET


class ChatShape(OpenAIShape):
    """A Shape. show_reasoning: send the thoughts."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer | None,
        show_reasoning: bool = True,
        mark: Callable[[], str] = fingerprint,
    ) -> None:
        kind = "chat.completion.chunk" if plan.stream else "chat.completion"
        super().__init__(ChatResponse, "chatcmpl", kind, plan, tokenizer, mark)
        self._show_reasoning = show_reasoning
        self._calls: dict[int, int] = {}

    def events(self, choice: Choice) -> bytes:
        if not self._has_news(choice):
            return b""
        chunks = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            role = _Choice(choice.index, delta=_Message("assistant", "", refusal=None))
            prompt = choice.request.prompt_token_ids if self._plan.return_token_ids else UNSET
            chunks = event(self._chunk([role], prompt_token_ids=prompt))
        for piece in pieces(choice, self._tokenizer, self._plan.skip_special_tokens):
            delta = self._message(choice.index, piece.parts)
            shown = piece.parts or piece.logprobs or self._plan.return_token_ids or choice.finish_reason
            if shown:  # or all of it is held back until it is clear what it becomes
                body = self._choice(choice, UNSET, delta, piece)
                chunks += event(self._chunk([body], usage=self._usage_so_far(choice)))
        return chunks

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        bodies = []
        for choice in choices:
            piece = take_piece(choice, self._tokenizer)
            message = self._message(choice.index, piece.parts)
            message.role, message.refusal = "assistant", None
            if message.content is UNSET:
                message.content = "" if message.tool_calls is UNSET else None
            for call in message.tool_calls or ():
                call.index = UNSET
            bodies.append(self._choice(choice, message, UNSET, piece))
        first = choices[0]
        answer = self._chunk(
            bodies,
            usage=usage_body(usage),
            prompt_token_ids=first.request.prompt_token_ids if self._plan.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(first),
            kv_transfer_params=first.kv_transfer or UNSET,
        )
        return encode(answer)

    def _message(self, index: int, parts: list[Part]) -> _Message:
        if not parts:
            return _Message()
        message = _Message(content=said(parts, Content) or UNSET)
        if self._show_reasoning:
            # Under one name, because clients that know reasoning_content too show the thoughts twice.
            message.reasoning = said(parts, Reasoning) or UNSET
        calls: list[_Call] = []
        for part in parts:
            if isinstance(part, ToolCall):
                place = self._calls.get(index, 0)
                self._calls[index] = place + 1
                identity = part.id or new_call_id()
                calls.append(_Call(_Function(part.arguments, part.name), identity, "function", place))
            elif isinstance(part, Arguments) and calls:
                calls[-1].function.arguments += part.text
            elif isinstance(part, Arguments):  # of a call that was begun before
                calls.append(_Call(_Function(part.text), index=self._calls[index] - 1))
        message.tool_calls = calls or UNSET
        return message

    def _choice(
        self, choice: Choice, message: _Message | UnsetType, delta: _Message | UnsetType, piece: TextPiece
    ) -> _Choice:
        reason = choice.finish_reason if piece.last else None
        if reason == "stop" and choice.index in self._calls:
            reason = "tool_calls"
        return _Choice(
            choice.index,
            message,
            delta,
            self._logprobs(piece) if piece.logprobs else None,
            reason,
            choice.stop_reason if piece.last else None,
            piece.token_ids if self._plan.return_token_ids else UNSET,
        )

    def _logprobs(self, piece: TextPiece) -> dict[str, Any]:
        content = []
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            if entry is None:
                continue
            tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            content.append(
                self._token(token_id, entry.logprob)
                | {"top_logprobs": [self._token(top_id, value) for top_id, value in tops]}
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None
        return {"token": token_text(self._names, token_id), "logprob": logprob, "bytes": raw}
