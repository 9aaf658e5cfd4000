"""Log lines: text for people, or one JSON object a line for collectors. Neither lets a client forge a line."""

import json
import logging
import sys
import time

__all__ = ["set_up_logging"]


class _Json(logging.Formatter):
    """time, level, logger, message, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Text(logging.Formatter):
    """Control characters that came in from outside are escaped; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the standard library names it
        line = super().formatMessage(record)
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr from `level` (debug, info, ...) on, as `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
