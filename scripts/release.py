"""Make a release: `python scripts/release.py VERSION [flags] [LIBRARY ...]`, by default of every distribution.

It sets the versions and the siblings' ranges, dates the changelogs, builds every sdist and its wheel, and checks
 - that each file holds the licence, and each wheel the metadata that an index shows;
 - that each library works alone, installed from its wheel (its tests too, with --tests);
 - that each library works with its siblings' previous releases, as far as its ranges admit them.
It commits, tags and publishes nothing: it prints the commands. Needs hatchling in this environment.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import check_wheels
from check_wheels import LIBRARIES, CheckFailed, command
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {**{name: f"libs/{name}" for name in LIBRARIES}, "recipes": "recipes", "cli": "."}
"""Where each distribution is, by the short name that its tags have."""
EXAMPLES = ("examples/llama",)
"""Distributions that are not released and declare ranges of those that are."""
SHOWN = (
    "License-Expression",
    "License-File",
    "Author",
    "Classifier",
    "Project-URL",
    "Description-Content-Type",
)
PLACEHOLDER = ".example"


def main() -> int:
    """Make the release; 0 once it is built and checked, 1 with one line where it is not."""
    args = _parser().parse_args()
    names = args.libraries or list(FOLDERS)
    try:
        for name in names:
            set_version(ROOT / FOLDERS[name], Version(args.version))
            date_changelog(ROOT / FOLDERS[name] / "CHANGELOG.md", args.version, args.date)
        if not args.libraries:
            for folder in (*FOLDERS.values(), *EXAMPLES):
                set_ranges(ROOT / folder, Version(args.version))
        args.out.mkdir(parents=True, exist_ok=True)
        files = [file for name in names for file in build(ROOT / FOLDERS[name], args.out)]
        for file in files:
            check_file(file)
        with tempfile.TemporaryDirectory(prefix="openinfer-release-") as work:
            check_ranges(names)
            if not args.quick:
                check_wheels_of(names, args.out, Path(work), tests=args.tests)
            check_previous(names, args.previous, args.out, Path(work), tests=args.tests)
    except (CheckFailed, InvalidVersion, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(_commands(names, args.version, args.out))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("version", metavar="VERSION", help="such as 0.2.0")
    add("libraries", nargs="*", choices=[[], *FOLDERS], metavar="LIBRARY", help=", ".join(FOLDERS))
    add("--date", default=datetime.date.today().isoformat(), help="date in the changelogs; default: today")
    add("--out", type=Path, default=ROOT / "dist", help="folder of the files; default: dist")
    add("--tests", action="store_true", help="run each library's tests on its wheel too")
    add("--quick", action="store_true", help="make no environment to try the wheels in")
    add("--previous", metavar="COMMIT", help="the previous release, for siblings that have no tag of it")
    return parser


def set_version(folder: Path, version: Version) -> None:
    """Set a distribution's version."""
    path = folder / "pyproject.toml"
    path.write_text(
        re.sub(r'^version = ".*"$', f'version = "{version}"', path.read_text(), count=1, flags=re.M)
    )


def set_ranges(folder: Path, version: Version) -> None:
    """Move the ranges of a distribution's siblings to this minor version: all of them are released."""
    path = folder / "pyproject.toml"
    bounds = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    path.write_text(re.sub(r'("openinfer(?:-[\w,\[\]-]+)?)>=[^"]*"', rf'\g<1>{bounds}"', path.read_text()))


def date_changelog(path: Path, version: str, date: str) -> None:
    """Turn the section Unreleased into the version's. Does nothing where that is done already. Raises CheckFailed."""
    text = path.read_text()
    if f"## {version}" in text:
        return
    if "## Unreleased\n" not in text:
        raise CheckFailed(f"{path} has no section '## Unreleased': say there what is new in {version}")
    path.write_text(text.replace("## Unreleased\n", f"## {version} ({date})\n", 1))


