"""Log lines: text for people, or one JSON object a line for collectors. Neither lets a client forge a line."""

import contextlib
import contextvars
import io
import json
import logging
import os
import sys
import time
from collections.abc import Sequence

from openinfer.frontend.errors import printable

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id")
"""Set while a request is handled; its log lines name it."""
HIDDEN = "***"
MIN_SECRET = 6
"""The shortest secret that is hidden, because shorter ones would be found in innocent words."""


class _Json(logging.Formatter):
    """time, level, logger, message, request_id where there is one, and the fields of `extra={"fields": {...}}`."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = [json.dumps(secret)[1:-1] for secret in secrets]

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        request_id = REQUEST_ID.get(None)
        entry = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({"request_id": request_id} if request_id else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _hide(json.dumps(entry, default=str), self._secrets)


class _Text(logging.Formatter):
    """Control characters from outside are escaped; a traceback keeps its lines, set in to be told from the log's."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the standard library names it
        request_id = REQUEST_ID.get(None)
        line = super().formatMessage(record)
        return printable(line if not request_id or request_id in line else f"{line}, id {request_id}")

    def formatException(self, ei: object) -> str:  # noqa: N802
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join("  " + printable(line) for line in lines)

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's, unescaped
        return _hide(super().format(record), self._secrets)


def set_up_logging(level: str, form: str, secrets: Sequence[str] = ()) -> None:
    """Log to stderr from `level` (debug, info, ...) on, as `form`: text or json. secrets: texts of at least MIN_SECRET
    characters that must not be seen in any line."""
    secrets = [secret for secret in secrets if len(secret) >= MIN_SECRET]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(secrets) if form == "json" else _Text(secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def open_standard_streams() -> None:
    """Open /dev/null where this process was started without standard input, output or error. A socket that took such a
    number would get what is printed, and libuv ends a process that listens on one."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            stream = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115, for ever
            setattr(sys, name, stream)


def log_settings() -> tuple[str, str]:
    """Level and form in force, for a child process to log alike."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    return level, "json" if isinstance(_formatter(), _Json) else "text"


class LogLines(io.TextIOBase):
    """A stream for sys.stderr where every line must be an object: what is printed, such as progress, is logged."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)


def say(line: str) -> None:
    """Write a line for the person who started the server, at any log level."""
    formatter = _formatter()
    if isinstance(formatter, _Json):
        line = formatter.format(logging.LogRecord("openinfer", logging.INFO, "", 0, line, None, None))
    else:
        line = printable(f"openinfer: {line}")
    with contextlib.suppress(OSError):  # a full disk, or a reader that has left, is no reason not to serve
        sys.stderr.write(f"{line}\n")  # one write: two threads may speak at once
        sys.stderr.flush()


def _formatter() -> logging.Formatter | None:
    handlers = logging.getLogger().handlers
    return handlers[0].formatter if handlers else None


def _hide(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text
