"""The common parts of all answers. Pure: choices in, bytes out."""

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.generation import Choice, Usage

encode = msgspec.json.Encoder().encode
KINDS = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
"""What OpenAI and Anthropic call an error of a status."""


@functools.cache
def package_version() -> str:
    try:
        return importlib.metadata.version("openinfer-frontend")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from a source tree"


@functools.cache
def fingerprint() -> str:
    """system_fingerprint: it covers all that may change an answer to the same request with the same seed."""
    return f"openinfer-{package_version()}"


class AnswerShape(Protocol):
    """The form of one endpoint's answers. Taking from a choice empties it."""

    def events(self, choice: Choice) -> bytes:
        """Server-sent events for what the choice has gathered; b"" when that says nothing yet."""

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The bytes that end a stream in order, after the last events()."""

    def broken(self, error: APIError) -> bytes:
        """The bytes that end a stream that had begun and cannot go on."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def error_body(error: APIError) -> bytes:
    """OpenAI's error object."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return encode({"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}})


def named_event(name: str, /, **fields: Any) -> bytes:
    """An event that has a name, as the newer APIs write them; its data begin with it."""
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}) + b"\n\n"
