"""The recipe that serves a checkpoint: every installed recipe is asked."""

import argparse
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from openinfer.frontend.errors import ModelFilesError, is_users_error
from openinfer.frontend.flag_parser import FlagParser, merge
from openinfer.frontend.model_files import read_json
from openinfer.frontend.server_flags import Recipe

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat

GROUP = "openinfer.recipes"
_LLAMA = "examples/llama in a checkout serves it: pip install ./examples/llama"
_OTHER_RECIPES = dict.fromkeys(("llama", "mistral", "qwen2"), _LLAMA)


class NoRecipe(ValueError):
    """MODEL_DIR is no checkpoint, or no installed recipe serves it; the message names the installed recipes."""

    user_can_mend = True


def installed() -> list[Recipe]:
    """The recipes that distributions register under the entry-point group `openinfer.recipes`, by name."""
    return [cast(Recipe, entry.load()) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)]


def find(model_dir: Path) -> Recipe:
    """The recipe that knows the checkpoint's config.json. Raises NoRecipe."""
    path = model_dir / "config.json"
    if not path.exists():
        raise NoRecipe(_why_no_checkpoint(model_dir))
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
    example = "examples/llama of the repository shows how to write one"
    advice = _OTHER_RECIPES.get(config.get("model_type", ""), example)
    raise NoRecipe(f"no recipe serves model_type {kind} of {path}; installed: {known}; {advice}")


def _why_no_checkpoint(folder: Path) -> str:
    wanted = "MODEL is the folder of a checkpoint, or a name of the hub such as Qwen/Qwen3-0.6B"
    if not folder.exists():
        demo = "; demo models come with a checkout of the project" * (folder.parts[:1] == ("demo",))
        return f"{folder} is not there: {wanted}{demo}"
    if not folder.is_dir():
        return f"{folder} is a file: give the folder with config.json and *.safetensors, or a *.gguf file"
    found = sorted(one.name for one in folder.iterdir())
    checkpoints = [str(one.parent) for one in sorted(folder.glob("*/config.json"))[:3]]
    if checkpoints:
        advice = f"did you mean {' or '.join(checkpoints)}?"
    elif "adapter_config.json" in found:
        advice = "it is an adapter (LoRA): give its model, and --enable-lora --lora-modules NAME=PATH"
    else:
        holds = f"it has {', '.join(found[:4])}{', ...' * (len(found) > 4)}" if found else "it is empty"
        advice = f"{holds}; a checkpoint has config.json, *.safetensors and tokenizer.json"
    return f"{folder} has no config.json: {advice}"


def published(name: str) -> tuple[Recipe, Mapping[str, Any]]:
    """The recipe and the config.json of a published model, such as Qwen3-4B or Qwen/Qwen3-4B. Case, dots, dashes and
    -Instruct or -Thinking do not count. Raises NoRecipe, which lists the names."""
    models = {}
    for recipe in installed():
        family = re.split("[_0-9]", recipe.name)[0]
        for size, config in getattr(recipe, "published", dict)().items():
            whole = size.lower().startswith(family) or not config["model_type"].startswith(family)
            models[size if whole else f"{recipe.name}-{size}"] = recipe, config
    wanted = re.sub("-(instruct|thinking)(-2507)?", "", name.rpartition("/")[2].lower())
    for known, found in models.items():
        if _letters(known) == _letters(wanted):
            return found
    raise NoRecipe(f"{name} is neither a folder with a config.json nor one of {', '.join(models)}")


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def gguf_formats() -> "dict[str, GgufFormat]":
    """How GGUF files are read by the installed recipes, by architecture."""
    return {name: form for recipe in installed() for name, form in getattr(recipe, "gguf", dict)().items()}


def checkpoint(name: str) -> Path:
    """The folder of a checkpoint: a path, or demo/NAME, which is found from anywhere in an editable installation.

    A GGUF file is unpacked: its metadata become the files of a folder. Raises NoRecipe for one that cannot be.
    """
    path = Path(name)
    checkout = Path(__file__).resolve().parents[3] / path
    if not path.exists() and path.parts[:1] == ("demo",) and checkout.exists():
        return checkout
    if (path / "config.json").exists() or (path.suffix != ".gguf" and not path.is_dir()):
        return path
    # numpy, which servers do without: their engines are other processes
    from openinfer.recipes.engine import gguf

    if not gguf.is_gguf(path):
        return path
    from openinfer.kernels.store.cubins import default_cache

    try:
        return gguf.unpacked(path, gguf_formats(), default_cache().parent / "gguf")
    except (ValueError, OSError) as error:
        if is_users_error(error):
            raise NoRecipe(str(error)) from error
        raise


def with_recipe_flags(parser: FlagParser, recipes: Sequence[Recipe]) -> FlagParser:
    """The parser with the flags of every recipe, for help and for what can be said before the model is known."""
    parsers = {}
    for recipe in recipes:
        parsers[recipe.name] = argparse.ArgumentParser(add_help=False)
        recipe.add_arguments(parsers[recipe.name])
    merge(parser, parsers)
    return parser


def model_and_rest(parser: FlagParser, argv: list[str]) -> tuple[str, list[str]]:
    """The model that a command line names, and its other words. Ends the process if no model is named."""
    words = parser.with_config(argv)
    place = parser.position(words)
    if place is None:
        parser.error(f"no model is given: {parser.prog} MODEL [flags], such as {parser.prog} demo/qwen3")
    return words[place], [*words[:place], *words[place + 1 :]]


def wants_help(argv: list[str]) -> bool:
    """Whether help is asked for without naming a checkpoint."""
    return bool(argv) and argv[0] in ("-h", "--help", "--help-engine")
