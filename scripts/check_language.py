"""Hold prose to the rule of CONTRIBUTING.md: `python scripts/check_language.py [PATH ...]`.

It reads docstrings, comments and help texts of the shipped source, and all Markdown. It finds banned subjects, idioms,
fragments, sentences of more than 25 words, measured times in docstrings, and Markdown lines over 140 characters.
The exit code is 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("libs", "recipes", "src", "examples", "scripts", "benchmarks")
SKIPPED = ("tests", "build", "results")

MAX_WORDS = 25
MAX_COLUMNS = 140
SUBJECT = re.compile(r"(What|Those|Who|Whoever|Nobody|Somebody|Such|Likewise|It all)\b")
IDIOM = re.compile(
    r"\b((?:is|are) none|so many|as it is|as they are|be it|yet an?|[Nn]obody|[Ss]omebody|[Ww]hoever|[Ll]ikewise)\b"
)
FRAGMENT = re.compile(r"([Oo]f|As|Whom)\b")  # "Of one check." leaves out the thing that it describes
TIME = re.compile(r"\b\d[\d.,]* ?(?:us|µs|microseconds?)\b")
# A sentence ends at its stop. A colon or semicolon ends one too: the parts are read one after the other.
END = re.compile(r"(?<=[.!?:;])[)\"'*_]*\s+| · ")
# A list's item begins a new piece of prose.
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
DIRECTIVE = re.compile(r"#!|#\s*(?:type|noqa|fmt|pragma|mypy)\b|#\s*-+\s*$")


@dataclass(frozen=True)
class Piece:
    """A paragraph, list item, heading, table cell, comment or help text. `line` is its first line in the file."""

    line: int
    text: str
    docstring: bool = False
    opening: bool = False  # of a docstring or help text
    heading: bool = False
    cell: bool = False


def main() -> int:
    """Print each finding; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; all if none is given")
    args = parser.parse_args()
    wanted = [path.resolve() for path in args.paths]
    count = 0
    for path in files():
        if wanted and not any(path.is_relative_to(one) for one in wanted):
            continue
        for line, text in findings(path):
            print(f"{path.relative_to(ROOT)}:{line}: {text}")
            count += 1
    return int(count > 0)


def files() -> list[Path]:
    """Shipped source and all Markdown, without tests, results and environments."""
    source = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    text = list(ROOT.rglob("*.md"))
    return sorted(path for path in source + text if not skipped(path.relative_to(ROOT)))


def skipped(path: Path) -> bool:
    """Whether a path, relative to the checkout, is neither shipped nor a document."""
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or (path.suffix == ".py" and any(part in SKIPPED for part in path.parts))


def findings(path: Path) -> list[tuple[int, str]]:
    """(line, finding) of one file."""
    content = path.read_text()
    if path.suffix == ".py":
        return check(source_pieces(content))
    return [*check(markdown_pieces(content)), *long_lines(content)]


def check(pieces: Iterator[Piece]) -> list[tuple[int, str]]:
    """Findings in pieces of prose."""
    found = []
    for piece in pieces:
        text = plain(piece.text)
        found += [(piece.line, f"idiom {match[0]!r}") for match in IDIOM.finditer(text)]
        if piece.opening and (start := FRAGMENT.match(text)):
            found.append((piece.line, f"fragment {start[0]!r}: {text[:60]}"))
        if piece.docstring:
            found += [(piece.line, f"measured time {match[0]!r}") for match in TIME.finditer(text)]
        for sentence in END.split(text):
            subject = SUBJECT.match(sentence.lstrip("*_(\"'"))
            if subject and not piece.heading and not sentence.rstrip("*_)\"'").endswith("?"):
                found.append((piece.line, f"subject {subject[0]!r}: {sentence[:60]}"))
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > MAX_WORDS and not piece.cell:  # a cell may be a list of names
                found.append((piece.line, f"{count} words: {sentence[:60]} ..."))
    return found


def plain(text: str) -> str:
    """Prose on one line: code in backticks is a word, a link is its text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"`+[^`]*`+", "`x`", text)).strip()


def source_pieces(source: str) -> Iterator[Piece]:
    """Docstrings, help texts and comments of a module. Comments on lines that follow each other are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield from paragraphs(node.value.value, node.lineno, node.col_offset, docstring=True)
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    for piece in paragraphs(part.value, part.lineno):
                        yield replace(piece, opening=part is node.value)
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        own = not token.line[: token.start[1]].strip()
        if block and not (own and token.start[0] == last + 1):
            yield from paragraphs("\n".join(block), first)
            block = []
        if not block:
            first = token.start[0]
        block.append(token.string.lstrip("#").removeprefix(" "))
        last = token.start[0] if own else -1
    yield from paragraphs("\n".join(block), first)


def paragraphs(text: str, line: int, margin: int = 0, *, docstring: bool = False) -> Iterator[Piece]:
    """The prose in a docstring or comment: without tables, and without code, which is indented deeper than `margin`."""
    lines = text.split("\n")
    block: list[str] = []
    first, blank, code = line, True, False
    for number, one in enumerate(lines):
        deep = number > 0 and indent(one) >= margin + 4
        code = bool(one.strip()) and deep and (blank or code)
        blank = not one.strip()
        table = re.search(r"\S {3,}\S|\S  +\S.*\S  +\S|[├└]──", one) or one.lstrip().startswith(">>>")
        if blank or code or table or ITEM.match(one):
            if block:
                yield Piece(first, "\n".join(block), docstring, docstring and first == line)
            block = []
        if blank or code or table:
            continue
        if not block:
            first = line + number
        block.append(ITEM.sub("", one, count=1) if not block else one)
    if block:
        yield Piece(first, "\n".join(block), docstring, docstring and first == line)


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def markdown_pieces(content: str) -> Iterator[Piece]:
    """Paragraphs, list items, headings and cells of a document, without code."""
    block: list[str] = []
    first, fence, listed = 1, False, False
    lines = [*content.split("\n"), ""]
    for number, line in enumerate(lines, 1):
        marks = line.lstrip().startswith("```")
        code = fence or marks or (line.startswith("    ") and not block and not listed)
        fence ^= marks
        apart = code or line.startswith(("#", "|", "<"))
        if block and (apart or not line.strip() or ITEM.match(line)):
            yield Piece(first, "\n".join(block))
            block = []
        if not code and line.startswith("#"):
            yield Piece(number, line.lstrip("# "), heading=True)
        elif not code and line.startswith("|"):
            top = lines[number : number + 1] and lines[number].startswith(("|--", "| --"))
            yield from (
                Piece(number, cell, heading=bool(top), cell=True) for cell in line.strip("|").split("|")
            )
        elif not apart and line.strip():
            listed = bool(ITEM.match(line)) or (listed and line.startswith(" "))
            if not block:
                first = number
            block.append(ITEM.sub("", line, count=1) if not block else line)


def long_lines(content: str) -> Iterator[tuple[int, str]]:
    """Lines of a document that are too long. Tables are exempt; a link counts as its text."""
    for number, line in enumerate(content.split("\n"), 1):
        width = len(re.sub(r"\]\([^)]*\)", "]", line))
        if width > MAX_COLUMNS and not line.startswith("|"):
            yield number, f"{width} characters"


if __name__ == "__main__":
    sys.exit(main())
