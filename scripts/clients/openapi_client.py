"""Schemathesis against the OpenAPI document: whatever the document allows or forbids, no 500 and no surprise."""

from __future__ import annotations

import subprocess
import sys

RUN = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "--no-color", "run"]
# Two checks are left out: that all data which fits the schema is taken, and that all other data is refused. A schema
# cannot say that a prompt must fit the context. Numbers written as text are taken without being promised.
# The time limits are long, because a busy CPU needs a minute for the five hundred tokens of an unbounded answer.
OPTIONS = """
    --checks all --exclude-checks positive_data_acceptance,negative_data_rejection --max-time 300 --seed 7
    --continue-on-failure --request-timeout 120 --max-response-time 120 --generation-database none --warnings off
"""


def check_the_document_is_kept(real: str, speaker: str) -> None:
    command = [*RUN, f"{real}/openapi.json", *OPTIONS.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(
        "openapi_client: " + next(line.strip() for line in done.stdout.splitlines() if " generated" in line)
    )
