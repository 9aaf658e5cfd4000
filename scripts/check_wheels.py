"""Each library from its wheel, alone: `python scripts/check_wheels.py [flags] [LIBRARY ...]`.

For every library (all by default) a fresh environment gets its wheel and what that declares, nothing else, and then
 - no torch is there, and declared ranges admit the siblings' current versions;
 - every public module imports, or is missing a package of a declared extra; kernels does so without Triton;
 - importing the library is fast: it makes few calls (CPU time on a busy machine would say little);
 - its README's examples run with its extras, but [test], and with what their comments `# pip install NAME` name.
In another environment its tests pass with its [test] extra, outside the checkout.
LIBRARY may also be `llama`: the tests of examples/llama pass with the whole project, all from wheels.
With --previous the siblings are their previous releases (git tags LIBRARY-vX.Y.Z); with --pinned everything else has
the versions of .ci/constraints.txt instead of the newest that the declared ranges allow.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("tensor", "kernels", "graph", "kvpool", "sampler", "scheduler", "frontend")
IMPORT_LIMIT = 5.0
"""Calls during an import in those of importing asyncio, of which numpy alone makes 2.6 times as many."""
EXAMPLE = "llama"
PYTEST = "import gc, sys, pytest; gc.set_threshold(20_000); sys.exit(pytest.main())"
"""Engines make millions of objects that stay. With the usual threshold, the collector looks at them again and again."""
INSTALL = ("--quiet", "--no-compile")
"""Most modules of an environment are never imported, and to compile all of them takes a third of the time."""
LEFT_OUT = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")
"""Variables that commands run without: the checkout's, and one that would have each process compile all modules."""
LEFT_OUT_EXTRAS = {"test", "cublas"}  # the second is half a gigabyte of libraries that nothing imports

MODULES = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
missing = {}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if "._" in module.name or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        missing[module.name] = cause.name or str(error)
print(json.dumps(missing))
"""
PACKAGES = """
import importlib.metadata, json
print(json.dumps([found.name for found in importlib.metadata.distributions()]))
"""
EXAMPLES = """
import re, sys
text = open(sys.argv[1]).read()
for block in re.findall(r"```python\\n(.*?)```", text, re.DOTALL):
    exec(compile(block, sys.argv[1], "exec"), {"__name__": "__main__"})
"""
IMPORT_CALLS = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
__import__(sys.argv[1])
sys.setprofile(None)
print(calls)
"""


class CheckFailed(Exception):
    """A library does not stand alone; the message says how."""


def main() -> int:
    """Check the libraries asked for; 0 if all pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--previous", action="store_true", help="use the siblings' previous releases")
    parser.add_argument("--pinned", action="store_true", help="use the versions of CI")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="JUnit report of the last library's tests"
    )
    parser.add_argument("libraries", nargs="*", choices=[[], *LIBRARIES, EXAMPLE], metavar="LIBRARY")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="openinfer-wheels-") as temporary:
        work = Path(temporary)
        wheels = build([ROOT / "libs" / name for name in LIBRARIES], work / "wheels")
        for library in args.libraries or LIBRARIES:
            try:
                if library == EXAMPLE:
                    check_example(work, [ROOT / ".ci" / "constraints.txt"] if args.pinned else [])
                    continue
                siblings = dict(wheels)
                if args.previous and not use_previous(library, siblings, work):
                    continue
                check_ranges(library, None if args.previous else wheels)
                constraints = [ROOT / ".ci" / "constraints.txt"] if args.pinned else []
                check(
                    library,
                    siblings,
                    work / f"env-{library}",
                    constraints,
                    report=args.report,
                )
            except CheckFailed as error:
                failed += 1
                print(f"{library}: FAILED: {error}", flush=True)
            shutil.rmtree(work / f"env-{library}", ignore_errors=True)
    return 1 if failed else 0


def build(projects: Iterable[Path], out: Path) -> dict[str, Path]:
    """Build wheels; gives them by library name."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    command("build", [sys.executable, "-m", "pip", "wheel", *options, *map(str, projects)])
    return {path.name.split("-")[0].removeprefix("openinfer_"): path for path in out.glob("openinfer*.whl")}


