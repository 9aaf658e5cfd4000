"""The access log: a line a request, at its end."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_PATH_CHARS = 200
"""A path may be as long as a head; a line of the log may not."""
_POLLED = "/state"
"""The page at / asks for it once a second: answers of 200 are logged at the level debug."""

_log = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware. Logs client, method, path (without the query), status, and the seconds to the end of the answer.

    The status is 0 where the client left before it was sent one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, left = time.monotonic(), 0, False

        async def receive_and_note() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not status)
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive_and_note, send_and_note)
        except Exception:
            status = status or 500  # which is sent outside of all middleware
            raise
        finally:
            _write(scope, 0 if left else status, time.monotonic() - began)


def _write(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    fields = {
        "client": f"{client[0]}:{client[1]}" if client else "-",
        "method": scope["method"],
        "path": quote(scope["path"])[:MAX_PATH_CHARS],
        "http_version": scope["http_version"],
        "status": status,
        "seconds": round(seconds, 4),
    }
    _log.log(
        logging.DEBUG if scope["path"] == _POLLED and status == 200 else logging.INFO,
        '%(client)s - "%(method)s %(path)s HTTP/%(http_version)s" %(status)d in %(seconds).3f s',
        fields,
        extra={"fields": fields},
    )
