"""Write the pages of docs/ that are made from the code: `python scripts/docs_pages.py [--check]`.

docs/architecture.md has the imports between the parts as a picture, docs/checkpoints.md the memory that published
checkpoints take. --check writes nothing; the exit code is 1 if a page is not what would be written.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flag_reference import ours

from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.kernels import H200, Target
from openinfer.recipes.engine import Recipe, SetupError, Source

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PARTS = {
    **{
        path.name: path / "src/openinfer" / path.name
        for path in sorted((ROOT / "libs").iterdir())
        if path.is_dir()
    },
    "recipes.engine": ROOT / "recipes/src/openinfer/recipes/engine",
    **{
        f"recipes.{path.parent.name}": path.parent
        for path in sorted((ROOT / "recipes/src/openinfer/recipes").glob("*/model.py"))
        if path.parent.name != "engine"
    },
    "cli": ROOT / "src/openinfer/cli",
    "llm": ROOT / "src/openinfer/llm",
}
"""Where the modules of a part are."""
EXTRA = {"graph": "runner", "sampler": "gpu"}
"""A folder of a part that only an extra's users import: its arrows are dotted."""
GPUS = {
    "16 GB": (16e9, H200),
    "24 GB": (24e9, H200),
    "H100, 80 GB": (80e9, SERVED),
    "H200, 141 GB": (141e9, SERVED),
}
"""Bytes of memory by GPU, and the target of its kernels. Kernels of CUDA C++ need sm_90, and small cards are others."""
SHARE = 0.9
"""The default of --gpu-memory-utilization."""


def main() -> int:
    """Write or check; 1 if the check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for name, text in (("architecture.md", architecture()), ("checkpoints.md", checkpoints())):
        path = DOCS / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        print(
            f"docs: {', '.join(stale)} not as the code says; run python scripts/docs_pages.py",
            file=sys.stderr,
        )
    return int(bool(stale))


def architecture() -> str:
    """The page with the picture."""
    plain: set[tuple[str, str]] = set()
    dotted: set[tuple[str, str]] = set()
    for part, folder in PARTS.items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).parts[0] == EXTRA.get(part)
            (dotted if inside else plain).update((part, other) for other in imported(path) if other != part)
    lines = [
        f"    {one} --> {' & '.join(other for _, other in own)}"
        for one, own in itertools.groupby(sorted(plain), key=lambda arrow: arrow[0])
    ]
    lines += [f"    {one} -. {one}.{EXTRA[one]} .-> {other}" for one, other in sorted(dotted - plain)]
    picture = "\n".join(["```mermaid", "flowchart TD", *lines, "```"])
    return f"""# Architecture

An arrow goes from a part to each part that it imports. A dotted arrow is of a folder that only an extra's users import.
[Design](design.md) says why these arrows and no others; [structure](structure.md) says what is in each part.

{picture}

`python scripts/docs_pages.py` draws this page from the import statements; a test keeps it up to date.
"""


def imported(path: Path) -> Iterator[str]:
    """The parts that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            words = name.split(".")
            if words[0] == "openinfer" and len(words) > 1:
                part = ".".join(words[1:3]) if words[1] == "recipes" else words[1]
                if part in PARTS:
                    yield part


