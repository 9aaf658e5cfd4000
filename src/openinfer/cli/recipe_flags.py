"""Code that bench, compile, explain, plan and tune share: a checkpoint's recipe, its flags, and errors as one line."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openinfer.cli import recipes
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.flag_parser import FlagParser
from openinfer.recipes.engine import Options, Recipe, Source

if TYPE_CHECKING:
    from openinfer.recipes.engine.engine import Engine

Flags = Callable[[argparse.ArgumentParser], None]


class BadFlags(ValueError):
    """Flags that make no sense; the message says which and what is allowed."""

    user_can_mend = True


def figure_type() -> Any:
    """matplotlib's Figure. Raises BadFlags without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadFlags("--plot needs matplotlib: pip install 'openinfer-cli[plot]'") from None
    return Figure


@dataclass(frozen=True, slots=True)
class Asked:
    """The choices of the command line: a checkpoint, its recipe and the engine's options. `published`: config.json of a
    model that was named instead of a folder."""

    recipe: Recipe[Any]
    model_dir: Path
    options: Options
    published: Mapping[str, Any] | None = None

    def source(self) -> Source:
        """The model's config.json, with the EOS ids where there is a folder. Raises UnsupportedModel."""
        return Source.read(self.model_dir) if self.published is None else Source(self.published)


def without_prefix_cache(asked: Asked) -> "Engine":
    """The engine without a prefix cache, for measurements: a prompt with a prefix hit would not be computed."""
    from openinfer.recipes.engine.startup import build

    flags = {field.name: getattr(asked.options, field.name) for field in dataclasses.fields(asked.options)}
    return build(asked.recipe, asked.model_dir, **{**flags, "enable_prefix_caching": False}).engine


Body = Callable[[argparse.Namespace, Asked], int]


def run_command(
    argv: list[str], command: str, text: str | None, add: Flags, body: Body, *, named: bool = False
) -> int:
    """Parse MODEL, the command's own flags and the recipe's, and call `body`. Returns the exit code. named: a
    published model's name will do for MODEL."""
    if recipes.wants_help(argv):
        print(merged_parser(command, text, add).format_help(engine=argv[0] == "--help-engine"), end="")
        return 0
    from openinfer.kernels import KernelsError
    from openinfer.tensor import TensorError

    try:
        return body(*parse(argv, command, text, add, named=named))
    except Exception as error:
        if not is_users_error(error) and not isinstance(error, KernelsError | TensorError):
            raise
        print(f"openinfer {command}: error: {one_line(error)}", file=sys.stderr)
        return 1


def parse(
    argv: list[str], command: str, text: str | None, add: Flags, *, named: bool = False
) -> tuple[argparse.Namespace, Asked]:
    """The arguments of `body`, see run(). Ends the process for wrong words; raises NoRecipe, BadFlags, SetupError."""
    name, rest = recipes.model_and_rest(merged_parser(command, text, add), argv)
    model_dir, config = recipes.checkpoint(name), None
    if named and not model_dir.exists():
        found, config = recipes.published(name)
    else:
        found = recipes.find(model_dir)
    if not isinstance(found, Recipe):
        raise BadFlags(
            f"recipe {found.name!r} has an engine of its own; {command} needs one of openinfer.recipes.engine"
        )
    parser = _parser(command, text, add)
    found.add_arguments(parser)
    args = parser.parse_args([name, *rest])
    return args, Asked(found, model_dir, found.parsed(args), config)


def merged_parser(command: str, text: str | None, add: Flags) -> FlagParser:
    """The command's own flags and those of every recipe that it works with."""
    usable = [recipe for recipe in recipes.installed() if isinstance(recipe, Recipe)]
    return recipes.with_recipe_flags(_parser(command, text, add), usable)


def _parser(command: str, text: str | None, add: Flags) -> FlagParser:
    prog = f"openinfer {command}"
    parser = FlagParser(prog, usage=f"{prog} MODEL [flags]", description=text)
    parser.add_argument("model_dir", type=Path, metavar="MODEL", help="checkpoint directory")
    add(parser)
    return parser
