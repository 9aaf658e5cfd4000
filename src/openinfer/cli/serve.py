"""`openinfer serve MODEL_DIR [flags]`: find the checkpoint's recipe and serve it."""

from __future__ import annotations

import sys

from openinfer.cli import recipes
from openinfer.frontend.errors import one_line
from openinfer.frontend.serve import build_parser, serve

PROG = "openinfer serve"


def main(argv: list[str]) -> int:
    """Serve until told to stop; returns the exit code of frontend.serve, 1 for a checkpoint that nobody serves, 2 for
    wrong arguments."""
    if recipes.wants_help(argv):
        for recipe in recipes.installed():
            print(f"With a {recipe.name} checkpoint:\n")
            build_parser(recipe, PROG).print_help()
        return 0
    model_dir = recipes.model_dir("serve", argv)
    if model_dir is None:
        return 2
    try:
        recipe = recipes.find(model_dir)
    except recipes.NoRecipe as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    return serve(recipe, [str(model_dir), *argv[1:]], PROG)
