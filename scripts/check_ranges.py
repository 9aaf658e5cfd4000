"""Declared ranges hold: `python scripts/check_ranges.py [oldest] [newest] [--quick]`, by default both.

`oldest` makes an environment where each package that a library or recipe depends on has the lower bound of its range.
`newest` makes one where each has the newest version that its range admits. Tools that only tests need have the versions
of .ci/constraints.txt. In each environment the suites of every project with such a dependency run, and every kernel
of every recipe is compiled for sm_90. `make test` runs with the versions of constraints.txt.

--quick, for CI: one end, the other one at the next commit; every second suite, the others two commits later; every
twelfth kernel, beginning by the day; and libs/kernels only with the newest versions, because make test runs it with
the oldest Triton.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_wheels import INSTALL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_tests import commits

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
PROJECTS = ["", "recipes", *sorted(f"libs/{path.name}" for path in (ROOT / "libs").iterdir())]
TEST_ONLY = {"test", "plot"}
"""Extras whose packages keep their pins: no user's engine needs them."""
SUITES = ["libs/tensor", "libs/kernels", "libs/graph", "libs/sampler", "libs/frontend", "recipes"]
"""kvpool and scheduler depend on nothing. With the oldest versions `recipes` is left out, because it depends on nothing
but the libraries, and make test runs it with the oldest Triton."""


def main() -> int:
    """Check the ends asked for, one after the other; 0 if both hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ends", nargs="*", choices=[[], "oldest", "newest"], metavar="oldest|newest")
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="run only this suite, without compiling"
    )
    parser.add_argument("--quick", action="store_true", help="run only the part that fits into CI's time")
    args = parser.parse_args()
    ends = args.ends or ["oldest", "newest"]
    if args.quick and not args.ends:
        ends = [ends[commits() % 2]]
    with (
        tempfile.TemporaryDirectory(prefix="openinfer-ranges-") as temporary,
        ThreadPoolExecutor(1) as installer,  # the second environment is made while the first one is used
    ):
        environments = installer.map(lambda end: install(end, Path(temporary, end)), ends)
        failed = [
            end
            for end, python in zip(ends, environments, strict=True)
            if not holds(end, python, args.suite, args.quick)
        ]
    print(f"ranges: {'FAILED: ' + ', '.join(failed) if failed else ', '.join(ends) + ' hold'}")
    return 1 if failed else 0


def holds(end: str, python: str | None, suites: list[str] | None, quick: bool) -> bool:
    """Run everything in the environment of one end of all ranges."""
    if python is None:
        return False
    left_out = {"recipes", *(["libs/kernels"] if quick else [])} if end == "oldest" else set()
    suites_of_end = suites or [suite for suite in SUITES if suite not in left_out]
    if quick and not suites:
        suites_of_end = suites_of_end[commits() // 2 % 2 :: 2]
    compiling = ["compile_kernels.py", *(["--every", "12"] if quick else [])]
    scripts = [["run_tests.py", *suites_of_end], *([] if suites else [compiling])]
    # Tests compile kernels for another architecture each day, which make test has done.
    environment = {**os.environ, "OPENINFER_TEST_ARCHS": "90"}
    good = True
    for script, *arguments in scripts:
        print(f"== {end}: {script}", flush=True)
        command = [python, str(ROOT / "scripts" / script), *arguments]
        good &= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    return good


def install(end: str, folder: Path) -> str | None:
    """An environment with every distribution of this checkout, editable, and packages of one end of their ranges.
    Gives its python; None, and pip's words on the screen, where versions do not go together."""
    # The newest pip: the one that Python 3.11 brings stumbles over constraints on requirements with extras.
    venv.create(folder, with_pip=True, upgrade_deps=True)
    python = str(folder / "bin" / "python")
    tools = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith(("#", "-c"))]
    bounds = lower_bounds() if end == "oldest" else []  # pip takes the newest by itself
    chosen = folder / "constraints.txt"
    chosen.write_text("\n".join([*tools, *bounds]) + "\n")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", *INSTALL]
    projects = [
        part
        for name in PROJECTS
        for part in ("-e", f"{ROOT / name}[{','.join(sorted(extras(name)))}]".removesuffix("[]"))
    ]
    for command in (
        [*pip, "hatchling", "editables"],
        [*pip, "--no-build-isolation", "-c", str(chosen), *projects],
    ):
        if subprocess.run(command, check=False).returncode:
            return None
    print(f"== {end}:", *versions(python), flush=True)
    return python


def versions(python: str) -> list[str]:
    """The versions that the environment has of the packages with a range."""
    names = sorted({canonicalize_name(r.name) for r in requirements()})
    code = "import sys; from importlib.metadata import version; print(*(f'{n}=={version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    return done.stdout.split()


def lower_bounds() -> list[str]:
    """Constraints that hold every package at the lower bound of its range."""
    pinned = (f"{r.name}=={s.version}" for r in requirements() for s in r.specifier if s.operator == ">=")
    return sorted(set(pinned))


def requirements() -> Iterator[Requirement]:
    """The requirements that the distributions of this checkout declare on other projects' packages, for users."""
    for name in PROJECTS:
        table = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        lists = [table["dependencies"]]
        lists += [
            texts for extra, texts in table.get("optional-dependencies", {}).items() if extra not in TEST_ONLY
        ]
        for requirement in (Requirement(text) for texts in lists for text in texts):
            if not requirement.name.startswith("openinfer"):
                yield requirement


def extras(name: str) -> set[str]:
    """The extras of a distribution, but for plots."""
    table = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    return set(table.get("optional-dependencies", {})) - {"plot"}


if __name__ == "__main__":
    sys.exit(main())
