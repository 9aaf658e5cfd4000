"""Prefill and decode on servers of their own: a proxy that sends each request to both, one after the other.

    openinfer serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "TcpConnector", "kv_port": 5600,
        "kv_connector_extra_config": {"secret_file": "kv-secret"}}'
    openinfer serve MODEL --port 8200 --kv-transfer-config '{"kv_connector": "TcpConnector", "kv_port": 5601,
        "kv_connector_extra_config": {"secret_file": "kv-secret"}}' --kv-peer '127.0.0.1:*'
    python examples/prefill_decode/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

kv-secret is a file of random bytes. The decode server takes KV only from where --kv-peer allows, as it serves all.
The prefill server computes the prompt and keeps its KV. Its answer has kv_transfer_params, which say where the KV is.
The decode server fetches the KV and generates. Without a prefill server the decode server computes the prompt too.
Needs httpx, starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FOR_DECODE = ("stream", "stream_options", "n", "min_tokens", "logprobs", "top_logprobs", "echo")
"""Fields that only the decode server must honour."""
PASSED_ON = ("authorization", "x-api-key")


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request to the prefill server: one token, which is thrown away."""
    asked = {name: value for name, value in body.items() if name not in FOR_DECODE}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return asked | {limit: 1, "kv_transfer_params": {"do_remote_decode": True}}


class Proxy:
    """Takes prefill and decode servers in turns. client: closed by its owner."""

    def __init__(self, client: httpx.AsyncClient, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._client = client
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    async def answer(self, request: Request) -> Response:
        """Send a request to a prefill server, and then to a decode server, whose answer it gets."""
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse(
                {"error": {"message": "the body is no JSON", "type": "invalid_request_error"}}, 400
            )
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        if not isinstance(body, dict):
            return await self._pass_on(request.url.path, body, headers)
        try:
            found = await self._client.post(
                next(self._prefill) + request.url.path, json=prefill_body(body), headers=headers
            )
            left = found.json().get("kv_transfer_params") if found.status_code == 200 else None
        except httpx.HTTPError:
            left = None
        return await self._pass_on(request.url.path, body | {"kv_transfer_params": left}, headers)

    async def look(self, request: Request) -> Response:
        """Pass on what a decode server says of its models and its health."""
        try:
            found = await self._client.get(next(self._decode) + request.url.path)
        except httpx.HTTPError as error:
            return _unreachable(error)
        return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))

    async def _pass_on(self, path: str, body: Any, headers: dict[str, str]) -> Response:
        sent = self._client.build_request("POST", next(self._decode) + path, json=body, headers=headers)
        try:
            found = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return _unreachable(error)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in found.aiter_bytes():
                    yield piece
            finally:  # the client has left, or all is said
                await found.aclose()

        kept = {name: found.headers[name] for name in ("content-type", "warning") if name in found.headers}
        return StreamingResponse(pieces(), found.status_code, kept)


def _unreachable(error: httpx.HTTPError) -> Response:
    message = f"the decode server cannot be reached: {error}"
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, 503)


def make_app(client: httpx.AsyncClient, prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """The proxy as an ASGI app. Closes the client at its end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    proxy = Proxy(client, prefill, decode)
    routes = [
        Route(path, proxy.answer, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")
    ]
    routes += [Route(path, proxy.look) for path in ("/v1/models", "/health")]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    args = parser.parse_args()
    app = make_app(httpx.AsyncClient(timeout=None), args.prefill, args.decode)
    uvicorn.run(app, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
