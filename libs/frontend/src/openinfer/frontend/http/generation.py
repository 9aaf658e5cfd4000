"""One HTTP request at work: its choices, fed by the engine, read by the response.

All code here runs in the event loop's thread. The engine side (Choice.push) looks for stop strings at once, so that
they end the sequence even without a reader. The response side takes all that has gathered at once, so that a slow
reader gets fewer, larger pieces. An answer that is not streamed is only woken at its end.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from openinfer.frontend.chat import Content
from openinfer.frontend.client import EngineClient, OutputDelta
from openinfer.frontend.contract import Drafts, Failed, Finished, KVTransfer, Rejected, Request, TokenLogprobs
from openinfer.frontend.errors import APIError, EngineDeadError
from openinfer.frontend.http.admin.metrics import Metrics
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.text.detokenizer import ContentStops, Detokenizer
from openinfer.frontend.http.tokenizer import Tokenizer

_STATUS = {"queue_full": 503, "engine": 500}
_CODE = {"too_long": "context_length_exceeded", "grammar": "invalid_grammar", "engine": "engine_error"}
RETRY_AFTER_S = 1
DECODE_AT_LEAST = 256


class Choice:
    """One sequence of a request: the output of the engine that has not been taken yet.

    The response takes text, token_ids and logprobs (parallel to token_ids, if asked for). It reads finish_reason,
    stop_reason (the stop string, or the id among stop_token_ids), error, num_tokens and cached_tokens. It also reads
    prompt_logprobs (of prompt_token_ids[1:], if asked for), which are complete with the first token. The reader of the
    text has the attributes from `parser` to `thoughts_over`, and sets reasoning_tokens, the number of tokens that were
    thoughts. `drafts` and `kv_transfer` come with the engine's terminal, so a choice that a stop string ended has none.
    Where stop strings are looked for in the content of an answer that has other parts, `read` has the parts, and there
    is no text to take.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        plan: Plan,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        wake: Callable[[], None],
        abort: Callable[[int], None],
    ) -> None:
        self.index = index
        self.request = request
        self._plan = plan
        self._detokenizer = tokenizer.detokenizer(plan.skip_special_tokens) if tokenizer else None
        self.parser = plan.new_parser() if plan.new_parser else None
        self.read = ContentStops(self.parser, plan.stop, plan.include_stop) if plan.stop else None
        self.widths: Detokenizer | None = None  # how much of the text is a token's
        self.read_tokens = 0
        self.thoughts_over = False
        self._metrics = metrics
        self._wake = wake
        self._abort = abort
        self._scheduled_time = self._first_time = self._last_time = 0.0
        self._text: list[str] = []
        self._undecoded: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Rejected | Failed | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.drafts: Drafts | None = None
        self.kv_transfer: KVTransfer | None = None
        self.reasoning_tokens = 0
        self.started = False

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def push(self, delta: OutputDelta) -> None:
        """The sink of the request."""
        if self.done:  # a stop string matched, or it was cancelled: what overshot is dropped
            return
        if self._plan.more_stop_ids:
            delta = self._stopped(delta)
        self.started = True
        if delta.scheduled is not None:
            self.cached_tokens = delta.scheduled.cached_tokens
            self._scheduled_time = delta.scheduled.time
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.token_ids:
            self._observe_tokens()
            if not self._plan.only_echo:
                self._take_tokens(delta)
        terminal = delta.terminal
        if terminal is not None and not self.done:
            if isinstance(terminal, Finished):
                self._finish(terminal)
            else:
                self.error = terminal
                self._metrics.rejected(terminal, self.request, self.num_tokens, self._times)
        if self._plan.stream or self.done:
            self._wake()

    def has_text(self) -> bool:
        """Whether take() would give text."""
        self._decode()
        return bool(self._text) or (self.read is not None and bool(self.read.parts))

    def take(self) -> tuple[str, list[int], list[TokenLogprobs | None]]:
        """text, token_ids and logprobs since the last call; they are the caller's now."""
        self._decode()
        if self.read is not None and self.parser is None:
            self._text = [part.text for part in self.read.parts if isinstance(part, Content)]
            self.read.parts.clear()
        taken = "".join(self._text), self.token_ids, self.logprobs
        self._text, self.token_ids, self.logprobs = [], [], []
        return taken

    def cancel(self, error: Failed) -> None:
        """End the choice from our side: abort it in the engine, and drop all later messages about it."""
        if not self.done:
            self.error = error
            self._abort(self.request.id)
            self._metrics.ended(self.request, "abort", self.num_tokens, self._times)
            self._wake()

    def _stopped(self, delta: OutputDelta) -> OutputDelta:
        """The delta as if the engine knew all stop ids."""
        first = max(self.request.sampling.min_tokens - self.num_tokens, 0)
        for position in range(first, len(delta.token_ids)):
            token_id = delta.token_ids[position]
            if token_id in self._plan.more_stop_ids:
                self._abort(self.request.id)
                return OutputDelta(
                    delta.token_ids[: position + 1],
                    delta.logprobs and delta.logprobs[: position + 1],
                    delta.prompt_logprobs,
                    delta.scheduled,
                    Finished(self.request.id, "stop", token_id),
                )
        return delta

    def _take_tokens(self, delta: OutputDelta) -> None:
        ids = delta.token_ids
        if self.request.sampling.logprobs is not None:
            self.logprobs.extend(delta.logprobs or [None] * len(ids))
        self.token_ids.extend(ids)
        self.num_tokens += len(ids)
        if self._detokenizer is None:
            return
        ending = delta.terminal.stop_token_id if isinstance(delta.terminal, Finished) else None
        if ids[-1] == ending and not self._plan.include_stop:
            ids = ids[:-1]
        if self.read is None:
            self._undecoded += ids
            if len(self._undecoded) >= DECODE_AT_LEAST:  # all of it at the end would hold up other requests
                self._decode()
            return
        before = self.num_tokens - len(delta.token_ids)
        for position, token_id in enumerate(ids):
            text = self._text_of((token_id,))
            watched = before + position >= self.request.sampling.min_tokens
            if text and self._matches(text, watched=watched):
                beyond = len(delta.token_ids) - position - 1  # tokens behind the stop string
                del self.token_ids[len(self.token_ids) - beyond :]
                del self.logprobs[max(len(self.logprobs) - beyond, 0) :]
                self.num_tokens -= beyond
                self._abort(self.request.id)
                self._observe_end()
                return

    def _decode(self) -> None:
        if self._undecoded:
            undecoded, self._undecoded = self._undecoded, []
            self._say(self._text_of(undecoded))

    def _text_of(self, token_ids: Sequence[int] | None) -> str:
        """What these tokens add to the text; None: what was held back. Where the tokenizer fails the choice ends."""
        assert self._detokenizer is not None
        try:
            return self._detokenizer.flush() if token_ids is None else self._detokenizer.push(token_ids)
        except APIError as error:
            self.cancel(Failed(self.request.id, str(error)))
            return ""

    def _say(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _matches(self, text: str, *, watched: bool = True, last: bool = False) -> bool:
        if self.read is None:
            self._say(text)
            return False
        matched = self.read.push(text, watched=watched)
        if last and matched is None:
            matched = self.read.flush()
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _finish(self, terminal: Finished) -> None:
        self.drafts, self.kv_transfer = terminal.drafts, terminal.kv_transfer
        if self._detokenizer is not None:
            self._decode()
            self._matches(self._text_of(None), last=True)
            if self.error is not None:
                return
        if self.finish_reason is None:
            self.finish_reason = terminal.reason
            if terminal.stop_token_id in (*self.request.sampling.stop_token_ids, *self._plan.more_stop_ids):
                self.stop_reason = terminal.stop_token_id
        self._observe_end()

    def _observe_tokens(self) -> None:
        now = time.monotonic()
        if self._last_time:
            self._metrics.inter_token_latency.observe(now - self._last_time)
        else:
            self._first_time = now
            self._metrics.time_to_first_token.observe(now - self.request.arrival)
        self._last_time = now

    def _observe_end(self) -> None:
        reason = self.finish_reason or "abort"
        self._metrics.finished(self.request, reason, self.num_tokens, self._times, self.cached_tokens)

    @property
    def _times(self) -> tuple[float, float, float]:
        return self._scheduled_time, self._first_time, self._last_time


class Usage:
    """Token counts of a request so far."""

    def __init__(self, choices: Sequence[Choice], n: int) -> None:
        first_of_prompt = choices[::n]
        self.prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in first_of_prompt)
        self.cached_tokens = sum(choice.cached_tokens for choice in first_of_prompt)
        self.completion_tokens = sum(choice.num_tokens for choice in choices)
        self._choices = choices

    @property
    def reasoning_tokens(self) -> int:
        """The number of completion_tokens that are reasoning; complete once the text of the choices has been read."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    @property
    def drafts(self) -> Drafts | None:
        """The sum of the choices' drafts; None where no choice had any."""
        parts = [choice.drafts for choice in self._choices if choice.drafts is not None]
        if not parts:
            return None
        accepted = itertools.zip_longest(*(part.accepted for part in parts), fillvalue=0)
        steps, tokens = sum(part.steps for part in parts), sum(part.tokens for part in parts)
        return Drafts(steps, tokens, [sum(counts) for counts in accepted])


