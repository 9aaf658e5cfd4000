"""The documents are true: links lead somewhere, and the module map names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "libs", "recipes")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


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
