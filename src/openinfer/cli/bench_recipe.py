"""What step, ops and explain share: the recipe of a checkpoint, its flags, and its module `bench`."""

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

Body = Callable[[argparse.Namespace, ModuleType, EngineSpec], int]


def run(
    argv: list[str],
    command: str,
    text: str | None,
    add: Callable[[argparse.ArgumentParser], None],
    body: Body,
) -> int:
    """Parse MODEL_DIR, the command's own flags and the recipe's, and call `body` with them, with the module `bench`
    that lies beside the one that builds the recipe's engine, and with the engine's spec. Returns the exit code."""
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
        package = spec.target.partition(":")[0].rpartition(".")[0]
        if importlib.util.find_spec(f"{package}.bench") is None:
            raise ValueError(f"recipe {recipe.name!r} has no benchmark ({package}.bench)")
        return body(args, importlib.import_module(f"{package}.bench"), spec)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"openinfer {command}: error: {error}", file=sys.stderr)
        return 1


def _parser(
    recipe: Recipe, command: str, text: str | None, add: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
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
