"""Files of a checkpoint beside its weights, opened with suspicion."""

import json
from pathlib import Path
from typing import Any

from openinfer.frontend.errors import ModelFilesError

MAX_TEXT_BYTES = 1 << 20
MAX_JSON_BYTES = 64 << 20


def read_text(path: Path, most: int = MAX_TEXT_BYTES) -> str:
    """A text file of at most `most` bytes. Raises ModelFilesError naming the file."""
    if not path.exists():
        raise ModelFilesError(f"{path} does not exist")
    if not path.is_file():  # a FIFO would be waited for
        raise ModelFilesError(f"{path} is no regular file")
    if path.stat().st_size > most:
        raise ModelFilesError(f"{path} has {path.stat().st_size} bytes, at most {most} are read")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFilesError naming the file."""
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except ModelFilesError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds a {type(value).__name__}, not an object")
    return value
