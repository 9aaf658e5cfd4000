"""Other people's routers before two replicas (scripts/check_routers.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_routers.py"


@pytest.mark.slow  # it installs 100 MB
def test_routers_find_prefixes_and_lose_nothing() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 of 32 questions" in done.stdout
    assert done.stdout.count("1264 of 1264 tokens") == 2
