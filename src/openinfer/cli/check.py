"""`openinfer check MODEL`: what a checkpoint is, whether it loads and why not, and the memory that it takes. It reads
headers only, also of a name of the hub, and needs no GPU.
"""

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openinfer.cli import hub, recipe_flags, recipes
from openinfer.cli.explain import memory_flag, memory_plan
from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.cli.recipe_flags import Asked
from openinfer.frontend.chat import coded_renderer
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.frontend.model_files import find_templates
from openinfer.kernels import KernelsError
from openinfer.kernels.authoring import packing_text
from openinfer.recipes.engine import gguf
from openinfer.recipes.engine.config_fields import end_token
from openinfer.recipes.engine.limits import decide
from openinfer.tensor import Checkpoint, Device, TensorError, format_bytes


def main(argv: list[str]) -> int:
    """Print; returns 0 for a checkpoint that loads, 1 for one that does not, 2 for wrong arguments."""
    if recipes.wants_help(argv):
        return recipe_flags.run_command(argv, "check", __doc__, _flags, _check)
    name, rest = recipes.model_and_rest(recipe_flags.merged_parser("check", __doc__, _flags), argv)
    try:
        with hub.headers(name, rest) as (folder, flags):
            print(name)
            return recipe_flags.run_command([str(folder), *flags], "check", __doc__, _flags, _check)
    except recipes.NoRecipe as error:
        print(f"openinfer check: error: {one_line(error)}", file=sys.stderr)
        return 1


def _flags(parser: argparse.ArgumentParser) -> None:
    hub.add_hub_arguments(parser)
    memory_flag(parser)


def _check(args: argparse.Namespace, asked: Asked) -> int:
    report = _Report()
    folder, recipe, options = asked.model_dir, asked.recipe, asked.options
    source = checkpoint = blueprint = None
    with report.part("config"):
        source = asked.source()
        report.say("recipe", f"{recipe.name}, for model_type {source.config.get('model_type')!r:.40}")
        report.say("format", _format(source.config))
    with report.part("weights"):
        checkpoint = gguf.opened(folder, recipes.gguf_formats())
        report.say("weights", _weights(checkpoint))
    if source is not None and checkpoint is not None:
        source = dataclasses.replace(source, checkpoint=checkpoint)
        with report.part("model"):
            blueprint = recipe.blueprint(source, options, ranks=options.tensor_parallel_size)
            if (packing := getattr(blueprint.config, "packing", None)) is not None:
                report.say("packed", packing_text(packing))
            usual, most = blueprint.config.max_position_embeddings, blueprint.config.max_positions
            more = f"; up to {most} with --max-model-len (YaRN)" if most > usual else ""
            report.say("context", f"{usual} tokens{more}")
            ends = dict.fromkeys((*blueprint.config.eos_token_ids, *end_token(folder)))
            report.say("end tokens", ", ".join(map(str, ends)) or "none: answers end at their limit only")
    if blueprint is not None and checkpoint is not None:
        with report.part("tensors"):
            blueprint.validate(checkpoint, decide(options, Device("cuda"), blueprint))
    with report.part("tokenizer"):
        tokenizer = Tokenizer.load(folder)
        template, with_tools = find_templates(folder, tokenizer.config)
        kind = "" if source is None else str(source.config.get("model_type"))
        if template is None and coded_renderer(folder, kind) is not None:
            report.say("chat", "prompts of the published encoder")
        elif template is None:
            report.say("chat", "no template: chats are refused")
        else:
            report.say("chat", "a template" + (", and another for chats with tools" if with_tools else ""))
    if source is not None and not report.problems:
        with report.part("memory"):
            memory = args.gpu_memory * 1e9
            outline = Outline(recipe, source, options, SERVED, memory_bytes=memory)
            print(memory_plan(outline, memory, options.gpu_memory_utilization))
    for problem in report.problems:
        print(f"refused: {problem}")
    if not report.problems:
        print("it loads")
    if checkpoint is not None:
        checkpoint.close()
    return 1 if report.problems else 0


class _Report:
    """What is printed at once, and the problems, which are printed at the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def say(self, what: str, text: str) -> None:
        print(f"  {what:<11} {text}")

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A part that users' errors end, so that the parts after it are still looked at."""
        try:
            yield
        except Exception as error:
            if not is_users_error(error) and not isinstance(error, KernelsError | TensorError):
                raise
            self.problems.append(one_line(error))


def _format(config: Any) -> str:
    said = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(said, dict):
        return "plain: no quantization_config"
    keys = ("quant_method", "quant_algo", "format", "bits", "group_size", "weight_block_size", "desc_act")
    return ", ".join(f"{key} {said[key]!r:.40}" for key in keys if said.get(key) is not None) or "unknown"


def _weights(checkpoint: Checkpoint) -> str:
    infos = [checkpoint.info(name) for name in checkpoint]
    sizes: Counter[str] = Counter()
    for info in infos:
        sizes[info.dtype.name] += info.nbytes
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.most_common())
    files = len({info.file for info in infos})
    return f"{format_bytes(checkpoint.total_bytes)} in {len(infos)} tensors of {files} files: {kinds}"
