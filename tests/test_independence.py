"""Each library stands alone: what it imports, how large it is, and that its wheel works without the others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ("tensor", "kernels", "graph", "kvpool", "sampler", "scheduler", "frontend")
ARROWS: dict[str, set[str]] = {
    "tensor": set(),
    "kernels": {"tensor"},
    "graph": {"tensor"},
    "graph/runner": {"kernels", "sampler", "scheduler"},
    "kvpool": set(),
    "kvpool/tiers": {"tensor"},
    "scheduler": set(),
    "sampler": set(),
    "sampler/gpu": {"kernels", "tensor"},
    "frontend": {"sampler"},
    "recipes": set(LIBRARIES),
    "cli": {*LIBRARIES, "recipes"},
    "llm": {*LIBRARIES, "cli"},
}
"""Whom code in a folder may import, besides itself; docs/design.md draws them. Deeper folders add to it."""
SOURCES = {
    **{name: ROOT / "libs" / name / "src" / "openinfer" / name for name in LIBRARIES},
    "recipes": ROOT / "recipes" / "src" / "openinfer" / "recipes",
    "cli": ROOT / "src" / "openinfer" / "cli",
    "llm": ROOT / "src" / "openinfer" / "llm",
}
RECIPES = sorted(p.name for p in SOURCES["recipes"].iterdir() if (p / "__init__.py").exists())
HEADS = {"eagle3"}
"""Folders of recipes that are no recipe: heads with a checkpoint of their own, which draft for models of recipes."""
REFUSED = {"torch", "pickle", "cloudpickle", "dill", "marshal", "shelve"}


OF_EACH_RECIPE = {
    *(
        "Attention",
        "Buffers",
        "Config",
        "DraftingModel",
        "Format",
        "Layer",
        "Mixture",
        "Mlp",
        "Model",
        "Mtp",
        "Weights",
    ),
    *("config_json", "validate"),
}
"""Names that every recipe has: its own model's."""
HOOKS = {"main", "cases", "variants"}
"""Functions that a module offers by name: to the command line, and to `bench kernels`."""
REFERENCES = {
    *("e8m0", "hadamard", "q4", "q8", "q8_codes", "rms_norm", "clamped_product", "sigmoid", "gated_norm"),
    *("gumbel", "hash_u32", "silu", "without"),
}
"""Arithmetic that numpy's references and device code have alike."""
COMPILED = {"add_chosen", "code_rows", "dequantize", "experts_product", "merge_parts", "sort_pairs", "spread"}
"""Kernels for weights of another form: a compiled kernel is known by its module and its name."""
PAIRS = {
    # a protocol and what implements it
    *("Constraint", "Drafter", "Engine", "Lease", "Masks", "Pool", "Recipe", "Runner", "States"),
    # each library has its own exception tree
    *("ContractError", "IntegrityError", "MissingExtra", "Rejected"),
    # messages of an engine, and those of the loop and the simulator in it
    *("Finished", "Request", "Scheduled"),
    *("Priority", "number"),
}
"""Names that stand in two libraries, each of which knows nothing of the other's."""


def modules(part: str) -> list[Path]:
    return sorted(SOURCES[part].rglob("*.py"))


def imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Full names of what a module of `package` imports; of `from a import b` it is a.b, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def allowed(part: str, inside: str) -> set[str]:
    """Whom a module may import; `inside` is its path in the part's folder."""
    folders = [part] + [key for key in ARROWS if inside.startswith(key.removeprefix(f"{part}/") + "/")]
    return {part}.union(*(ARROWS[key] for key in folders))


def violations(part: str, inside: str, source: str) -> list[str]:
    """Imports in a module that no arrow allows."""
    bad = []
    package = ["openinfer", part, *inside.split("/")[:-1]]
    for name in imports(ast.parse(source), package):
        first, *rest = name.split(".")
        if first in REFUSED or (first == "openinfer" and rest[0] not in allowed(part, inside)):
            bad.append(name)
        elif part == "recipes" and rest[:1] == ["recipes"]:
            # Recipes import the engine and heads, never each other. Heads import the engine, which imports neither.
            own = inside.split("/")[0]
            if rest[1] not in {own, "engine"} | (set() if own == "engine" else HEADS):
                bad.append(name)
    return bad


@pytest.mark.parametrize("part", SOURCES)
def test_imports_follow_the_arrows(part: str) -> None:
    assert modules(part)
    bad = {}
    for path in modules(part):
        found = violations(part, path.relative_to(SOURCES[part]).as_posix(), path.read_text())
        if found:
            bad[str(path.relative_to(ROOT))] = found
    assert not bad, "imports outside the arrows of docs/design.md"


