"""What step, ops and explain share: the recipe of a checkpoint, its flags, and the module of the recipe that helps."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from openinfer.cli import recipes
from openinfer.frontend.contract import EngineSpec
from openinfer.frontend.recipe import Recipe
from openinfer.kernels import KernelsError
from openinfer.tensor import TensorError

Flags = Callable[[argparse.ArgumentParser], None]
Body = Callable[[argparse.Namespace, ModuleType, EngineSpec], int]


class BadFlags(ValueError):
    """Flags that make no sense; the message says which and what is allowed."""

    user_can_mend = True


def run(argv: list[str], command: str, module: str, text: str | None, add: Flags, body: Body) -> int:
    """Parse MODEL_DIR, the command's own flags and the recipe's, and call `body` with them, with the recipe's `module`
    (beside the one that builds its engine) and with the engine's spec. Returns the exit code."""
    if recipes.wants_help(argv):
        for recipe in recipes.installed():
            print(f"With a {recipe.name} checkpoint:\n")
            _parser(recipe, command, text, add).print_help()
        return 0
    model_dir = recipes.model_dir(command, argv)
    if model_dir is None:
        return 2
    try:
        recipe = recipes.find(model_dir)
        args = _parser(recipe, command, text, add).parse_args(argv)
        spec = recipe.engine_spec(model_dir, args)
        name = spec.target.partition(":")[0].rpartition(".")[0] + "." + module
        if importlib.util.find_spec(name) is None:
            raise BadFlags(f"recipe {recipe.name!r} cannot do this: it has no {name}")
        return body(args, importlib.import_module(name), spec)
    except (ValueError, OSError, KernelsError, TensorError) as error:
        print(f"openinfer {command}: error: {error}", file=sys.stderr)
        return 1


def _parser(recipe: Recipe, command: str, text: str | None, add: Flags) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"openinfer {command}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="checkpoint directory")
    add(parser)
    recipe.add_arguments(parser)
    return parser
