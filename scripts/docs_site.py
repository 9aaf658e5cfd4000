"""mkdocs hook: the pages of the site are the documents of the checkout, at the paths where they are.

So a link between two documents works on the site and in the checkout. A link to another file leads to a copy of that
file. A link to a folder leads to its README; a folder without a README stays text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/*.md", "benchmarks/*.md", "libs/*/README.md", "recipes/**/README.md", "examples/*/README.md",
            "tools/*/README.md")  # fmt: skip
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in PATTERNS
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
APIS = ("tensor", "kernels", "graph", "kvpool", "scheduler", "sampler", "frontend", "recipes.engine", "llm")
LINK = re.compile(r"(?<!!)\[([^]\[]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The documents, the files that they link to, and a page of API for each library."""
    pages = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in DOCUMENTS]
    linked = {
        target
        for name in DOCUMENTS
        for _, link, _ in LINK.findall((ROOT / name).read_text())
        if not link.startswith("http") and (ROOT / (target := resolved(name, link))).is_file()
    }
    copies = [
        File.generated(config, name, abs_src_path=str(ROOT / name)) for name in sorted(linked - {*DOCUMENTS})
    ]
    made = [
        File.generated(config, f"api/{name}.md", content=f"# openinfer.{name}\n\n::: openinfer.{name}\n")
        for name in APIS
    ]
    others = [file for file in files if not file.src_uri.endswith(".md")]
    return Files([*others, *pages, *copies, *made])


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The document with its links to folders led to their READMEs."""
    name = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        target = resolved(name, link)
        if link.startswith(("http", "mailto:")) or not (ROOT / target).is_dir():
            return match[0]
        readme = f"{target}/README.md".removeprefix("./")
        if readme not in DOCUMENTS:
            return text
        return f"[{text}]({os.path.relpath(readme, os.path.dirname(name) or '.')}{anchor or ''})"

    return LINK.sub(replaced, markdown)


def resolved(document: str, link: str) -> str:
    """A link's target, from the root of the checkout."""
    return os.path.normpath(os.path.join(os.path.dirname(document), link))
