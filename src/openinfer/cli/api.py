"""A plain blocking client of an OpenAI server, for the commands that ask one."""

import argparse
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from openinfer.frontend import flag_types

TIMEOUT_S = 600.0
LOOK_S = 30.0
"""Time limit of requests that generate nothing."""
MAX_ANSWER_BYTES = 64 << 20
"""The limit of a whole answer, and of a line of a stream."""
MAX_REFUSAL_BYTES = 4096


class AnswerDelta(msgspec.Struct):
    """What a chunk adds to an answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as `reasoning`, in the words of other servers."""
    tokens: int | None = None
    """Of the whole answer, at its end, where the request asked for usage."""


class _Choice(msgspec.Struct):
    delta: AnswerDelta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class Model(msgspec.Struct):
    """A model of a server; description: what it is, where the server says so."""

    id: str
    description: str | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class ApiError(RuntimeError):
    """The server is not there, or refused the request; the message has its words. status: 0 without an answer."""

    user_can_mend = True
    status = 0


def add_api_key(parser: argparse.ArgumentParser) -> None:
    text = "the server's API key; OPENINFER_API_KEY in the environment does not show in ps"
    parser.add_argument("--api-key", type=flag_types.key, metavar="KEY", help=text)


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

    def first_model(self) -> Model:
        """The first model that the server names."""
        text = self.read("GET", "/v1/models", None)
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError, LookupError):
            return msgspec.json.decode(text, type=_Models).data[0]
        raise ApiError(f"{self._parts.geturl()} names no model at /v1/models; is it an OpenAI server?")

    def metrics(self) -> str:
        return self.read("GET", "/metrics", None).decode(errors="replace")

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole chat completion."""
        text = self.read("POST", "/v1/chat/completions", body)
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(f"the answer of {self._parts.geturl()} is no JSON object: {error}") from error

    def stream(self, body: dict[str, Any]) -> Iterator[AnswerDelta]:
        """What each chunk of a streamed chat completion adds. Closing the iterator ends the request."""
        connection, response = self._open("POST", "/v1/chat/completions", {**body, "stream": True})
        with contextlib.closing(connection), response, self._reading():
            while line := response.readline(MAX_ANSWER_BYTES):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield from self._deltas(data)
            raise ConnectionError("it has no end")

    def _deltas(self, data: bytes) -> list[AnswerDelta]:
        if message := _message(data):
            raise ApiError(message)
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(
                f"{self._parts.geturl()} sends what is no chunk of an answer: {error}: {_shown(data)}"
            ) from error
        usage = [] if chunk.usage is None else [AnswerDelta(tokens=chunk.usage.completion_tokens)]
        return [choice.delta for choice in chunk.choices if choice.delta is not None] + usage

    def read(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        """The body of an answer. Raises ApiError."""
        connection, response = self._open(method, path, body)
        with contextlib.closing(connection), response, self._reading():
            text = response.read(MAX_ANSWER_BYTES)
            if response.length or len(text) == MAX_ANSWER_BYTES:
                raise ConnectionError(f"{len(text)} bytes came, and more were to come")
            return text

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
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: a host that is no name.
            connection.close()
            where = self._parts.geturl()
            raise ApiError(f"no server answers at {where}: {error}; start openinfer serve MODEL") from error
        if response.status != 200:
            with contextlib.closing(connection), response, self._reading():
                text = response.read(MAX_REFUSAL_BYTES)
            refusal = ApiError(_message(text) or f"HTTP status {response.status}: {_shown(text)}")
            refusal.status = response.status
            raise refusal
        return connection, response


def _message(text: bytes) -> str:
    """The message of an error in any server's words; "" if the text is no such error."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        error = msgspec.json.decode(text, type=dict[str, Any]).get("error")
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or error or "")[:MAX_REFUSAL_BYTES]
    return ""


def _shown(text: bytes) -> str:
    return text[:200].decode(errors="replace")
