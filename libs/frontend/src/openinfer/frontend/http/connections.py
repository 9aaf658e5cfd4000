"""Bounds on what a connection may cost before there is a request: how large its head, and how long in coming."""

import asyncio
import time
from collections.abc import Collection
from typing import Any

__all__ = ["HEAD_BYTES", "HEAD_TIMEOUT_S", "close_stalled", "http_protocol"]

HEAD_BYTES = 64 << 10
"""Request line and headers together."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or the answer before, to the end of the head."""
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
    """Close connections that take too long over a head, until cancelled. connections: uvicorn's, alive."""
    since: dict[Any, tuple[object, float]] = {}
    while True:
        await asyncio.sleep(SWEEP_S)
        now = time.monotonic()
        waiting: dict[Any, tuple[object, float]] = {}
        for connection in list(connections):
            cycle = connection.cycle
            if cycle is not None and not cycle.response_complete:
                continue
            before, began = since.get(connection, (None, now))
            waiting[connection] = (cycle, began if before is cycle else now)
            if now - waiting[connection][1] > HEAD_TIMEOUT_S:
                connection.transport.close()
        since = waiting
