"""A plain blocking client of an OpenAI server, for the commands that ask one."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from openinfer.frontend import flag_types

__all__ = ["Api", "ApiError", "add_api_key", "api_key"]

TIMEOUT_S = 600.0
LOOK_S = 30.0
"""Time limit of requests that generate nothing."""


class ApiError(RuntimeError):
    """The server is not there, or refused the request; the message has the server's words."""

    user_can_mend = True


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the server's key."""
    parser.add_argument(
        "--api-key",
        type=flag_types.key,
        metavar="KEY",
        help="the server's API key; OPENINFER_API_KEY in the environment does not show in ps",
    )


def api_key(args: argparse.Namespace) -> str | None:
    """The key of the command line, else of the environment. Raises FlagError for an empty OPENINFER_API_KEY."""
    return args.api_key or flag_types.key_of_environment()


class Api:
    """One server, by its base URL with or without /v1. A connection a request, so threads may share it."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        try:
            self._parts = parts = urlsplit(base_url)
            self._port = parts.port
        except ValueError as error:
            raise ApiError(f"{base_url!r} is not http://HOST[:PORT]: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiError(f"{base_url!r} is not http://HOST[:PORT]")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def first_model(self) -> str:
        """The first name that the server serves."""
        try:
            return str(self._request("GET", "/v1/models", None)["data"][0]["id"])
        except (LookupError, TypeError, ValueError):
            raise ApiError(
                f"{self._parts.geturl()} names no model at /v1/models; is it an OpenAI server?"
            ) from None

    def metrics(self) -> str:
        """The text of /metrics."""
        return self._read("GET", "/metrics", None).decode()

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole chat completion."""
        return self._request("POST", "/v1/chat/completions", body)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion. Closing the iterator ends the request."""
        connection, response = self._open("POST", "/v1/chat/completions", {**body, "stream": True})
        with contextlib.closing(connection), self._reading():
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk
            raise ConnectionError("it has no end")

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._read(method, path, body))
        return found

    def _read(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        connection, response = self._open(method, path, body)
        with contextlib.closing(connection), self._reading():
            return response.read()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """A connection that breaks while an answer is read raises ApiError."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            where = self._parts.geturl()
            raise ApiError(f"the answer of {where} broke off: {error}; the server's log says why") from error

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        limit = LOOK_S if body is None else TIMEOUT_S
        connection = kind(self._parts.hostname or "", self._port, timeout=limit)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            where = self._parts.geturl()
            raise ApiError(
                f"no server answers at {where}: {error}; openinfer serve MODEL starts one"
            ) from error
        if response.status != 200:
            text = response.read().decode(errors="replace")
            connection.close()
            raise ApiError(_message(text) or f"HTTP status {response.status}: {text[:200]}")
        return connection, response


def _message(text: str) -> str:
    """The message of an OpenAI error; "" if the text is not such an error."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
