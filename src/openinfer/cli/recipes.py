"""Which recipe serves a checkpoint: every installed one is asked."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from openinfer.frontend.errors import ModelFilesError
from openinfer.frontend.model_files import read_json
from openinfer.frontend.recipe import Recipe

GROUP = "openinfer.recipes"


class NoRecipe(ValueError):
    """MODEL_DIR is no checkpoint, or one that no installed recipe serves; the message says which there are."""

    user_can_mend = True


def installed() -> list[Recipe]:
    """The recipes that distributions register under the entry-point group `openinfer.recipes`, by name."""
    return [cast(Recipe, entry.load()) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)]


def find(model_dir: Path) -> Recipe:
    """The recipe that knows the checkpoint's config.json. Raises NoRecipe."""
    path = model_dir / "config.json"
    if not path.exists():
        raise NoRecipe(
            f"{path} cannot be read (No such file or directory): MODEL_DIR must be a checkpoint directory"
        )
    try:
        config = read_json(path)
    except ModelFilesError as error:
        raise NoRecipe(str(error)) from None
    recipes = installed()
    for recipe in recipes:
        if recipe.matches(config):
            return recipe
    known = ", ".join(recipe.name for recipe in recipes) or "none"
    kind = repr(config.get("model_type"))[:80]
    raise NoRecipe(f"no recipe serves model_type {kind} of {path}; installed: {known}")


def checkpoint(name: str) -> Path:
    """The folder of a checkpoint: a path, or demo/NAME, which is found from anywhere in an editable installation."""
    path = Path(name)
    if not path.exists() and path.parts[:1] == ("demo",):
        return Path(__file__).resolve().parents[3] / path
    return path


def model_dir(command: str, argv: list[str]) -> Path | None:
    """MODEL_DIR, which comes first because the flags depend on it. None, and a line on stderr, if it is not there."""
    if argv and not argv[0].startswith("-"):
        return checkpoint(argv[0])
    print(
        f"openinfer {command}: error: MODEL_DIR comes first: openinfer {command} MODEL_DIR [flags] "
        f"(openinfer {command} --help)",
        file=sys.stderr,
    )
    return None


def wants_help(argv: list[str]) -> bool:
    """Whether help is asked for without naming a checkpoint."""
    return bool(argv) and argv[0] in ("-h", "--help")