def project(library: str) -> Mapping[str, Any]:
    """The [project] table of a library."""
    table: Mapping[str, Any] = tomllib.loads((ROOT / "libs" / library / "pyproject.toml").read_text())[
        "project"
    ]
    return table


def sibling_requirements(library: str) -> list[Requirement]:
    """The requirements that a library declares on its siblings, in its dependencies and extras."""
    table = project(library)
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [r for r in found if r.name.startswith("openinfer-") and r.name != f"openinfer-{library}"]


def check_ranges(library: str, wheels: Mapping[str, Path] | None) -> None:
    """Raise CheckFailed where a declared range does not admit a sibling's version in this checkout."""
    for requirement in sibling_requirements(library) if wheels else []:
        version = project(requirement.name.removeprefix("openinfer-"))["version"]
        if version not in requirement.specifier:
            raise CheckFailed(f"it wants {requirement}, and {requirement.name} is {version} here")
        if not any(part.operator in ("<", "<=", "~=") for part in requirement.specifier):
            raise CheckFailed(f"{requirement} has no upper bound")


def use_previous(library: str, wheels: dict[str, Path], work: Path) -> bool:
    """Put the siblings' previous releases into `wheels`. False, and a line that says so, if no sibling has one."""
    found = []
    for name in sorted({r.name.removeprefix("openinfer-") for r in sibling_requirements(library)}):
        tags = command("git tag", ["git", "-C", str(ROOT), "tag", "--list", f"{name}-v*"]).split()
        current = Version(project(name)["version"])
        versions = [Version(tag.removeprefix(f"{name}-v")) for tag in tags]
        older = max((version for version in versions if version < current), default=None)
        if older is None:
            continue
        tree = work / f"{name}-{older}"
        if not tree.exists():
            tree.mkdir()
            archive = ["git", "-C", str(ROOT), "archive", f"{name}-v{older}", f"libs/{name}"]
            packed = subprocess.run(archive, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", str(tree)], input=packed, check=True)
        wheels[name] = build([tree / "libs" / name], tree / "wheels")[name]
        found.append(f"{name} {older}")
    if not found:
        print(f"{library}: no previous release of a sibling to test against", flush=True)
    else:
        print(f"{library}: against {', '.join(found)}", flush=True)
    return bool(found)


def check(
    library: str,
    wheels: Mapping[str, Path],
    folder: Path,
    constraints: list[Path],
    *,
    tests: bool = True,
    report: Path | None = None,
) -> None:
    """Install a library alone and look at it. Raises CheckFailed."""
    # A constraint with an address binds a sibling to the wheel built here, but only if something declares it.
    siblings = folder.with_suffix(".txt")
    siblings.write_text("".join(f"openinfer-{n} @ {path.as_uri()}\n" for n, path in wheels.items()))
    name, readme = f"openinfer-{library}", ROOT / "libs" / library / "README.md"

    def install(python: str, extras: Iterable[str], others: Iterable[str] = ()) -> None:
        wanted = f"{name}[{','.join(extras)}] @ {wheels[library].as_uri()}"
        bounds = [part for path in (siblings, *constraints) for part in ("-c", str(path))]
        command(f"install {wanted}", [*pip(python), "install", *INSTALL, *bounds, wanted, *others])

    python = make_environment(folder)
    install(python, [])
    environment = packages(python)
    if "torch" in environment or "triton" in environment:
        raise CheckFailed(f"the base install brings torch or Triton: {', '.join(sorted(environment))}")
    missing, calls = unimportable(python, library), check_import(python, library)
    if missing:
        extras = project(library)["optional-dependencies"].keys() - LEFT_OUT_EXTRAS
        install(python, extras, re.findall(r"# pip install (\S+)", readme.read_text()))
    command("examples of the README", [python, "-c", EXAMPLES, str(readme)], cwd=folder)
    if "torch" in packages(python):
        raise CheckFailed("torch is in the environment")
    summary = "not run"
    if tests:
        tested = make_environment(folder / "tested")
        install(tested, ["test"])
        summary = run_tests(tested, ROOT / "libs" / library, folder, report)
        if missing and (still := unimportable(python, library).keys() & unimportable(tested, library)):
            raise CheckFailed(f"modules that no declared extra makes importable: {sorted(still)}")
    print(
        f"{library}: ok, {len(environment)} distributions, an import makes {calls:,} calls, "
        f"{len(missing)} modules need an extra, tests: {summary}",
        flush=True,
    )


def make_environment(folder: Path) -> str:
    """An environment without pip; gives its Python."""
    venv.create(folder)
    return str(folder / "bin" / "python")


def check_example(work: Path, constraints: list[Path]) -> None:
    """A recipe of others beside the whole project, all from wheels: its tests pass. Raises CheckFailed."""
    projects = (
        *(ROOT / "libs" / name for name in LIBRARIES),
        ROOT / "recipes",
        ROOT,
        ROOT / "examples" / EXAMPLE,
    )
    wheels, folder = build(projects, work / "example-wheels"), work / f"env-{EXAMPLE}"
    python = make_environment(folder)
    bounds = [part for path in constraints for part in ("-c", str(path))]
    wanted = [*(str(path) for path in wheels.values()), "pytest"]
    command("install", [*pip(python), "install", *INSTALL, *bounds, *wanted])
    away = folder / "away"
    shutil.copytree(ROOT / "examples" / EXAMPLE / "golden", away / "golden")
    print(f"{EXAMPLE}: ok, tests: {run_tests(python, ROOT / 'examples' / EXAMPLE, folder)}", flush=True)


def pip(python: str) -> list[str]:
    """The pip of this environment for another one, which needs none. The pip that Python 3.11 brings stumbles over
    constraints on requirements with extras."""
    return [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]


def unimportable(python: str, library: str) -> dict[str, str]:
    """Modules of a library that do not import, with the package that each of them misses."""
    missing: dict[str, str] = json.loads(command("import", [python, "-c", MODULES, f"openinfer.{library}"]))
    return missing


def packages(python: str) -> set[str]:
    """Names of the distributions in an environment."""
    names: list[str] = json.loads(command("list", [python, "-c", PACKAGES]))
    return {name.lower() for name in names}


def check_import(python: str, library: str) -> int:
    """How many calls the importing thread makes in a fresh interpreter. Raises CheckFailed if they are too many."""

    def count(module: str) -> int:
        counts = [int(command("import", [python, "-c", IMPORT_CALLS, module])) for _ in range(2)]
        return counts[1]  # the first one wrote the bytecode

    made, unit = count(f"openinfer.{library}"), count("asyncio")
    if made > IMPORT_LIMIT * unit:
        raise CheckFailed(
            f"an import makes {made:,} calls; the limit is {IMPORT_LIMIT:g} x asyncio's {unit:,}"
        )
    return made


def run_tests(python: str, project: Path, folder: Path, report: Path | None = None) -> str:
    """Run a project's tests on its wheel, away from the checkout; gives pytest's last line. Raises CheckFailed."""
    copy = folder / "away" / "tests"
    shutil.copytree(project / "tests", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    attack: \n    gpu: \n    slow: \nfilterwarnings = error\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-m", "not slow"]
    options += [f"--junitxml={report}"] if report else []
    output = command("tests", [python, "-c", PYTEST, *options, "tests"], cwd=copy.parent)
    line = output.strip().splitlines()[-1].strip("= ")
    if not re.search(r"\d+ passed", line):
        raise CheckFailed(f"no test passed: {line}")
    return line


def command(what: str, arguments: list[str], cwd: Path | None = None) -> str:
    """Run a command outside the checkout's environment; gives its output. Raises CheckFailed with its last lines."""
    env = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
    done = subprocess.run(
        arguments, cwd=cwd or tempfile.gettempdir(), env=env, text=True, capture_output=True, check=False
    )
    if done.returncode:
        tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-40:])
        raise CheckFailed(f"{what} failed with exit code {done.returncode}:\n    {tail}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
