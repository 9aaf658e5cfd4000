"""Write docs/flags.md from the options of each recipe: `python scripts/flag_reference.py [--check]`.

--check writes nothing; the exit code is 1 if the file is not what would be written.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from openinfer.recipes.engine import Options, Recipe
from openinfer.recipes.engine.options import flag_of

FILE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEAD = """# Flags of an engine

`openinfer serve MODEL_DIR` takes these flags beside those of the server (`openinfer serve --help`). Python takes them
as keyword arguments, with `_` for `-`: `openinfer.recipes.engine.startup.build(RECIPE, MODEL_DIR, max_num_seqs=8)`.

`python scripts/flag_reference.py` makes this page from the dataclasses `Options`; a test keeps it up to date.
"""


def main() -> int:
    """Write or check; 1 if the check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    wanted = reference()
    if parser.parse_args().check:
        return int(FILE.read_text() != wanted)
    FILE.write_text(wanted)
    return 0


def reference() -> str:
    """The text of the page."""
    common = {field.name for field in dataclasses.fields(Options)}
    parts = [HEAD, "## Every engine\n", table(Options, common)]
    for recipe in ours():
        own = {field.name for field in dataclasses.fields(recipe.options)} - common
        refused = [
            f"- `{flag_of(name)}` is not possible: {why}" for name, why in recipe.options.refused.items()
        ]
        if own or refused:
            parts.append(f"## {recipe.name}\n")
        if own:
            parts.append(table(recipe.options, own))
        if refused:
            parts.append("\n".join(refused) + "\n")
    return "\n".join(parts)


def ours() -> list[Recipe[Any]]:
    """The recipes of this checkout by name, also those that an installation from before does not know."""
    project = tomllib.loads((FILE.parents[1] / "recipes" / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["openinfer.recipes"]
    return [EntryPoint(name, value, "openinfer.recipes").load() for name, value in sorted(named.items())]


def table(options: type[Options], names: set[str]) -> str:
    """A row for each of these fields."""
    rows = ["| flag | default | what it says |", "| --- | --- | --- |"]
    for field in dataclasses.fields(options):
        if field.name in names:
            rows.append(f"| `{spelled(field)}` | {shown(field.default)} | {field.metadata['text']} |")
    return "\n".join(rows) + "\n"


def spelled(field: dataclasses.Field[Any]) -> str:
    """The flag with what follows it."""
    flag, given = flag_of(field.name), field.metadata
    if given["kind"] is bool:
        return f"--no-{flag[2:]}" if field.default else flag
    if given["choices"]:
        return f"{flag} {{{','.join(map(str, given['choices']))}}}"
    return f"{flag} {given['metavar'] or {str: 'TEXT', float: 'X'}.get(given['kind'], 'N')}"


def shown(default: object) -> str:
    """A default in a table; a flag without a word is off or on."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default is None else f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