FORMS = [
    ("Qwen/Qwen3, 3.5, 3.6, 3.8, Next, Coder; -FP8", "BF16, FP8 in blocks", "load"),
    ("Qwen/\\*-AWQ, -GPTQ-Int4, -GPTQ-Int8", "INT4, INT8", "load; act-order becomes plain"),
    ("RedHatAI/\\*-FP8-dynamic, .w4a16, .w8a8, .w8a16; nvidia/\\*-FP8", "FP8, INT4, INT8", "load"),
    (
        "nvidia/, RedHatAI/\\*-NVFP4; amd/, RedHatAI/\\*-MXFP4; mixed ones",
        "FP4",
        "load; activations stay plain",
    ),
    (
        "\\*-GGUF of Qwen3, 3.5, Llama, Mistral, Qwen2.5",
        "Q4_0 to Q8_0, Q4_K to Q6_K, F16, BF16",
        "load, as plain weights",
    ),
    (
        "deepseek-ai/DeepSeek-V3\\*, -R1; zai-org/GLM-5\\*",
        "FP8 in blocks, BF16",
        "load; GPUs ran V3.2 cut to 6 layers",
    ),
    ("moonshotai/Kimi-K2-Instruct(-0905), -Thinking", "FP8 in blocks; INT4 experts", "load; no GPU ran them"),
    (
        "deepseek-ai/DeepSeek-V4\\*",
        "FP8, FP4",
        "load",
    ),
    ("nvidia/DeepSeek-V4-\\*-NVFP4", "", "refused: `moe_quant_algo`"),
    ("\\*-bnb-4bit, exl3, MLX; W4A8, MXFP8, asymmetric INT8", "", "refused by the key"),
    (
        "Llama 3, Mistral, Qwen/Qwen2.5-\\*; DeepSeek-R1-Distill-\\*",
        "BF16",
        "load with `examples/llama`",
    ),
    ("other families", "", "refused: `model_type`"),
]
"""Published checkpoints, their format, and what becomes of them."""


def checkpoints() -> str:
    """The page with the memory of published checkpoints."""
    found: dict[tuple[str, ...], list[str]] = {}  # models of one size have one row
    known: dict[str, list[str]] = {}
    for recipe in ours():
        for name, config in recipe.published().items():
            cells = known[json.dumps(config)] = known.get(json.dumps(config)) or row(recipe, name, config)
            found.setdefault(tuple(cells[1:]), []).append(name)
    rows = [[", ".join(names), *cells] for cells, names in found.items()]
    head = ["checkpoint", "recipe", "weights", "beside them", *(f"cache on {gpu}" for gpu in GPUS)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
    forms = "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (("names", "format", "here"), ["---"] * 3, *FORMS)
    )
    return f"""# Checkpoints and their memory

The published sizes of [the recipes](../recipes/README.md) on one GPU, with the default flags and {SHARE:.0%} of its
memory. "Beside them" are the batch, activations, workspace (up to 0.4 GB more on other cards than an H100 or H200), and
what the driver takes. The cache is in tokens of all sequences, beside recurrent states (at most half of the room).

`--max-num-seqs`, `--max-num-batched-tokens` and `--max-model-len` make room; Qwen3.5 keeps a state for each of
`--max-num-seqs` rows. `openinfer explain MODEL_DIR --gpu-memory 80` counts for your flags and your GPU.
These are plans; engines ran on H100s of 80 GB and on H200s.

{table}

## Published forms

`openinfer check MODEL` reads headers and says whether a checkpoint loads. None of these was at hand; tests have small
ones.

{forms}

On a CPU the cache has 2 GB unless `--kv-cache-memory-bytes` says otherwise; float32 weights take twice what bf16 does.

`python scripts/docs_pages.py` makes this page from the plans of the engines; a test keeps it up to date.
"""


def row(recipe: Recipe[Any], name: str, config: Any) -> list[str]:
    """A published size: its weights, the rest, and the tokens of cache that each GPU has room for."""

    def plan(target: Target, nbytes: float) -> Outline:
        return Outline(recipe, Source(config), recipe.options(), target, memory_bytes=nbytes)

    largest = plan(SERVED, 10e12)
    weights = largest.memory["weights"]
    rest = largest.fixed_bytes - weights
    cells = [name, recipe.name, f"{weights / 1e9:.1f} GB", f"{rest / 1e9:.1f} GB"]
    for nbytes, target in GPUS.values():
        room, found = int(nbytes * SHARE), "0"
        if weights < room:  # else a plan, which takes seconds, would say the same
            made = plan(target, nbytes)
            with contextlib.suppress(SetupError):
                found = f"{made.cache(room - made.fixed_bytes).capacity_tokens:,}"
        cells.append(found)
    return cells


if __name__ == "__main__":
    sys.exit(main())
