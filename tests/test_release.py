"""The release script, on a copy of a library."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from module_files import module_at
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return module_at(ROOT / "scripts" / "release.py")


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "libs" / "graph", tmp_path / "graph"))


def test_a_version_and_the_siblings_ranges_are_set(release: ModuleType, graph: Path) -> None:
    before = (graph / "pyproject.toml").read_text()
    release.set_version(graph, Version("7.3.1"))
    alone = (graph / "pyproject.toml").read_text()
    assert alone.replace('version = "7.3.1"', "") == before.replace(
        next(line for line in before.splitlines() if line.startswith("version = ")), ""
    )
    release.set_ranges(graph, Version("7.3.1"))
    text = (graph / "pyproject.toml").read_text()
    assert '"openinfer-tensor>=7.3,<7.4"' in text
    assert '"openinfer-sampler[gpu]>=7.3,<7.4"' in text
    assert '"openinfer-graph[runner]"' in text
    assert '"pytest>=8"' in text


def test_a_changelog_is_dated_once(release: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "CHANGELOG.md"
    path.write_text("# x\n\n## Unreleased\n\n- A thing.\n\n## 0.1.0\n")
    for _ in range(2):
        release.date_changelog(path, "0.2.0", "2026-11-22")
        assert path.read_text() == "# x\n\n## 0.2.0 (2026-11-22)\n\n- A thing.\n\n## 0.1.0\n"
    with pytest.raises(release.CheckFailed, match="no section '## Unreleased'"):
        release.date_changelog(path, "0.3.0", "2026-11-23")


def test_what_is_built_is_checked(release: ModuleType, graph: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    for file in release.build(graph, good):
        release.check_file(file)
    text = (graph / "pyproject.toml").read_text()
    (graph / "pyproject.toml").write_text(text.replace('license-files = ["LICENSE"]', "license-files = []"))
    (graph / "LICENSE").unlink()
    for file in release.build(graph, bad):
        with pytest.raises(release.CheckFailed, match=r"LICENSE|License-File"):
            release.check_file(file)


def test_the_sdist_of_the_command_holds_nothing_of_the_libraries(release: ModuleType, tmp_path: Path) -> None:
    sdist, _ = release.build(ROOT, tmp_path)
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {name.partition("/")[0] for name in names} - {
        "src", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore",
    } == set()  # fmt: skip


def test_the_workflow_builds_what_the_tag_names_and_trusts_one_job(release: ModuleType) -> None:
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    assert text.count("id-token: write") == 1
    assert "secrets." not in text
    named = re.search(r'release\.py "\$\{GITHUB_REF_NAME##\*-v\}" "\$\{GITHUB_REF_NAME%-v\*\}" (.*)', text)
    assert named is not None
    for name in release.FOLDERS:
        script = 'echo "${GITHUB_REF_NAME##*-v}" "${GITHUB_REF_NAME%-v*}"'
        said = subprocess.run(
            ["bash", "-c", script], env={"GITHUB_REF_NAME": f"{name}-v0.3.0"}, capture_output=True
        )
        version, folder = said.stdout.decode().split()
        args = release._parser().parse_args([version, folder, *named[1].split()])
        assert (args.version, args.libraries, args.quick) == ("0.3.0", [name], True)


def test_every_distribution_has_the_name_of_its_tag(release: ModuleType) -> None:
    for name in release.FOLDERS:
        assert release.project(name)["name"] == f"openinfer-{name}"  # `openinfer` is taken on the index
    for folder in (*release.FOLDERS.values(), *release.EXAMPLES):
        text = (ROOT / folder / "pyproject.toml").read_text()
        wanted = {Requirement(one).name for one in re.findall(r'"(openinfer\b[^"/]*[\d\]])"', text)}
        assert wanted <= {f"openinfer-{name}" for name in release.FOLDERS}, folder


def test_nothing_is_published_under_an_address_that_is_none() -> None:
    """The workflow's first step, here: the tree has a placeholder until someone gives it an address."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
    (check,) = [
        step["run"] for step in workflow["jobs"]["build"]["steps"] if ".example" in step.get("run", "")
    ]
    done = subprocess.run(["bash", "-e", "-c", check], cwd=ROOT, capture_output=True, text=True)
    placeholder = "openinfer.example" in (ROOT / "pyproject.toml").read_text()
    assert done.returncode == placeholder, done.stdout