def build(folder: Path, out: Path) -> list[Path]:
    """The sdist of a distribution, and the wheel that its sdist gives."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        hatchling = [sys.executable, "-m", "hatchling", "build"]
        command(f"sdist of {folder}", [*hatchling, "-t", "sdist", "-d", str(work)], cwd=folder)
        (sdist,) = work.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(work)
        unpacked = work / sdist.name.removesuffix(".tar.gz")
        command(f"wheel of {sdist.name}", [*hatchling, "-t", "wheel", "-d", str(work)], cwd=unpacked)
        return [Path(shutil.copy(file, out)) for file in (sdist, *work.glob("*.whl"))]


def check_file(file: Path) -> None:
    """That a built file holds its licence, and a wheel the metadata that an index shows. Raises CheckFailed."""
    if file.suffix != ".whl":
        with tarfile.open(file) as archive:
            if not any(name.count("/") == 1 and name.endswith("/LICENSE") for name in archive.getnames()):
                raise CheckFailed(f"{file.name} has no LICENSE")
        return
    with zipfile.ZipFile(file) as wheel:
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        text = wheel.read(metadata).decode()
        missing = [key for key in SHOWN if not re.search(rf"^{key}: ", text, re.M)]
        if missing or not any(name.endswith("/licenses/LICENSE") for name in wheel.namelist()):
            raise CheckFailed(f"{file.name} lacks {', '.join(missing) or 'the file LICENSE'}")


def check_ranges(names: Sequence[str]) -> None:
    """That the ranges admit the siblings that are released together. Raises CheckFailed."""
    for name in names:
        for requirement in requirements(name):
            sibling = requirement.name.removeprefix("openinfer-")
            version = project(sibling)["version"]
            if version not in requirement.specifier:
                raise CheckFailed(f"{name} wants {requirement}, and {sibling} is {version} here")


def check_wheels_of(names: Sequence[str], out: Path, work: Path, *, tests: bool) -> None:
    """Each library alone from its wheel, and the command with everything. Raises CheckFailed."""
    rest = [name for name in FOLDERS if name not in names]
    wheels = {name: wheel(out, name) for name in names}
    for name in rest:  # unreleased siblings, from this checkout
        (work / "rest").mkdir(exist_ok=True)
        wheels[name] = build(ROOT / FOLDERS[name], work / "rest")[1]
    libraries = {name: wheels[name] for name in LIBRARIES}
    for name in names:
        if name in LIBRARIES:
            check_wheels.check(name, libraries, work / name, [], tests=tests)
            shutil.rmtree(work / name)
    if not rest:
        install_together(wheels, work)


def install_together(wheels: Mapping[str, Path], work: Path) -> None:
    """All distributions in one environment, and the command there. Raises CheckFailed."""
    command("an environment", [sys.executable, "-m", "venv", str(work / "all")])
    python = str(work / "all" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command("a new pip", [*pip, "-U", "pip"])
    command("install all", [*pip, *map(str, wheels.values())])
    versions = command("openinfer --version", [str(work / "all" / "bin" / "openinfer"), "--version"])
    if "not installed" in versions:
        raise CheckFailed(f"installed together, some are missing:\n{versions}")
    print(f"installed together:\n{versions}", flush=True)


def check_previous(names: Sequence[str], commit: str | None, out: Path, work: Path, *, tests: bool) -> None:
    """Each library with its siblings' previous releases. Raises CheckFailed for one that admits what it cannot use."""
    for name in names:
        old: dict[str, Path] = {}
        for requirement in requirements(name):
            sibling = requirement.name.removeprefix("openinfer-")
            found = previous(sibling, commit, work)
            if found is None:
                print(f"{name}: {sibling} has no previous release", flush=True)
                continue
            version = found.name.split("-")[1]
            if version in requirement.specifier:
                old[sibling] = found
            else:
                print(f"{name}: {requirement} keeps {sibling} {version} out", flush=True)
        if old and name in LIBRARIES:
            wheels = {
                each: wheel(out, each) for each in LIBRARIES if list(out.glob(f"openinfer_{each}-*.whl"))
            }
            check_wheels.check(name, {**wheels, **old}, work / f"{name}-old", [], tests=tests)
            print(f"{name}: works with {', '.join(path.name for path in old.values())}", flush=True)


def previous(name: str, commit: str | None, work: Path) -> Path | None:
    """The wheel of a distribution's release before the one here: from its newest older tag, else from `commit`."""
    current = Version(project(name)["version"])
    tags = command("git tag", ["git", "-C", str(ROOT), "tag", "--list", f"{name}-v*"]).split()
    older = [tag for tag in tags if Version(tag.removeprefix(f"{name}-v")) < current]
    start = max(older, key=lambda tag: Version(tag.removeprefix(f"{name}-v")), default=commit)
    if start is None:
        return None
    tree = work / f"previous-{name}"
    if not tree.exists():
        tree.mkdir()
        archive = ["git", "-C", str(ROOT), "archive", start, FOLDERS[name]]
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=packed, check=True)
        options = ("-q", "--no-deps", "--no-build-isolation", "-w", str(tree))
        command(
            f"{name} at {start}", [sys.executable, "-m", "pip", "wheel", *options, str(tree / FOLDERS[name])]
        )
    return wheel(tree, name)


def wheel(folder: Path, name: str) -> Path:
    """A distribution's wheel in a folder; the newest where there are several. Raises CheckFailed."""
    found = sorted(folder.glob(f"openinfer_{name}-*.whl"), key=lambda path: Version(path.name.split("-")[1]))
    if not found:
        raise CheckFailed(f"{folder} has no wheel of {name}")
    return found[-1]


def requirements(name: str) -> list[Requirement]:
    """The requirements with a range that a distribution declares on its siblings, once for each sibling."""
    table = project(name)
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    found = [Requirement(text) for texts in lists for text in texts if text.startswith("openinfer-")]
    return list({each.name: each for each in found if each.specifier}.values())


def project(name: str) -> dict[str, Any]:
    """The [project] table of a distribution."""
    table: dict[str, Any] = tomllib.loads((ROOT / FOLDERS[name] / "pyproject.toml").read_text())["project"]
    return table


def _commands(names: Sequence[str], version: str, out: Path) -> str:
    """The remaining commands of a release."""
    tags = [f"{name}-v{version}" for name in names]
    files = [str(path) for path in sorted(out.glob(f"openinfer*-{version}*"))]
    lines = [f'git commit -am "release: {version}"', *(f"git tag {tag}" for tag in tags)]
    lines += [f"git push origin HEAD {' '.join(tags)}", f"twine upload {' '.join(files)}"]
    urls = [url for name in names for url in project(name).get("urls", {}).values()]
    if any(PLACEHOLDER in url for url in urls):
        lines.insert(0, f"# first give [project.urls] the project's address: {PLACEHOLDER} is a placeholder")
    return f"{len(files)} files are built and checked. What is left:\n  " + "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
