"""aider: it writes the file that the model's answer edits, and goes on with its chat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FLAGS = """--model openai/speaker --no-check-update --no-analytics --yes-always --no-git --edit-format diff --no-pretty
    --no-show-model-warnings --no-fancy-input weather.txt"""


def check_aider_writes_a_file(speaker: str) -> None:
    work = Path("aider-work").resolve()
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "aider", *FLAGS.split()],
        cwd=work,
        env={**os.environ, "OPENAI_API_KEY": "x", "OPENAI_API_BASE": f"{speaker}/v1"},
        input="Write the weather to weather.txt\nAnd tomorrow?\n/exit\n",
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("It will be sunny in Bonn.") == 2, done.stdout
    assert (work / "weather.txt").read_text() == "sunny\nsunny\n"
