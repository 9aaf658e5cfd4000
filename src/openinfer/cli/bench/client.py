"""A load generator for an OpenAI server: streamed completions over plain asyncio, with a time stamp for every chunk.

It asks for standard fields only, and for `ignore_eos`, which fixes the length of answers. It has the definitions of the
commonest client, `vllm bench serve`, so that figures compare:

- TTFT is the time to the first chunk that carries choices.
- ITL are the gaps between such chunks.
- TPOT is (last - first) / (output tokens - 1).
- Token counts are those of the usage chunk.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from openinfer.frontend.errors import FlagError


@dataclass(slots=True)
class StreamedAnswer:
    """One request, seen by the client; times are time.perf_counter() seconds. `error` says why it does not count."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first chunk."""
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 where there is only one."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last chunk with tokens."""
        return self.last - self.sent


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Connection(asyncio.Protocol):
    """One kept HTTP/1.1 connection; reads a streamed answer into an Answer, a chunk at a time."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._answer: StreamedAnswer | None = None
        self._raw = b""  # received and not yet read
        self._line = b""  # the beginning of a line of the body
        self._status = 0
        self._left = -1  # bytes of the body still to come; -1: it comes in chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = transport, True  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(f"the connection was lost: {exc}" if exc else "the server closed the connection")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def request(self, message: bytes, answer: StreamedAnswer) -> None:
        """Send and wait for the end of the answer. Errors end up in the answer."""
        assert self._transport is not None
        self._answer, self._raw, self._line, self._status, self._left = answer, b"", b"", 0, -1
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._done

    def _end(self, error: str = "") -> None:
        if self._done is not None and not self._done.done():
            assert self._answer is not None
            self._answer.error = self._answer.error or error
            self._done.set_result(None)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._raw += data
        try:
            if not self._status and not self._head():
                return
            if self._left < 0:
                self._chunks(now)
            else:
                self._left -= len(self._raw)
                self._body(self._raw, now)
                self._raw = b""
                if self._left <= 0:
                    self._finish(now)
        except (ValueError, msgspec.DecodeError) as error:
            self._end(f"the answer cannot be read: {error}")
            self.close()

    def _head(self) -> bool:
        head, found, body = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        self._raw = body
        status, *lines = head.split(b"\r\n")
        self._status = int(status.split()[1])
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines)}
        if b"content-length" in headers:
            self._left = int(headers[b"content-length"])
        return True

    def _chunks(self, now: float) -> None:
        raw, at = self._raw, 0
        while (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            if len(raw) < end + size + 4:
                break
            if size == 0:
                self._finish(now)
                return
            self._body(raw[end + 2 : end + 2 + size], now)
            at = end + size + 4
        self._raw = raw[at:]

    def _body(self, data: bytes, now: float) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        if self._status != 200:
            return
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                self._event(_decode(line[5:]), now)

    def _event(self, chunk: _Chunk, now: float) -> None:
        answer = self._answer
        assert answer is not None
        if chunk.error is not None:
            answer.error = f"the server said: {chunk.error}"
        if chunk.choices:
            if answer.first:
                answer.gaps.append(now - answer.last)
            else:
                answer.first = now
            answer.last = now
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.output_tokens = chunk.usage.completion_tokens

    def _finish(self, now: float) -> None:
        answer = self._answer
        assert answer is not None
        if self._status == 200 and self._line.startswith(b"{"):  # not streamed
            self._event(_decode(self._line), now)
        if self._status != 200:
            self._end(f"HTTP status {self._status}: {self._line.decode(errors='replace')[:200]}")
        elif not answer.first:
            self._end("an answer without tokens")
        elif not answer.output_tokens:
            self._end("an answer without usage")
        else:
            self._end()


class Client:
    """Sends completions to one server, keeping connections. For one event loop at a time."""

    def __init__(self, base_url: str, model: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise FlagError(f"{base_url!r} is not http://HOST[:PORT]")
        self._host, self._port = parts.hostname, parts.port or 80
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._idle: list[_Connection] = []

    def message(self, prompt: list[int] | str, max_tokens: int, *, stream: bool = True) -> bytes:
        """The whole HTTP request for a greedy completion of exactly max_tokens tokens."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = msgspec.json.encode({**asked, "temperature": 0.0, "ignore_eos": True, **streamed})
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\n{self._authorization}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def complete(self, message: bytes, due: float) -> StreamedAnswer:
        """Send one message and read its answer."""
        answer = StreamedAnswer(due, sent=time.perf_counter())
        connection = None
        while self._idle and (connection is None or not connection.open):
            connection = self._idle.pop()
        if connection is None or not connection.open:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
            except OSError as error:
                answer.error = f"no connection: {error.strerror or error}"
                return answer
        await connection.request(message, answer)
        if connection.open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Seconds after the start at which requests are sent; all 0 for an infinite rate.

    A Poisson process, stretched so that the last request is sent at (count - 1) / rate."""
    if rate == float("inf") or count < 2:
        return [0.0] * count
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.expovariate(rate))
    stretch = (count - 1) / rate / times[-1]
    return [t * stretch for t in times]


@dataclass(slots=True)
class LoadRun:
    """The answers to one load, the seconds from its start to the last answer, and the client's own CPU seconds."""

    answers: list[StreamedAnswer]
    seconds: float
    cpu_seconds: float


async def run_load(
    client: Client,
    messages: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadRun:
    """Send each message at its time (seconds after the start), at most max_concurrency at once (0: no limit; a
    request that waits for its turn is sent, and timed from, then). progress: called after each answer."""
    turns = asyncio.Semaphore(max_concurrency or len(messages))
    answers: list[StreamedAnswer] = []

    async def one(message: bytes, due: float) -> None:
        async with turns:
            sent = time.perf_counter() if max_concurrency else due
            answers.append(await client.complete(message, sent))
            progress(len(answers), len(messages))

    gc.collect()
    gc.disable()
    try:
        start, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for message, at in zip(messages, times, strict=True):
                wait = start + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(one(message, start + at))
        return LoadRun(answers, time.perf_counter() - start, time.process_time() - cpu)
    finally:
        gc.enable()
