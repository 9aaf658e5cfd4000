"""Checkpoints of the Hugging Face hub, by name: downloaded once, found in the cache afterwards."""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openinfer.cli import recipes

NAME = re.compile(r"(?!demo/)[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.jinja", "encoding/*.py")


def add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a name of the hub takes. Token, cache and offline mode are huggingface_hub's environment variables."""
    group = parser.add_argument_group("hub (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE in the environment count too)")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a checkpoint on the hub")


def hub_checkpoint(name: str, flags: list[str]) -> tuple[Path, list[str]]:
    """The folder of a model, and the server's flags: without --revision, with the name that the hub has for it.

    Raises NoRecipe, which says in one line how to get a checkpoint that is not here.
    """
    folder, revision, rest = _found(name, flags)
    if folder is not None:
        return folder, rest
    if not any(word.partition("=")[0] == "--served-model-name" for word in rest):
        rest = [*rest, "--served-model-name", name]
    with _hub(name) as hub:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES))), rest


@contextmanager
def headers(name: str, flags: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """As `checkpoint`, without the weights of a name of the hub: its files have their headers and holes for data, in a
    folder that goes at the end. Raises NoRecipe."""
    folder, revision, rest = _found(name, flags)
    if folder is not None:
        yield folder, rest
        return
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        with _hub(name) as hub:
            patterns = [one for one in FILES if one != "*.safetensors"]
            cached = Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
            for file in (one for one in cached.rglob("*") if one.is_file()):
                target = made / file.relative_to(cached)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.resolve())
            metadata = hub.get_safetensors_metadata(name, revision=revision)
            for shard, found in metadata.files_metadata.items():
                _write_header(made / Path(shard).name, found.tensors)
        yield made, rest


def _write_header(path: Path, tensors: dict[str, Any]) -> None:
    """A file of the safetensors format whose data is a hole. tensors: dtype, shape and offsets by name."""
    header = {
        name: {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": list(one.data_offsets)}
        for name, one in tensors.items()
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    data = max((one.data_offsets[1] for one in tensors.values()), default=0)
    os.truncate(path, 8 + len(text) + data)


def _found(name: str, flags: list[str]) -> tuple[Path | None, str | None, list[str]]:
    """The folder, or None for a name of the hub; its revision; the other flags. Raises NoRecipe."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_hub_arguments(finder)
    found, rest = finder.parse_known_args(flags)
    folder = recipes.checkpoint(name)
    if not folder.exists() and NAME.fullmatch(name):
        return None, found.revision, rest
    if found.revision is not None:
        raise recipes.NoRecipe(f"--revision {found.revision}: {name} is a folder, not a name of the hub")
    return folder, None, rest


@contextmanager
def _hub(name: str) -> Iterator[Any]:
    """The package huggingface_hub, whose errors become NoRecipe."""
    try:
        import huggingface_hub
    except ImportError:
        raise recipes.NoRecipe(
            f"{name} is no folder here; to take it from the hub: pip install 'openinfer-cli[hub]', and run this again"
        ) from None
    try:
        yield huggingface_hub
    except Exception as error:
        # Errors of the connection, httpx's too, are one of these; some of the hub's own are none.
        known = isinstance(error, OSError | ValueError | RuntimeError)
        if not known and "safetensors" not in type(error).__name__.lower():
            raise
        raise recipes.NoRecipe(
            f"{name} is no folder here: hf download {name} --local-dir {name.partition('/')[2]} where there is a "
            f"connection, then serve that folder (the hub says {type(error).__name__}: {str(error)[:200]})"
        ) from error
