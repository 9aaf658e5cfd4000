"""Lint, types and tests: `python scripts/run_tests.py [--all] [NAME ...]`, NAME as in the summary (libs/tensor, mypy).

Every library's tests run in a process of their own, so that no library relies on the tests of another. The tests of
one library, another at each commit, run from its wheel instead; --all runs all of them from the checkout and a wheel.
Two more suites run at a time than there are cores, at most four, because tests of servers wait much. The output of a
suite is shown when it has ended. With --all the tests marked `attack` are a suite of their own (scripts/attack.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from check_wheels import PYTEST

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("tensor", "kernels", "graph", "kvpool", "sampler", "scheduler", "frontend")
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes/src/openinfer/recipes").glob("*/__init__.py"))
PACKAGES = [
    *(f"openinfer.{name}" for name in (*LIBRARIES, "cli", "llm")),
    *(f"openinfer.recipes.{name}" for name in RECIPES),
    "openinfer_llama",
]
# reference/ wants torch, clients.* the clients; neither is here.
TYPED_SCRIPTS = (
    "attack",
    "check_clients",
    "check_language",
    "check_ranges",
    "check_manifests",
    "check_ray",
    "check_routers",
    "check_wheels",
    "clients.run",
    "clients.speaker",
    "compile_kernels",
    "docs_pages",
    "flag_reference",
    "release",
    "run_tests",
)
# Threads of several processes that spin for two cores make small products sixty times slower. The tests start hundreds
# of processes. Each must find the modules compiled, because compiling them takes as long as the rest of its start.
ENVIRONMENT = {
    name: value
    for name, value in {"OPENBLAS_NUM_THREADS": "1", **os.environ}.items()
    if name != "PYTHONDONTWRITEBYTECODE"
}
T = TypeVar("T")
SAY_EVERY_S = 10.0
LIMIT_S = 3600  # a suite that hangs must not take all of CI's time

CHECKS: dict[str, list[str]] = {
    "ruff check": ["ruff", "check", "--quiet", "."],
    "ruff format": ["ruff", "format", "--check", "--quiet", "."],
    "mypy": [
        "mypy",
        *(part for package in PACKAGES for part in ("-p", package)),
        *(part for script in TYPED_SCRIPTS for part in ("-m", script)),
    ],
}
# Parts of tests/ that take long are suites of their own, for the lanes to be of one length. A name may be a pattern.
SUITES = [
    *(f"libs/{name}" for name in LIBRARIES),
    "recipes",
    "examples/llama",
    "tests",
    "tests/combinations",
    "tests/test_[a-f]*.py",
    "tests/test_[l-q]*.py",
    "tests/test_independence.py",
    "tests/test_recipes.py",
    "tests/test_speculation.py",
]
ATTACKS = "scripts/attack.py"
# These take longest, so they are begun first.
LONGEST = (
    "libs/frontend",
    "tests",
    "tests/test_[a-f]*.py",
    "tests/test_[l-q]*.py",
    "tests/combinations",
    "tests/test_recipes.py",
    "libs/kernels",
    "recipes",
    "libs/sampler",
    "tests/test_speculation.py",
    ATTACKS,
    "libs/kvpool",
    "libs/scheduler",
    "mypy",
)


@dataclass
class Outcome:
    """The outcome of one check or suite. `counts` has passed, failed and skipped tests."""

    name: str
    ok: bool
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Run what was asked for; 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="slow tests too")
    parser.add_argument("names", nargs="*", choices=[[], *CHECKS, *SUITES, ATTACKS], metavar="NAME")
    args = parser.parse_args()
    names = args.names or [*CHECKS, *SUITES, *[ATTACKS] * args.all]
    from_wheel = "" if args.names or args.all else in_turn()
    longest = [LONGEST[0], from_wheel, *LONGEST[1:]]
    outcomes, failures = {}, []
    with ThreadPoolExecutor(min(4, (os.cpu_count() or 1) + 2)) as lanes:
        order = sorted(names, key=lambda name: longest.index(name) if name in longest else len(longest))
        running = {
            lanes.submit(run, name, slow=args.all, from_wheel=name == from_wheel): name for name in order
        }
        for done in ended(running):
            outcome, printed = done.result()
            outcomes[outcome.name] = outcome
            print(f"== {outcome.name}: {outcome.seconds:.0f} s\n{printed}", end="", flush=True)
            failures += (
                [] if outcome.ok else [f"== {outcome.name}, its last lines:", *printed.splitlines()[-8:]]
            )
    print_summary([outcomes[name] for name in names])
    print(*failures, sep="\n", end="\n" if failures else "")  # once more, where a log is read first
    return 0 if all(outcome.ok for outcome in outcomes.values()) else 1


def ended(running: Mapping[Future[T], str]) -> Iterator[Future[T]]:
    """The checks in the order of their ends. Says every 10 s which are under way."""
    start, left = time.monotonic(), set(running)
    while left:
        done, left = wait(left, timeout=SAY_EVERY_S, return_when=FIRST_COMPLETED)
        if not done:
            names = ", ".join(name for future, name in running.items() if future.running())
            print(f"{time.monotonic() - start:.0f} s: {names}; {len(left)} to go", flush=True)
        yield from done


def in_turn() -> str:
    """The suite of the library whose wheel is tested at this commit: one, because all seven take long."""
    return f"libs/{LIBRARIES[commits() % len(LIBRARIES)]}"


def commits() -> int:
    """How many commits led to this checkout; 0 where git cannot say."""
    command = ["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"]
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout or 0)


def run(name: str, *, slow: bool, from_wheel: bool) -> tuple[Outcome, str]:
    """Run a check or suite; how it went, and what it printed."""
    start = time.monotonic()
    if name in CHECKS:
        (ok, printed), counts = run_python(["-m", *CHECKS[name]]), Counter[str]()
    elif from_wheel:
        ok, counts, printed = run_wheel(name)
    else:
        ok, counts, printed = run_suite(name, slow=slow)
    return Outcome(name, ok, time.monotonic() - start, counts), printed


def run_python(arguments: list[str]) -> tuple[bool, str]:
    """Run python with these arguments in the checkout: whether it went well (not if it hangs), and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                timeout=LIMIT_S,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )
            ok = done.returncode == 0
        except subprocess.TimeoutExpired:
            ok = False
            output.seek(0, os.SEEK_END)
            output.write(f"stopped after {LIMIT_S} s\n")
        output.seek(0)
        return ok, output.read()


