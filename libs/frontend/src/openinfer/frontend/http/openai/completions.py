"""/v1/completions: its body and answers, and what the answers of chats share with them. Choices in, bytes out."""

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from openinfer.frontend.contract import KVTransfer, TokenLogprobs
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.body import REFUSED, CommonBody, Logprobs
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.shapes import encode, error_body
from openinfer.frontend.http.tokenizer import Tokenizer


class CompletionBody(CommonBody, kw_only=True):
    """POST /v1/completions."""

    refused: ClassVar = REFUSED
    prompt: str | list[Any] | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


DONE_EVENT = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    accepted_per_position: list[int] | UnsetType = UNSET


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class _Completion(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[_Completion]
    usage: UsageBody | UnsetType = UNSET
    system_fingerprint: str = ""
    kv_transfer_params: KVTransfer | UnsetType = UNSET


class OpenAIShape:
    """What completions and chats share. response: makes a whole answer or a chunk; prefix: of ids; kind: the `object`.
    mark: the system_fingerprint."""

    def __init__(
        self,
        response: Callable[..., msgspec.Struct],
        prefix: str,
        kind: str,
        plan: Plan,
        tokenizer: Tokenizer | None,
        mark: Callable[[], str],
    ) -> None:
        self._response = response
        self._head = (f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), plan.model)
        self._plan, self._tokenizer, self._mark = plan, tokenizer, mark
        self._names = None if plan.tokens_as_ids else tokenizer
        self._begun: set[int] = set()

    def _chunk(self, bodies: Sequence[msgspec.Struct], **fields: Any) -> msgspec.Struct:
        return self._response(*self._head, bodies, system_fingerprint=self._mark(), **fields)

    def _has_news(self, choice: Choice) -> bool:
        ids = choice.token_ids if self._plan.return_token_ids else choice.logprobs
        return bool(ids) or choice.finish_reason is not None or choice.has_text()

    def _usage_so_far(self, choice: Choice) -> UsageBody | UnsetType:
        return usage_body(Usage([choice], 1)) if self._plan.continuous_usage else UNSET

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None] | UnsetType:
        """vLLM's prompt_logprobs: None for the first token; for the others, by id, its own and the most likely."""
        count = self._plan.prompt_logprobs
        if count is None:
            return UNSET

        def entry(token_id: int, value: float, rank: int | None) -> dict[str, Any]:
            return {"logprob": value, "rank": rank, "decoded_token": token_text(self._names, token_id)}

        found: list[dict[str, Any] | None] = [None]
        for token_id, score in zip(choice.request.prompt_token_ids[1:], choice.prompt_logprobs, strict=True):
            of_token = {str(token_id): entry(token_id, score.logprob, score.rank)}
            tops = zip(score.top_token_ids[:count], score.top_logprobs[:count], strict=True)
            for rank, (top_id, value) in enumerate(tops, start=1):
                of_token.setdefault(str(top_id), entry(top_id, value, rank))
            found.append(of_token)
        return found

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        last = event(self._chunk([], usage=usage_body(usage))) if self._plan.include_usage else b""
        return last + DONE_EVENT

    def broken(self, error: APIError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE_EVENT


class CompletionShape(OpenAIShape):
    """/v1/completions. echoes: the text of each prompt, where the plan echoes."""

    def __init__(
        self, plan: Plan, tokenizer: Tokenizer | None, echoes: Sequence[str], mark: Callable[[], str]
    ) -> None:
        super().__init__(CompletionResponse, "cmpl", "text_completion", plan, tokenizer, mark)
        self._echoes = echoes
        self._offsets: dict[int, _Offsets] = {}

    def events(self, choice: Choice) -> bytes:
        if not self._has_news(choice):
            return b""
        return event(self._chunk([self._choice(choice)], usage=self._usage_so_far(choice)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        bodies = [self._choice(choice) for choice in choices]
        left = choices[0].kv_transfer or UNSET
        return encode(self._chunk(bodies, usage=usage_body(usage), kv_transfer_params=left))

    def _choice(self, choice: Choice) -> _Completion:
        text, token_ids, logprobs = choice.take()
        ids = token_ids if self._plan.return_token_ids else UNSET
        prompt, scores = choice.request.prompt_token_ids, choice.prompt_logprobs
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        if is_first:
            self._offsets[choice.index] = _Offsets(self._tokenizer, self._plan.skip_special_tokens)
        if is_first and self._plan.echo:
            echo = self._echoes[choice.index // self._plan.n]
            self._offsets[choice.index].echo(prompt, echo)
            text = echo + text
            token_ids = prompt + token_ids
            if self._plan.sampling.logprobs is not None:
                logprobs = [None, *scores, *logprobs]
        return _Completion(
            choice.index,
            text,
            self._logprobs(choice.index, token_ids, logprobs) if logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            ids,
            prompt if is_first and self._plan.return_token_ids else UNSET,
            self._prompt_logprobs(choice),
        )

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """OpenAI's four parallel lists; offsets are characters from the start of the text."""
        tokens, values, tops = [], [], []
        offsets = self._offsets[index].take(token_ids)
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            token = token_text(self._names, token_id)
            tokens.append(token)
            values.append(entry.logprob if entry else None)
            tops.append(self._top(token, entry) if entry else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: str, entry: TokenLogprobs) -> dict[str, float] | None:
        count = self._plan.sampling.logprobs
        if not count:
            return None
        top = likeliest(entry, count, partial(token_text, self._names))
        top.setdefault(token, entry.logprob)
        return top


class _Offsets:
    """Where each token begins in the text of a choice; a token within a character begins where that one does."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens) if tokenizer else None
        self._offset = 0
        self._known: list[int] = []

    def echo(self, prompt: Sequence[int], text: str) -> None:
        """The text begins with the prompt. Special tokens that the server put before it are not in `text`."""
        assert self._tokenizer is not None
        detokenizer, offset = self._tokenizer.detokenizer(False), 0
        for token_id in prompt:
            self._known.append(offset)
            offset += len(detokenizer.push((token_id,)))
        before = offset + len(detokenizer.flush()) - len(text)
        self._known = [max(0, offset - before) for offset in self._known]
        self._offset = len(text)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        found, self._known = self._known, []
        for token_id in token_ids[len(found) :]:
            found.append(self._offset)
            text = self._detokenizer.push((token_id,)) if self._detokenizer else token_text(None, token_id)
            self._offset += len(text)
        return found


def likeliest(entry: TokenLogprobs, count: int, text: Callable[[int], str]) -> dict[str, float]:
    """The `count` likeliest tokens by their text; of two tokens with one text the likelier."""
    found: dict[str, float] = {}
    for token_id, value in zip(entry.top_token_ids[:count], entry.top_logprobs[:count], strict=True):
        found.setdefault(text(token_id), value)
    return found


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"


def event(response: msgspec.Struct) -> bytes:
    return b"data: " + encode(response) + b"\n\n"


def usage_body(usage: Usage) -> UsageBody:
    details = CompletionDetails(usage.reasoning_tokens)
    if (drafts := usage.drafts) is not None:  # in OpenAI's fields for predictions, and by position in a step
        details.accepted_prediction_tokens = sum(drafts.accepted)
        details.rejected_prediction_tokens = drafts.tokens - sum(drafts.accepted)
        details.accepted_per_position = drafts.accepted
    prompt, output = usage.prompt_tokens, usage.completion_tokens
    return UsageBody(prompt, output, prompt + output, PromptDetails(usage.cached_tokens), details)