@pytest.mark.parametrize(
    ("part", "inside", "source"),
    [
        ("tensor", "loading.py", "import torch"),
        ("tensor", "loading.py", "from openinfer.kernels import Op"),
        ("frontend", "http/app.py", "def f():\n    import pickle"),
        ("scheduler", "loop.py", "from openinfer import kvpool"),
        ("scheduler", "loop.py", "from .. import kvpool"),
        ("sampler", "reference.py", "from openinfer.tensor import Tensor"),
        ("kernels", "store.py", "import openinfer.recipes.qwen3"),
        ("recipes", "qwen3_5/model.py", "from openinfer.recipes.qwen3.model import Model"),
        ("recipes", "engine/startup.py", "from openinfer.recipes.qwen3.recipe import RECIPE"),
        ("recipes", "engine/startup.py", "from openinfer.recipes.eagle3 import Head"),
        ("recipes", "eagle3/model.py", "from openinfer.recipes.qwen3.model import Model"),
        ("graph", "steps.py", "from openinfer.scheduler import Step"),
    ],
)
def test_a_wrong_import_is_noticed(part: str, inside: str, source: str) -> None:
    assert violations(part, inside, source)


def test_imports_that_are_allowed() -> None:
    assert not violations("scheduler", "testing/runner.py", "from ..step import Step\nfrom . import pool")
    assert not violations("sampler", "gpu/ops/sample.py", "from openinfer.kernels import Op")
    assert not violations("recipes", "qwen3/model.py", "from openinfer.recipes.qwen3.config import Config")
    assert not violations("recipes", "qwen3/recipe.py", "from openinfer.recipes.engine import Recipe")
    assert not violations("recipes", "qwen3/blueprint.py", "from openinfer.recipes.eagle3 import Head")
    assert not violations("graph", "runner/runner.py", "from openinfer.scheduler import Step")


KERNELS_FOR_OTHERS = {"authoring", "testing"}
"""Modules of kernels that other packages name. Device code may name all of openinfer.kernels.device."""


def kernels_internals(inside: str, source: str) -> list[str]:
    """Modules of kernels that a module names and that are not for others."""
    named = re.findall(r"^from openinfer\.kernels\.([\w.]+) import", source, re.MULTILINE)
    return [
        n
        for n in named
        if n not in KERNELS_FOR_OTHERS and not ("device/" in inside and n.startswith("device."))
    ]


@pytest.mark.parametrize("part", ["sampler", "recipes"])
def test_ops_of_others_are_written_with_public_names(part: str) -> None:
    found = {
        str(path): kernels_internals(path.relative_to(SOURCES[part]).as_posix(), path.read_text())
        for path in modules(part)
    }
    assert {path: names for path, names in found.items() if names} == {}
    assert kernels_internals("gpu/ops/a.py", "from openinfer.kernels.op.contract import f") == ["op.contract"]
    assert kernels_internals("gpu/ops/a.py", "from openinfer.kernels.device.rows import f") == ["device.rows"]


@pytest.mark.parametrize("part", SOURCES)
def test_packages_are_typed_and_openinfer_is_a_namespace(part: str) -> None:
    packages = [SOURCES["recipes"] / name for name in RECIPES] if part == "recipes" else [SOURCES[part]]
    for package in packages:
        assert (package / "py.typed").exists(), package
    source = next(p for p in SOURCES[part].parents if p.name == "src")
    assert not (source / "openinfer" / "__init__.py").exists()


def natural(name: str) -> tuple[bool, bool, str]:
    """The linter's order: constants, classes, the rest; numbers by value."""
    constant = name.isupper() and len(name) > 1
    return not constant, not name[0].isupper(), re.sub(r"\d+", lambda m: m[0].zfill(4), name)


@pytest.mark.parametrize("part", SOURCES)
def test_exports_are_sorted(part: str) -> None:
    lists = 0
    for path in modules(part):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names = ast.literal_eval(node.value)
                assert names == sorted(names, key=natural), path
                lists += 1
    assert lists


CODE = {".py", ".cu", ".cuh"}
LINES = {
    "tensor": (3885, 2991),
    "kernels": (23108, 10885),
    "graph": (4250, 2749),
    "kvpool": (6232, 5139),
    "sampler": (4508, 3945),
    "scheduler": (4752, 3615),
    "frontend": (12924, 11763),
    "recipes": (14570, 4169),
    "cli": (6487, 0),
}
"""At most so many lines of source and of tests: the sums are the budget, not the files. Each release lowers it."""