class Generation:
    """The choices of one HTTP request: n for each prompt, numbered prompt by prompt. tokenizer: None for token ids
    only. prompts, max_tokens: parallel."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        plan: Plan,
        prompts: Sequence[list[int]],
        max_tokens: Sequence[int],
        arrival: float,
        trace_parent: str | None,
    ) -> None:
        self.plan = plan
        self._client, self._metrics = client, metrics
        self._signal = asyncio.Event()
        self.choices: list[Choice] = []
        for prompt, limit in zip(prompts, max_tokens, strict=True):
            for index in range(plan.n):
                request = Request(
                    id=client.new_id(),
                    prompt_token_ids=prompt,
                    sampling=plan.sampling_of(index),
                    max_tokens=limit,
                    arrival=arrival,
                    priority=plan.priority,
                    tenant=plan.tenant,
                    cache_salt=plan.cache_salt,
                    trace_parent=trace_parent,
                    grammar=plan.grammar,
                    adapter=plan.adapter,
                    prompt_logprobs=plan.wanted_of_prompt,
                    kv_transfer=plan.kv_transfer,
                    disable_spec_decode=plan.disable_spec_decode,
                )
                index_of_all = len(self.choices)
                self.choices.append(
                    Choice(index_of_all, request, plan, tokenizer, metrics, self._signal.set, client.abort)
                )

    def submit(self) -> None:
        """Hand all sequences to the engine. Raises APIError (503) when it is dead."""
        try:
            for choice in self.choices:
                self._client.submit(choice.request, choice.push)
        except EngineDeadError as error:
            raise APIError(f"the engine is not running: {error}", status=503, code="engine_dead") from error

    async def changed(self) -> None:
        """Wait for news since the last call."""
        await self._signal.wait()
        self._signal.clear()

    @property
    def done(self) -> bool:
        """No choice will change any more."""
        return all(choice.done for choice in self.choices)

    @property
    def started(self) -> bool:
        """The engine has said something about a sequence."""
        return any(choice.started or choice.done for choice in self.choices)

    def usage(self) -> Usage:
        return Usage(self.choices, self.plan.n)

    def error(self) -> APIError | None:
        """The first choice's error, in the form for the client."""
        error = next((choice.error for choice in self.choices if choice.error is not None), None)
        if error is None:
            return None
        return APIError(
            error.reason if isinstance(error, Rejected) else error.message,
            status=_STATUS.get(error.code, 400),
            code=_CODE.get(error.code, error.code),
            param=self.plan.grammar_field if error.code == "grammar" else None,
        )

    def ended(self) -> None:
        """The answer is out, or given up."""
        self.cancel("the request was given up")  # nothing, when all has ended
        self._metrics.longest.observe(max(choice.num_tokens for choice in self.choices))

    def cancel(self, message: str) -> None:
        """Abort what still runs: the client has left, or the server stops."""
        for choice in self.choices:
            choice.cancel(Failed(choice.request.id, message))
