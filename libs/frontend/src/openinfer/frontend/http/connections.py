"""Bounds on the cost of a connection: the bytes it may send, the time of a head, the slowness of a reader."""

import asyncio
import os
import socket
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from openinfer.frontend.http.framing import ABSOLUTE, Framing, Violation

HEAD_TIMEOUT_S = 20.0
"""The longest time from the connection, or from the answer before, to the end of the head."""
READ_TIMEOUT_S = 120.0
"""The longest time that a client with a full socket may take no byte."""
MAX_PIPELINED = 16
"""Requests of a connection that have no answer yet."""
SWEEP_S = 2.0
LINGER_S = 5.0
LINGER_BYTES = 32 << 20
"""The time that a client has to read a refusal, while the rest of its request is thrown away, and the most of that."""
SPARE_BYTES = 1 << 20
"""The most that is read of a body whose answer is complete, so that the connection can serve the next request."""
LOOK_S = (0.01, 0.1, 1.0)
"""Seconds between looks at a client that has closed its sending half; the last counts from then on."""


def http_protocol() -> Any:
    """The protocol class of uvicorn: httptools where [fast] is installed, else h11; both behind `Framing`."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return _strict(H11Protocol)
    return _strict(_without_upgrades(HttpToolsProtocol))


def parser_name(protocol: Any) -> str:
    """Which parser a protocol of http_protocol() has."""
    return "h11" if any(base.__name__ == "H11Protocol" for base in protocol.__mro__) else "httptools"


def _strict(parser: Any) -> Any:
    """A uvicorn protocol that sees only bytes which `Framing` has passed."""

    class Strict(parser):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._framing = Framing()
            self._answered = self._thrown_away = self._whole = self._spared = 0
            self._refused = self._half_closed = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                self._thrown_away += len(data)
                if self._thrown_away > LINGER_BYTES:
                    self.transport.abort()
                return
            before = self._framing.heads
            sound, violation = self._framing.feed(data)
            if violation is None and self._framing.heads - self._answered > MAX_PIPELINED:
                violation = Violation(f"More than {MAX_PIPELINED} requests wait for their answers.")
                sound, self._framing.heads = 0, before
            if self._framing.in_head or self._framing.heads > self._answered:
                self._spared = 0
            else:
                self._spared += sound
            if sound:
                super().data_received(data if sound == len(data) else data[:sound])
            if violation is not None and not (self._refused or self.transport.is_closing()):
                self._refuse(str(violation), self._framing.heads - (not self._framing.in_head))
            elif self._spared > SPARE_BYTES:
                self._linger()

        def on_response_complete(self) -> None:
            self._answered += 1
            early = self.cycle.more_body and self.cycle.response_complete
            is_last = self._answered >= self._whole
            if (early and self._framing.body_left > SPARE_BYTES) or (self._refused and is_last):
                self._linger()
            elif self._half_closed and is_last:
                self.transport.close()
            else:
                super().on_response_complete()

        def send_400_response(self, message: str) -> None:
            """The parser refuses what `Framing` has passed."""
            waits = self.cycle is not None and not self.cycle.response_complete
            queued = len(self._queued()) + 1 - self.cycle.more_body if waits else 0
            self._refuse(message, self._answered + queued)

        def _refuse(self, message: str, whole: int) -> None:
            """Nothing more is read. Answers to the first `whole` requests are sent to their end before."""
            self._refused, self._whole = True, whole
            cycle = self.cycle
            if cycle is not None and cycle.more_body and self._queued():
                self._queued().popleft()
            elif self._answered < whole:
                return
            elif cycle is not None and cycle.response_started and not cycle.response_complete:
                self.transport.close()
            else:
                head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                length = b"content-length: %d\r\n\r\n" % len(message)
                self.transport.write(head + length + message.encode())
                if cycle is not None:  # the application reads its body, and may not answer any more
                    cycle.disconnected = True
                    cycle.message_event.set()
                self._linger()

        def _queued(self) -> Any:
            """Pipelined requests of httptools, the newest first; h11 keeps them itself."""
            return getattr(self, "pipeline", ())

        def _linger(self) -> None:
            """Close once the client has closed too, or soon: a reset would lose the answer on its way."""
            self._refused = True
            self._unset_keepalive_if_required()
            if self.transport.is_closing():
                return
            if not self.transport.can_write_eof():  # TLS
                self.transport.close()
                return
            self.flow.resume_reading()
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)

        def eof_received(self) -> bool:
            """A client that has closed its sending half gets its answers. One that has left looks the same, so look."""
            if not self._refused:
                self._whole = self._framing.heads - (not self._framing.in_head)
            waiting = self._whole - self._answered
            if waiting < 1 or self.cycle is None or self.scheme == "https":
                return False
            if waiting == 1 and self.cycle.response_started:
                return False
            self._half_closed = True
            self._look(0)
            return True

        def _look(self, times: int) -> None:
            """Send an urgent byte, which no reader gets: the host of a client that has left answers it with a reset. An
            answer under way finds out by itself."""
            if self.transport.is_closing() or self.cycle.response_started:
                return
            try:
                with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as raw:
                    raw.send(b"")  # fails after a reset
                    if times % len(LOOK_S) == 0 or times > len(LOOK_S):
                        raw.send(b"\n", socket.MSG_OOB)
            except OSError:
                self.transport.abort()
                return
            self.loop.call_later(LOOK_S[min(times, len(LOOK_S) - 1)], self._look, times + 1)

    return Strict


def in_origin_form(app: ASGIApp) -> ASGIApp:
    """For h11, which takes a target such as http://host/path for a path."""

    async def with_a_path(scope: Scope, receive: Receive, send: Send) -> None:
        if absolute := ABSOLUTE.match(scope["raw_path"]):
            scope["raw_path"] = scope["raw_path"][absolute.start(2) :]
            scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        await app(scope, receive, send)

    return with_a_path


