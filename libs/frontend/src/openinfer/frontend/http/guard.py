"""ASGI middleware around all endpoints: it checks the API key, and gives each request its id."""

import hashlib
import hmac
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.answer import error_response
from openinfer.frontend.logs import REQUEST_ID

__all__ = ["OPEN_PATHS", "ApiKeyGuard", "RequestIds"]

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/", "/plan", "/favicon.svg"})
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiKeyGuard:
    """All but probes and the static page want `Authorization: Bearer KEY`, or `x-api-key: KEY` (Anthropic's way)."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer":
                key = headers.get("x-api-key", "")
            digest = hashlib.sha256(key.encode("latin-1")).digest()  # the bytes as they came
            # Digests have one length: the comparison's time says nothing about the key.
            if not hmac.compare_digest(digest, self._digest):
                error = APIError("the API key is missing or wrong", status=401, code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RequestIds:
    """Every answer has an X-Request-Id: the client's own if it is printable and short, else a new one.

    Endpoints find it in `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)  # of this request's own task
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, send_with_id)
