"""ASGI middleware around all endpoints: it refuses strange web pages, checks the API key, gives each request its id,
and logs it. Cors says which pages of other origins may call.
"""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.answer import error_response
from openinfer.frontend.logs import REQUEST_ID

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/", "/plan", "/favicon.svg"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]*?)\.?(:[0-9]*)?")
"""Name or address, without the dot of the root, and port."""
MAX_PATH_CHARS = 200
"""A path may be as long as a head; a line of the log may not."""
_POLLED = "/state"
"""The page at / asks for it once a second: answers of 200 are logged at the level debug."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_access_log = logging.getLogger("openinfer.frontend.http.access")


class PageGuard:
    """Web pages of other origins may not call, because a browser sends some requests for them without asking: it says
    so in Sec-Fetch-Site and Origin. Where `local`, no page may be of this origin by a name that its owner's DNS gives
    this machine: the Host must be an address, or a name that no stranger's DNS can have.

    origins: as `--allowed-origins` has them; their hosts are taken too. "*": any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], local: bool) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = {urlsplit(origin).hostname for origin in origins}
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and "*" not in self._origins:
            error = self._refusal(Headers(scope=scope), scope["method"])
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _refusal(self, headers: Headers, method: str) -> APIError | None:
        host, origin, site = (headers.get(name) for name in ("host", "origin", "sec-fetch-site"))
        if self._local and host is not None and not self._is_ours(host.lower()):
            return APIError(
                f"the Host {host[:80]!r} may be a web page's (DNS rebinding): without an API key a server on loopback "
                "takes addresses, localhost and names without a dot; give it --api-key, or a page's origin with this "
                "host in --allowed-origins",
                status=403,
                code="foreign_host",
            )
        if origin is not None and origin not in self._origins:
            foreign = site not in ("same-origin", "none") if site else not _same_host(origin, host or "")
        else:  # a page that leads to this one by a link learns nothing
            link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
            foreign = origin is None and site in ("cross-site", "same-site") and not link
        if not foreign:
            return None
        return APIError(
            f"a web page of {origin or 'another site'!r} may not call this server: start it with "
            "--allowed-origins to name the origin",
            status=403,
            code="foreign_origin",
        )

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1]
        last = name.rpartition(".")[2]  # of an IPv4 address a number; the others are of no public zone
        return (
            "." not in name
            or name.startswith("[")
            or last.isdecimal()
            or last in ("localhost", "internal")
            or name in self._hosts
        )


def _same_host(origin: str, host: str) -> bool:
    """Whether a page of this origin was served under this Host; either may leave the scheme's port out."""
    scheme, _, at = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(at) and at.removesuffix(port) == host.lower().removesuffix(port)


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


class RequestLog:
    """Every answer has an X-Request-Id: the client's own if it is printable and short, else a new one. Endpoints find
    it in `request.state.request_id`.

    logs: log client, method, path (without the query), status, and the seconds to the end of each answer. The status is
    0 where the client left before it was sent one.
    """

    def __init__(self, app: ASGIApp, logs: bool) -> None:
        self._app = app
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)  # of this request's own task
        header = (b"x-request-id", request_id.encode())
        began, status, left = time.monotonic(), 0, False

        async def receive_and_note() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not status)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self._app(scope, receive_and_note, send_with_id)
        except Exception:
            status = status or 500  # which is sent outside of all middleware
            raise
        finally:
            if self._logs:
                _write_access(scope, 0 if left else status, time.monotonic() - began)


def _write_access(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    fields = {
        "client": f"{client[0]}:{client[1]}" if client else "-",
        "method": scope["method"],
        "path": quote(scope["path"])[:MAX_PATH_CHARS],
        "http_version": scope["http_version"],
        "status": status,
        "seconds": round(seconds, 4),
    }
    _access_log.log(
        logging.DEBUG if scope["path"] == _POLLED and status == 200 else logging.INFO,
        '%(client)s - "%(method)s %(path)s HTTP/%(http_version)s" %(status)d in %(seconds).3f s',
        fields,
        extra={"fields": fields},
    )


class Cors(msgspec.Struct, frozen=True):
    """The CORS rules for browsers. "*" stands for any; without an origin, pages of other origins may not call."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False
    """Cookies and Authorization of the browser's own may come along."""

    def middleware(self) -> list[Middleware]:
        """To stand around all others: a preflight has no API key."""
        if not self.origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self.origins,
                allow_methods=self.methods,
                allow_headers=self.headers,
                allow_credentials=self.credentials,
                expose_headers=["x-request-id", "warning", "retry-after"],
            )
        ]
