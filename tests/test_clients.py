"""Other people's software against our server, each from its own environment (scripts/check_clients.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SKIPPED = 77


@pytest.mark.slow
@pytest.mark.parametrize(
    "client", ["agents", "anthropic", "instructor", "langchain", "litellm", "openapi", "page"]
)
def test_a_client_works(client: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_clients.py"), client]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_client_is_forgotten() -> None:
    programs = {path.stem.removesuffix("_client") for path in (ROOT / "scripts/clients").glob("*_client.py")}
    (parameters,) = test_a_client_works.pytestmark[:1]
    assert programs == set(parameters.args[1])
