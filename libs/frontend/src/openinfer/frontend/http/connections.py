"""Bounds on what a connection may cost: how large the head of a request, how long in coming, how slow a reader."""

import asyncio
import time
from collections.abc import Collection
from typing import Any

__all__ = ["HEAD_BYTES", "HEAD_TIMEOUT_S", "READ_TIMEOUT_S", "close_stalled", "http_protocol"]

HEAD_BYTES = 64 << 10
"""Request line and headers together."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or the answer before, to the end of the head."""
READ_TIMEOUT_S = 120.0
"""For a client whose socket is full to take something."""
SWEEP_S = 2.0


def http_protocol() -> Any:
    """What uvicorn is to read requests with: httptools where [fast] is installed, else h11, which has its own bound."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        """httptools keeps a head of any size. Counted are the bytes of reads in which no head ended."""

        _head_bytes = 0
        _in_head = True

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of the request is larger than {HEAD_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_complete()

    return Bounded


async def close_stalled(connections: Collection[Any]) -> None:
    """Close connections that take too long over a head, or take nothing of an answer; until cancelled.

    connections: uvicorn's, alive.
    """
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
