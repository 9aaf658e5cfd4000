"""A plain blocking client of an OpenAI server, for the commands that ask one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Api", "ApiError"]

TIMEOUT_S = 600.0


class ApiError(RuntimeError):
    """The server is not there, or refused the request; the message has the server's words."""


class Api:
    """One server, by its base URL with or without /v1. A connection a request, so threads may share it."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiError(f"{base_url!r} is not http://HOST[:PORT]")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The first name that the server serves."""
        return str(self._request("GET", "models", None)["data"][0]["id"])

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole chat completion."""
        return self._request("POST", "chat/completions", body)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion. Closing the iterator ends the request."""
        connection, response = self._open("POST", "chat/completions", {**body, "stream": True})
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection, response = self._open(method, path, body)
        try:
            found: dict[str, Any] = json.loads(response.read())
            return found
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise ApiError(f"no server answers at {self._parts.geturl()}: {error}") from error
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
