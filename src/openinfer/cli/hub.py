"""Checkpoints of the Hugging Face hub, by name: downloaded once, found in the cache afterwards."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from openinfer.cli import recipes

NAME = re.compile(r"(?!demo/)[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.jinja", "encoding/*.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a name of the hub takes. Token, cache and offline mode are huggingface_hub's environment variables."""
    group = parser.add_argument_group(
        "hub (HF_TOKEN, HF_HOME and HF_HUB_OFFLINE in the environment count too)"
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a checkpoint on the hub")


def checkpoint(name: str, flags: list[str]) -> tuple[Path, list[str]]:
    """The folder of a model, and the server's flags: without --revision, with the name that the hub has for it.

    Raises NoRecipe, which says in one line how to get a checkpoint that is not here.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(finder)
    found, rest = finder.parse_known_args(flags)
    folder = recipes.checkpoint(name)
    if folder.exists() or not NAME.fullmatch(name):
        if found.revision is not None:
            raise recipes.NoRecipe(f"--revision {found.revision}: {name} is a folder, not a name of the hub")
        return folder, rest
    if not any(word.partition("=")[0] == "--served-model-name" for word in rest):
        rest = [*rest, "--served-model-name", name]
    return _download(name, found.revision), rest


def _download(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint in the hub's cache, after a download with progress where it is not there yet."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise recipes.NoRecipe(
            f"{name} is no folder here; to take it from the hub: pip install 'openinfer[hub]', and run this again"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's errors, httpx's too, are one of these
        raise recipes.NoRecipe(
            f"{name} is no folder here, and the hub does not give it ({type(error).__name__}: {error}); where there is "
            f"a connection: hf download {name} --local-dir {name.partition('/')[2]}, then serve that folder"
        ) from error
