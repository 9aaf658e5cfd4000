"""The checker of prose flags what CONTRIBUTING.md rules out, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from module_files import module_at

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def language() -> ModuleType:
    return module_at(ROOT / "scripts" / "check_language.py")


def test_a_measured_time_in_a_docstring_is_flagged(language: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('x = 1\n"""A pair of threads takes 4.5 us."""\n')
    assert list(language.findings(path)) == [(2, "measured time '4.5 us' in a docstring")]


@pytest.mark.parametrize("text", ["A tier has it not.", "Rows and prompts by turns.", "A key is wanted."])
def test_a_phrase_that_nobody_would_say_is_flagged(language: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.md"
    path.write_text(f"# Title\n\n{text}\n")
    ((line, finding),) = language.findings(path)
    assert line == 3
    assert ": write " in finding


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", '"""What a step costs. Nobody waits, as it is."""\nlimit = "4.5 us"\n'),
        ("a.md", "The kernel takes 4.5 us.\n"),
    ],
)
def test_prose_that_keeps_the_rule_is_not(
    language: ModuleType, tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert list(language.findings(path)) == []


def test_source_of_every_library_and_all_documents_are_read(language: ModuleType) -> None:
    read = {str(path.relative_to(ROOT)) for path in language.files()}
    assert {"README.md", "docs/design.md", "recipes/README.md", "scripts/check_language.py"} <= read
    for folder in ("libs/kvpool/src", "recipes/src", "src/openinfer/cli", "examples", "benchmarks"):
        assert any(name.startswith(folder) and name.endswith(".py") for name in read), folder
    assert not [name for name in read if "/tests/" in name and name.endswith(".py")]