def run_suite(folder: str, *, slow: bool) -> tuple[bool, Counter[str], str]:
    """Run the tests of a folder, a file or a pattern of files, and count them. A suite without tests fails."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        which = "not attack" if slow else "not slow"
        # A base folder of its own: pytest's default one is cleaned up by other runs on the machine.
        places = [f"--junitxml={report}", f"--basetemp={temporary}/pytest"]
        paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(folder))
        others = [f"--ignore-glob={ROOT / suite}" for suite in SUITES if suite.startswith(f"{folder}/")]
        if folder == ATTACKS:
            ok, printed = run_python([ATTACKS, "-r", "fE", *places])
        else:
            ok, printed = run_python(["-c", PYTEST, "-q", "-r", "fE", "-m", which, *places, *others, *paths])
        return ok, count(report), printed


def run_wheel(folder: str) -> tuple[bool, Counter[str], str]:
    """Run a library's tests from its wheel, with CI's versions."""
    with tempfile.TemporaryDirectory() as temporary:
        report, name = Path(temporary) / "report.xml", folder.removeprefix("libs/")
        ok, printed = run_python(["scripts/check_wheels.py", "--pinned", "--report", str(report), name])
        return ok, count(report), printed


def count(report: Path) -> Counter[str]:
    """Passed, failed and skipped tests of a JUnit report; empty if there is no report."""
    counts: Counter[str] = Counter()
    if report.exists():
        for suite in ET.parse(report).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - failed - skipped
    return counts


def print_summary(outcomes: list[Outcome]) -> None:
    """A line each, and the totals. A check or suite that broke down counts as a failure."""
    total: Counter[str] = Counter()
    print()
    for outcome in outcomes:
        counts = outcome.counts
        if not outcome.ok and not counts["failed"]:
            counts["failed"] = 1
        total += counts
        detail = ", ".join(
            f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind]
        )
        print(f"{'ok' if outcome.ok else 'FAILED':<8}{outcome.seconds:7.1f} s  {outcome.name:<26} {detail}")
    print(f"total: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")


if __name__ == "__main__":
    sys.exit(main())
