"""Files of a checkpoint beside its weights, opened with suspicion."""

import json
from collections.abc import Mapping
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
    text = read_text(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def find_templates(model_dir: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Sources of the checkpoint's template and of that for chats with tools (`tool_use`); None for a missing one. The
    files come before tokenizer_config.json. Raises ModelFilesError."""
    found = config.get("chat_template")
    named: dict[str, object] = {"default": found}
    if isinstance(found, list):
        named = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
    default, more = model_dir / "chat_template.jinja", model_dir / "additional_chat_templates"
    if default.exists():
        named = {"default": read_text(default)}
    if (more / "tool_use.jinja").exists():
        named["tool_use"] = read_text(more / "tool_use.jinja")
    return _source(named.get("default")), _source(named.get("tool_use"))


def _source(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise ModelFilesError(
            f"chat_template in tokenizer_config.json is a {type(found).__name__}; it must be a string, or a list of "
            "objects with a name and a template"
        )
    return found
