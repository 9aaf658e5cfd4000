"""Sending the output of a Generation, whole or as server-sent events, and ending it when the client leaves."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.generation import RETRY_AFTER_S, Generation
from openinfer.frontend.http.shapes import AnswerShape, error_body

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNING_CHARS = 300
HEAD_AFTER_S = 0.25
"""The longest time that a stream's head waits for the engine's first message, which may be a refusal with a status."""


@dataclasses.dataclass(eq=False)
class GenerationResponse(Response):
    """Submits the generation and sends its outcome. The status waits for the engine's first message about it, that of a
    stream at most HEAD_AFTER_S. active: the set the generation is in while it runs. log: called at the end with a word
    about the outcome."""

    generation: Generation
    shape: AnswerShape
    active: set[Generation]
    log: Callable[[Generation, str], None] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        self.active.add(generation)
        watcher = asyncio.create_task(self._cancel_on_disconnect(receive))
        outcome = "ok"
        try:
            generation.submit()
            await (self._stream(send) if generation.plan.stream else self._whole(send))
        except APIError as error:
            outcome = str(error)
            raise  # the application answers
        finally:
            watcher.cancel()
            generation.ended()
            self.active.discard(generation)
            if self.log is not None:
                self.log(generation, outcome)

    async def _whole(self, send: Send) -> None:
        generation = self.generation
        while not generation.done and generation.error() is None:
            await generation.changed()
        if error := generation.error():
            raise error
        body = self.shape.whole(generation.choices, generation.usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += _warnings(generation.plan.warnings)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        generation, shape = self.generation, self.shape
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_AFTER_S):
                while not generation.started:
                    await generation.changed()
        if error := generation.error():
            raise error
        told = generation.choices
        headers = [*_STREAM_HEADERS, *_warnings(generation.plan.warnings)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            error, events = None, b""
            try:
                events = b"".join([shape.events(choice) for choice in told])
            except APIError as failure:  # the tokenizer's, over what the model said
                generation.cancel(str(failure))
                error = failure
            told = [choice for choice in told if not choice.done]  # an end is told once
            error = error or generation.error()
            if error is not None or generation.done:
                end = shape.broken(error) if error else shape.end(generation.choices, generation.usage())
                await send({"type": "http.response.body", "body": events + end})
                return
            if events:
                # Waits while the client's socket is full; tokens gather meanwhile and leave as one event.
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await generation.changed()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.cancel("the client has left")


def _warnings(warnings: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """One header `Warning: 299 openinfer "..."` a text, in printable ASCII."""
    texts = (re.sub(r'[^ -~]|["\\]', "'", text[:MAX_WARNING_CHARS]) for text in warnings)
    return [(b"warning", f'299 openinfer "{text}"'.encode()) for text in texts]


def error_response(error: APIError, body: bytes | None = None) -> Response:
    """A refusal, with OpenAI's error object unless another body is given; 503 says when to come back."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else None
    return Response(body or error_body(error), error.status, headers, "application/json")
