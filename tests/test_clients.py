"""Other people's software against our server, each from its own environment (scripts/check_clients.py)."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = ("anthropic",)
"""The test environment has them; openai is in test_openai_client.py."""
CLIENTS = runpy.run_path(str(ROOT / "scripts" / "check_clients.py"))["CLIENTS"]
SKIPPED = 77


@pytest.mark.parametrize("client", QUICK)
def test_a_quick_client_works(client: str) -> None:
    package = CLIENTS[client].packages[0]
    assert package in (ROOT / ".ci/constraints.txt").read_text().split()
    command = [sys.executable, str(ROOT / "scripts" / "check_clients.py"), client, "--here"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_a_client_works(client: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_clients.py"), client]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_client_is_forgotten() -> None:
    programs = {path.stem.removesuffix("_client") for path in (ROOT / "scripts/clients").glob("*_client.*")}
    assert programs == set(CLIENTS)


def test_the_table_has_the_versions_that_are_pinned() -> None:
    lines = (ROOT / "docs/clients.md").read_text().partition("\n## ")[0].splitlines()
    table = dict(line.removeprefix("| ").split(" | ")[:2] for line in lines if line.startswith("| "))
    for name in ("client", "---"):
        del table[name]
    assert table.items() <= {client.name: client.version for client in CLIENTS.values()}.items()
    assert len(table) > 8
