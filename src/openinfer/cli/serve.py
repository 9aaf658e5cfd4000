"""`openinfer serve MODEL [flags]`: find the checkpoint's recipe and serve it."""

import sys

from openinfer.cli import hub, recipes
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.serve import serve
from openinfer.frontend.server_flags import server_parser

PROG = "openinfer serve"
TEXT = """\
Serve a checkpoint over an OpenAI-compatible HTTP API.

  openinfer serve demo/qwen3                        the small model of a checkout, on http://127.0.0.1:8000
  openinfer serve ./Qwen3-4B --port 9000            a folder with a checkpoint as published
  openinfer serve Qwen/Qwen3-4B --revision main     a checkpoint of the Hugging Face hub
  openinfer serve --config server.toml              flags from a file: model = "./Qwen3-4B", port = 9000
"""


def main(argv: list[str]) -> int:
    """Serve until told to stop; returns frontend.serve's exit code, 1 without a recipe, 2 for wrong arguments."""
    parser = server_parser(PROG, TEXT)
    hub.add_hub_arguments(parser)
    recipes.with_recipe_flags(parser, recipes.installed())
    if recipes.wants_help(argv):
        print(parser.format_help(engine=argv[0] == "--help-engine"), end="")
        return 0
    name, rest = recipes.model_and_rest(parser, argv)
    try:
        model_dir, rest = hub.hub_checkpoint(name, rest)
        recipe = recipes.find(model_dir)
    except Exception as error:
        if not is_users_error(error):
            raise
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    return serve(recipe, [str(model_dir), *rest], PROG)
