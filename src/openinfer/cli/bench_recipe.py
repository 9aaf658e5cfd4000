"""Code that bench, compile, explain and tune share: a checkpoint's recipe, its flags, and errors as one line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openinfer.cli import recipes
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.flag_parser import FlagParser
from openinfer.recipes.engine import Options, Recipe

if TYPE_CHECKING:
    from openinfer.recipes.engine.engine import Engine

Flags = Callable[[argparse.ArgumentParser], None]


class BadFlags(ValueError):
    """Flags that make no sense; the message says which and what is allowed."""

    user_can_mend = True


@dataclass(frozen=True, slots=True)
class Asked:
    """The choices of the command line: a checkpoint, its recipe and the engine's options."""

    recipe: Recipe[Any]
    model_dir: Path
    options: Options


def without_prefix_cache(asked: Asked) -> Engine:
    """The engine without a prefix cache, for measurements: a prompt with a prefix hit would not be computed."""
    from openinfer.recipes.engine.startup import build

    flags = {field.name: getattr(asked.options, field.name) for field in dataclasses.fields(asked.options)}
    return build(asked.recipe, asked.model_dir, **{**flags, "enable_prefix_caching": False}).engine


Body = Callable[[argparse.Namespace, Asked], int]


def run(argv: list[str], command: str, text: str | None, add: Flags, body: Body) -> int:
    """Parse MODEL, the command's own flags and the recipe's, and call `body`. Returns the exit code."""
    parser = _parser(command, text, add)
    usable = [recipe for recipe in recipes.installed() if isinstance(recipe, Recipe)]
    recipes.merged(parser, usable)
    if recipes.wants_help(argv):
        print(parser.format_help(), end="")
        return 0
    name, rest = recipes.model_and_rest(parser, argv)
    model_dir = recipes.checkpoint(name)
    from openinfer.kernels import KernelsError
    from openinfer.tensor import TensorError

    try:
        found = recipes.find(model_dir)
        if not isinstance(found, Recipe):
            raise BadFlags(
                f"recipe {found.name!r} has an engine of its own; {command} needs one of openinfer.recipes.engine"
            )
        parser = _parser(command, text, add)
        found.add_arguments(parser)
        args = parser.parse_args([name, *rest])
        return body(args, Asked(found, model_dir, found.parsed(args)))
    except Exception as error:
        if not is_users_error(error) and not isinstance(error, KernelsError | TensorError):
            raise
        print(f"openinfer {command}: error: {one_line(error)}", file=sys.stderr)
        return 1


def _parser(command: str, text: str | None, add: Flags) -> FlagParser:
    """The command's own flags."""
    prog = f"openinfer {command}"
    parser = FlagParser(prog, usage=f"{prog} MODEL [flags]", description=text)
    parser.add_argument("model_dir", type=Path, metavar="MODEL", help="checkpoint directory")
    add(parser)
    return parser
