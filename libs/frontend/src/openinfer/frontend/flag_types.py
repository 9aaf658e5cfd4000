"""Types of the command line's flags: each takes a text and raises argparse.ArgumentTypeError saying what is allowed."""

import argparse
import json
import os
from pathlib import Path

from openinfer.frontend.errors import FlagError

MAX_FRONTENDS = 64
MAX_NAME_CHARS = 256
MAX_SECONDS = 1e9
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Units of a number, as vLLM has them: a small letter is a power of 1000, a capital one of 1024."""


def number(text: str) -> int:
    """An integer, which may end in one of UNITS: 16k is 16,000, and 1.5K is 1,536."""
    digits, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    try:
        return int(float(digits) * unit if unit > 1 else int(digits))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text} is not a number, which may end in k, m, g (powers of 1000) or K, M, G (of 1024)"
        ) from None


def tokens(text: str) -> int | None:
    """A number; `auto` or -1, as users of vLLM may write, is None."""
    return None if text in ("auto", "-1") else number(text)


def options(text: str) -> dict[str, object]:
    """A JSON object of variables of the chat template."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{text[:200]} is not a JSON object, such as {{"enable_thinking": false}}'
        )
    return value


def strings(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise argparse.ArgumentTypeError(f"{text[:200]} is not a JSON list of strings")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:  # the system would take what is left of it in 16 bits
        raise argparse.ArgumentTypeError(f"{value} is not a port from 0 to 65535")
    return value


def key(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError("an API key is a text of printable characters, and not empty")
    return text


def name(text: str) -> str:
    if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable() or text.isspace():
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no name: it has 1 to {MAX_NAME_CHARS} characters, all printable and not only spaces"
        )
    return text


def url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not http://HOST:PORT/PATH")
    return text


def key_of_environment() -> str | None:
    given = os.environ.get("OPENINFER_API_KEY")
    try:
        return None if given is None else key(given)
    except argparse.ArgumentTypeError as error:
        raise FlagError(f"OPENINFER_API_KEY: {error}; unset it to go without a key") from None


def check_plan(path: Path) -> None:
    """Raise FlagError where the file is no plan, and OSError."""
    try:
        data = json.loads(path.read_bytes())
        known = data["bench"] == "plan" and all(one["flags"] and one["points"] for one in data["results"])
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise FlagError(f"--plan {path}: this is no file of `openinfer plan MODEL --json FILE`")


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to {MAX_SECONDS:g}")
    return value


def count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_FRONTENDS:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 1 to {MAX_FRONTENDS}")
    return value