def test_the_sums_are_within_their_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    git = ["git", "-C", str(ROOT)]
    described = subprocess.run([*git, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True)
    tag, over = described.stdout.strip(), []
    for part, budget in LINES.items():
        folder = ROOT / ("src" if part == "cli" else part if part == "recipes" else f"libs/{part}")
        for kind, path, allowed in zip(
            ("source", "tests"), (folder / "src", folder / "tests"), budget, strict=True
        ):
            path = folder if part == "cli" and kind == "source" else path
            found = lines_of(path)
            since = lines_at(tag, path) if tag else None
            change = "" if since is None else f", {found - since:+d} since {tag}"
            with capsys.disabled():
                print(f"\n{part}: {found} lines of {kind}, budget {allowed}{change}", end="")
            over += [f"{part}: {found} lines of {kind} > {allowed}"] if found > allowed else []
    assert over == []


def lines_of(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*") if path.suffix in CODE)


def lines_at(revision: str, folder: Path) -> int | None:
    """Lines of a folder's modules at a revision; None where there is no such revision."""
    git = ["git", "-C", str(ROOT)]
    names = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", revision, folder.relative_to(ROOT).as_posix()],
        capture_output=True,
        text=True,
    )
    if names.returncode:
        return None
    blobs = [f"{revision}:{name}" for name in names.stdout.split() if Path(name).suffix in CODE]
    return sum(
        subprocess.run([*git, "show", blob], capture_output=True, text=True).stdout.count("\n")
        for blob in blobs
    )


def test_processes_that_serve_http_do_without_numpy() -> None:
    """It takes a third of their start. The first of them looks for the model's recipe too."""
    modules = ("http", "web", "frontend_process", "render_process")
    found = f"openinfer.cli.recipes as m; m.find(m.checkpoint({str(ROOT / 'demo' / 'qwen3')!r}))"
    for code in (*(f"openinfer.frontend.{module}" for module in modules), found):
        command = [sys.executable, "-c", f"import sys, {code}; print('numpy' in sys.modules)"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n", code


def test_the_engine_knows_no_model() -> None:
    words = re.compile(r"model_type|qwen|deepseek|llama(?!3)", re.I)
    folder = SOURCES["recipes"] / "engine"
    assert [path.name for path in folder.rglob("*.py") if words.search(path.read_text())] == []


@pytest.mark.parametrize("part", [*(f"libs/{name}" for name in LIBRARIES), "recipes"])
def test_a_distribution_has_what_a_reader_expects(part: str) -> None:
    folder = ROOT / part
    for name in ("README.md", "pyproject.toml"):
        assert len((folder / name).read_text().splitlines()) > 3, folder / name
    assert "0.1.0" in (folder / "CHANGELOG.md").read_text()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def check_wheels(*arguments: str) -> str:
    script = str(ROOT / "scripts" / "check_wheels.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_wheel(library: str) -> None:
    check_wheels(library)


@pytest.mark.slow
def test_a_recipe_of_others_from_wheels() -> None:
    assert "llama: ok" in check_wheels("--pinned", "llama")


MAX_EXAMPLE_LINES = 410


def test_a_recipe_of_others_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    count = lines_of(ROOT / "examples" / "llama" / "src")
    with capsys.disabled():
        print(f"\nexamples/llama: {count} of {MAX_EXAMPLE_LINES} lines", end="")
    assert count <= MAX_EXAMPLE_LINES


@pytest.mark.slow
def test_against_previous_releases() -> None:
    assert check_wheels("--previous")


def public_names(part: str) -> Iterator[tuple[str, str]]:
    """Functions and classes at the top of the modules of a part, each with its module."""
    for path in modules(part):
        for node in ast.parse(path.read_text()).body:
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named and not node.name.startswith("_") and node.name not in HOOKS:
                yield node.name, str(path.relative_to(SOURCES[part]))


def twice(places: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Names that stand in several places."""
    found: dict[str, set[str]] = {}
    for name, place in places:
        found.setdefault(name, set()).add(place)
    return {name: places for name, places in found.items() if len(places) > 1}


@pytest.mark.parametrize("part", SOURCES)
def test_a_public_name_means_one_thing_in_a_library(part: str) -> None:
    names = public_names(part)
    if part == "recipes":  # each is read alone, and none imports another
        names = ((name, place) for name, place in names if name not in OF_EACH_RECIPE)
    found = twice(names)
    assert not {name: found[name] for name in found.keys() - REFERENCES - COMPILED}


def test_a_public_name_of_two_libraries_is_a_known_pair() -> None:
    places = ((name, part) for part in SOURCES for name, _ in public_names(part))
    places = ((name, part) for name, part in places if name not in OF_EACH_RECIPE | REFERENCES | COMPILED)
    found = twice(places)
    assert not {name: found[name] for name in found.keys() - PAIRS}
    assert not PAIRS - found.keys(), "these stand in one library only: take them from the list"


def test_a_name_with_two_meanings_is_found() -> None:
    assert twice([("Load", "a.py"), ("Load", "b.py"), ("Part", "a.py")]) == {"Load": {"a.py", "b.py"}}
