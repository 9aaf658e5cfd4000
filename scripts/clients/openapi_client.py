"""Schemathesis against the OpenAPI document: whatever the document allows or forbids, no 500 and no surprise."""

from __future__ import annotations

import subprocess
import sys

SECONDS = 300
NOT_TRUE_HERE = "positive_data_acceptance"  # a schema cannot say that a prompt must fit the context


def check_the_document_is_kept(real: str, speaker: str) -> None:
    run = [
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "--no-color",
        "run",
    ]
    options = [
        "--checks",
        "all",
        "--exclude-checks",
        NOT_TRUE_HERE,
        "--max-time",
        str(SECONDS),
        "--seed",
        "7",
    ]
    more = ["--continue-on-failure", "--generation-database", "none", "--warnings", "off"]
    done = subprocess.run([*run, f"{real}/openapi.json", *options, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(
        "openapi_client: " + next(line.strip() for line in done.stdout.splitlines() if " generated" in line)
    )