def _without_upgrades(parser: Any) -> Any:
    """httptools takes what follows an Upgrade for another protocol, and a request's body would be lost. No upgrade is
    offered here, so that the request is read again without the wish."""
    import httptools

    class Plain(parser):  # type: ignore[misc]
        parser: Any
        _wished = False

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            try:
                while data:
                    data = self._feed(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")

        def _feed(self, data: bytes) -> bytes:
            """The rest of the data, which another parser must read."""
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("no tunnels") from None
                head = _head_without_upgrade(method, self.url, self.headers)
                self.parser, self._wished = httptools.HttpRequestParser(self), False
                return head + data[upgrade.args[0] :]
            return b""

        def on_headers_complete(self) -> None:
            self._wished = bool(self.parser.should_upgrade())
            if not self._wished:
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self._wished:
                super().on_message_complete()

    return Plain


def _head_without_upgrade(method: bytes, url: bytes, headers: Collection[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method, url)]
    for name, value in headers:
        if name == b"connection":
            tokens = {token.strip().lower() for token in value.split(b",")} & {b"close", b"keep-alive"}
            lines += [b"connection: %b" % token for token in tokens]
        elif name not in (b"upgrade", b"http2-settings"):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


async def close_stalled(connections: Collection[Any]) -> None:
    """Close connections (uvicorn's) that take too long over a head, or nothing of an answer; until cancelled."""
    since: dict[Any, tuple[object, float]] = {}
    while True:
        await asyncio.sleep(SWEEP_S)
        now = time.monotonic()
        stalled: dict[Any, tuple[object, float]] = {}
        for connection in list(connections):
            cycle, transport = connection.cycle, connection.transport
            in_head = cycle is None or cycle.response_complete
            if not in_head and not connection.flow.write_paused:
                continue
            state = cycle if in_head else transport.get_write_buffer_size()
            before, began = since.get(connection, (None, now))
            stalled[connection] = (state, began if before == state else now)
            limit = HEAD_TIMEOUT_S if in_head else READ_TIMEOUT_S
            if now - stalled[connection][1] > limit:
                transport.abort()  # close() would wait for the reader
        since = stalled
