"""Find phrases that a native engineer would not write: `python scripts/check_language.py [PATH ...]`.

It reads shipped source and all Markdown: phrases of PHRASES, and measured times in docstrings, which belong to a
document or a commit. The exit code is 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("libs", "recipes", "src", "examples", "scripts", "benchmarks")
SKIPPED = ("tests", "build", "results")
PHRASES = {
    r"\b(has|have|needs?) (it|them) not\b": "does not have, does not need",
    r"\bof theirs\b": "their",
    r"\bby turns\b": "alternating, in turn",
    r"\b(is|are|was|were) wanted\b": "is required, is requested",
    r"\btakes? note of\b": "records",
    r"\b(has|have|needs?) (it|them) no more\b": "no longer has",
}
"""A pattern, and what to write instead."""
TIME = re.compile(r"\b\d[\d.,]* ?(?:us|µs|microseconds?)\b")


def main() -> int:
    """Print each finding; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; all if none is given")
    args = parser.parse_args()
    given = [path.resolve() for path in args.paths]
    count = 0
    for path in files():
        if given and not any(path.is_relative_to(one) for one in given):
            continue
        for line, text in findings(path):
            print(f"{path.relative_to(ROOT)}:{line}: {text}")
            count += 1
    return int(count > 0)


def files() -> list[Path]:
    """Shipped source and all Markdown, without tests, results and environments."""
    source = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in [*source, *ROOT.rglob("*.md")] if not skipped(path.relative_to(ROOT)))


def skipped(path: Path) -> bool:
    """Whether a path, relative to the checkout, is neither shipped nor a document."""
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or (path.suffix == ".py" and any(part in SKIPPED for part in path.parts))


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, finding) of one file."""
    content = path.read_text()
    for pattern, better in PHRASES.items():
        for said in re.finditer(pattern, content if path != Path(__file__) else "", re.I):
            yield content.count("\n", 0, said.start()) + 1, f"{said[0]!r}: write {better}"
    # To parse all modules takes longer than the rest, and few have a time anywhere.
    for node in ast.walk(ast.parse(content)) if path.suffix == ".py" and TIME.search(content) else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and (match := TIME.search(text)):
                yield node.lineno, f"measured time {match[0]!r} in a docstring"


if __name__ == "__main__":
    sys.exit(main())
