"""The checker of prose flags what the rule in CONTRIBUTING.md bans, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from module_files import module_at

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "check_language.py"
LONG = "The pool " + "gives a block to a sequence " * 4 + "now."  # 27 words


@pytest.fixture(scope="module")
def language() -> ModuleType:
    return module_at(SCRIPT)


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('"""Takes a block. Those of the prefix stay."""', "subject 'Those'"),
        ('"""What a step costs."""', "subject 'What'"),
        ('"""Of one check or suite."""', "fragment 'Of'"),
        ("# Nobody reads it.\nx = 1\n", "idiom 'Nobody'"),
        ("# The request's grammar\n# is none.\n", "idiom 'is none'"),
        ("x = 1  # so many of them\n", "idiom 'so many'"),
        (f'"""{LONG}"""', "27 words"),
        (f"x = 1\n# {LONG[:60]}\n# {LONG[60:]}\n", " words: "),
        ('x = 1\n"""A pair of threads takes 4.5 us."""\n', "measured time '4.5 us'"),
        ('parser.add_argument("--rows", help="be it the first")', "idiom 'be it'"),
        ('parser.add_argument("--key", help="of the server")', "fragment 'of'"),
        ('parser.add_argument("--rows", help=f"{n} rows; so many")', "idiom 'so many'"),
    ],
)
def test_source_that_breaks_the_rule_is_flagged(
    language: ModuleType, tmp_path: Path, source: str, finding: str
) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert finding in " ".join(text for _, text in language.findings(path))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("Whoever asks is answered.\n", "subject 'Whoever'"),
        ("- It is short.\n- Such rows wait.\n", "subject 'Such'"),
        ("| a | What stays is kept. |\n", "subject 'What'"),
        (f"# Title\n\n{LONG}\n", "27 words"),
        ("word " * 40, "characters"),
    ],
)
def test_a_document_that_breaks_the_rule_is_flagged(
    language: ModuleType, tmp_path: Path, text: str, finding: str
) -> None:
    path = tmp_path / "document.md"
    path.write_text(text)
    assert finding in " ".join(found for _, found in language.findings(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("question.py", '"""Make a plan.\n\nWhat does a step cost?\n"""'),
        ("value.py", '"""The limit. It is None if the pool has no limit: `as it is`."""'),
        ("shapes.py", '"""Attend.\n\n    ' + "q: (rows, heads, width) bfloat16\n    " * 12 + '\n"""'),
        ("example.py", '"""A model:\n\n    load(x)\n    print("What is it? Nobody knows.")\n"""'),
        ("table.py", '"""Sizes.\n\nname     rows     bytes\n' + "qwen3    8        16\n" * 12 + '"""'),
        ("list.py", '"""Parts:\n\n' + "- a block of the pool\n" * 12 + '"""'),
        ("code.py", "x = 'nobody'  # type: ignore[so many]\ny = 'What is ours. Those are yours.'\n"),
        ("order.py", '"""Sort them. Of equal ones the first stays.\n\nOf each row there is one."""'),
        ("number.py", '"""' + "The kernel was measured on one H200. " * 12 + '"""'),
        ("heading.md", "# What it is\n\nA pool.\n"),
        ("code.md", "Run:\n\n    " + "word " * 26 + "\n\n```\nnobody\n" + "word " * 26 + "\n```\n"),
        ("link.md", "Read [the page](https://" + "x" * 150 + ").\n"),
        (
            "table.md",
            "| name | What it is |\n| --- | --- |\n| "
            + "x" * 150
            + " | 1 |\n| "
            + "a name, " * 20
            + "| 2 |\n",
        ),
    ],
)
def test_prose_that_keeps_the_rule_is_not(
    language: ModuleType, tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert language.findings(path) == []


def test_the_line_of_a_finding_is_the_line_of_its_paragraph(language: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A pool.\n\nIt is short.\n\nNobody waits.\n"""\n')
    assert {line for line, _ in language.findings(path)} == {5}


def test_source_of_every_library_and_all_documents_are_read(language: ModuleType) -> None:
    read = {str(path.relative_to(ROOT)) for path in language.files()}
    assert {"README.md", "docs/design.md", "recipes/README.md", "scripts/check_language.py"} <= read
    for folder in ("libs/kvpool/src", "recipes/src", "src/openinfer/cli", "examples", "benchmarks"):
        assert any(name.startswith(folder) and name.endswith(".py") for name in read), folder
    assert not [name for name in read if "/tests/" in name and name.endswith(".py")]
