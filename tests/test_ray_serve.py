"""examples/ray_serve under load (scripts/check_ray.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_ray.py"


@pytest.mark.slow  # it installs Ray, 80 MB
def test_ray_loses_only_the_streams_of_a_killed_replica() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 of 32 questions" in done.stdout
