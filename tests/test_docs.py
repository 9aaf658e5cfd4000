"""The documents are true: links lead somewhere, and the module map names what is there."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openinfer.kernels.testing import of_the_day

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "libs", "recipes")
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("tools/*/*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
)

MAX_DOCS_BYTES = 200_000


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_each_page_is_linked_and_of_a_readable_size() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    linked = {
        (path.parent / target).resolve()
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", path.read_text())
        if not target.startswith("http") and (path.parent / target).resolve() != path
    }
    assert [path for path in pages if path not in linked] == []
    sizes = {path: path.stat().st_size for path in pages}
    assert {path: size for path, size in sizes.items() if size > 30_000} == {}
    assert sum(sizes.values()) <= MAX_DOCS_BYTES


def test_the_module_map_is_complete() -> None:
    rows = re.findall(r"^\| (\w+) \| (`.*) \|$", (ROOT / "docs" / "structure.md").read_text(), re.M)
    assert len(rows) == 7
    for library, modules in rows:
        named = set(re.findall(r"`([\w/]+)`", modules)) | {"errors"}
        folder = ROOT / "libs" / library / "src" / "openinfer" / library
        there = {p.stem for p in folder.glob("*.py") if p.stem != "__init__"}
        there |= {f"{p.name}/" for p in folder.iterdir() if p.is_dir() and list(p.glob("*.py"))}
        assert there - named == set(), f"{library}: not in the map"
        assert named - there == set(), f"{library}: in the map only"


def test_the_map_has_the_engine_and_the_scripts() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    _, _, engine = text.partition("All recipes share `engine/`.")
    for folder, part in (("recipes/src/openinfer/recipes/engine", engine), ("scripts", text)):
        there = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
        assert there - set(re.findall(r"`(\w+)`", part)) == set(), f"{folder}: not in the map"


def test_the_flag_reference_is_what_the_options_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "flag_reference.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run scripts/flag_reference.py"


def test_prose_has_no_phrase_that_contributing_rules_out() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_language.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, f"see CONTRIBUTING.md, Language:\n{done.stdout}{done.stderr}"


@pytest.fixture
def docs_pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("docs_pages")


def test_the_picture_of_the_parts_is_what_they_import(docs_pages: Any) -> None:
    assert (ROOT / "docs/architecture.md").read_text() == docs_pages.architecture(), "scripts/docs_pages.py"


FOLDER = ROOT / "recipes/src/openinfer/recipes"
RECIPES = sorted({path.parent.name for path in FOLDER.glob("*/recipe.py")} - {"engine", "deepseek_v4"})


@pytest.mark.parametrize("recipe", of_the_day(RECIPES))
def test_the_memory_of_checkpoints_is_what_engines_plan(docs_pages: Any, recipe: str) -> None:
    """The first published size of a recipe for one GPU. `--check` has all of them, and takes a minute."""
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (own,) = (one for one in docs_pages.ours() if one.name == recipe)
    name, config = next(iter(own.published().items()))
    cells = re.escape(" | ".join(docs_pages.row(own, name, config)[1:]))
    found = re.search(rf"^\| {re.escape(name)}(,[^|]*)? \| {cells} \|$", text, re.M)
    assert found, "run scripts/docs_pages.py"


@pytest.mark.slow
def test_the_pages_made_from_code_are_up_to_date() -> None:
    assert (
        subprocess.run([sys.executable, str(ROOT / "scripts" / "docs_pages.py"), "--check"]).returncode == 0
    )


def test_the_lines_that_troubleshooting_quotes_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## While it runs")[0]
    quoted = [
        part for row in re.findall(r"^\| (`.*?) \| ", text, re.M) for part in re.findall(r"`([^`]+)`", row)
    ]
    assert len(quoted) > 5
    source = "".join(
        path.read_text() for top in ("src", "libs", "recipes/src") for path in (ROOT / top).rglob("*.py")
    )
    assert [part for part in quoted if part not in source] == []


def test_the_site_has_every_document() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    there = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS if path.name != "CHANGELOG.md"}
    assert there <= named, "mkdocs.yml names it"


def fault_rows() -> list[list[tuple[str, str]]]:
    """(module, part of a test's name) of all tests, row by row of the tables in faults.md."""
    rows = []
    module = ""
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines():
        if not line.startswith("|") or line.startswith("| ---"):
            continue
        last = line.rstrip("|").rpartition("|")[2]
        if line.startswith("| what happens"):
            module = "".join(re.findall(r"`(test_\w+)`", last))
            continue
        row = []
        for given, parts in re.findall(r"`(?:(test_\w+): )?([^`]+)`", last):
            module = given or module
            row += [(module, part.split("[")[0].strip()) for part in parts.split(",")]
        assert row, f"no test: {line}"
        rows.append(row)
    return rows


@functools.cache
def names_in(module: str) -> dict[str, bool]:
    """Names of the tests in all modules of that name, and whether CI runs them."""
    folders = (ROOT / "tests", ROOT / "recipes/tests", *ROOT.glob("libs/*/tests"))
    paths = [folder / f"{module}.py" for folder in folders]
    nodes = [node for path in paths if path.exists() for node in ast.parse(path.read_text()).body]
    functions = [
        node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {
        f.name: not any(ast.unparse(d).endswith("mark.slow") for d in f.decorator_list) for f in functions
    }


def test_every_fault_has_its_test_in_ci() -> None:
    rows = fault_rows()
    assert len(rows) > 20
    for row in rows:
        found = [(one, [q for name, q in names_in(one[0]).items() if one[1] in name]) for one in row]
        assert [one for one, quick in found if not quick] == [], "no such test"
        assert any(any(quick) for _, quick in found), f"none in CI: {row}"


def test_the_metrics_that_are_said_to_be_the_same_are_there() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    same, _, rest = text.partition("## With a difference")
    said = set(re.findall(r"`(vllm:\w+)`", same))
    missing = set(re.findall(r"`(vllm:\w+)`", rest.partition("## Not here")[2])) - {
        "vllm:e2e_request_latency_seconds"
    }
    source = (ROOT / "libs/frontend/src/openinfer/frontend/http/admin/metrics.py").read_text()
    made = {f"vllm:{name}" for name in re.findall(r'new\(\s*"(\w+)"', source)} | set(
        re.findall(r'"(vllm:\w+)"', source)
    )
    assert said == made
    assert not missing & made
