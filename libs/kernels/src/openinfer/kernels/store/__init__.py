"""Compiled kernels, and the processes that compile them. Here: checks of folders whose files are run as code."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openinfer.kernels.errors import UntrustedCache
from openinfer.tensor.handover import distrust


def make_private(folder: Path) -> None:
    """Make the folder for its owner alone (mode 0700), or check one that exists.

    Raises UntrustedCache, or OSError where it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)


def check_owner(folder: Path) -> None:
    """A folder that exists must belong to this user or root, and no other user may write to it.

    Raises UntrustedCache.
    """
    why = distrust(folder)
    if why:
        raise UntrustedCache(
            f"{folder} {why}: its files would be run as code. Remove the folder, or name another one in OPENINFER_CACHE"
        )


def digest(fields: Mapping[str, Any], data: bytes = b"") -> str:
    """SHA-256 of JSON fields (all but "sha256") and of the bytes beside them."""
    text = json.dumps({name: value for name, value in fields.items() if name != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + data).hexdigest()


def write_whole(file: Path, data: bytes) -> None:
    """In one piece: another process sees the whole file or none. Other processes and hosts choose other names."""
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
