"""aiperf: short loads over chats, completions, responses and Anthropic's messages; no request fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[2] / "demo" / "qwen3"
LOAD = "--streaming --concurrency 4 --request-count 8 --isl 32 --osl 16 --ui none"
EXACT = """--use-server-token-count --per-chunk-usage --extra-inputs ignore_eos:true --extra-inputs min_tokens:16
    --wait-for-model-timeout 20 --wait-for-model-mode both"""


def profile(url: str, kind: str, *options: str) -> Any:
    """The figures that aiperf measured."""
    # Told to be offline, it takes the tokenizer's folder for a name.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    where = ["-m", "qwen3", "--url", url, "--endpoint-type", kind, "--tokenizer", str(TOKENIZER)]
    command = [
        sys.executable,
        "-m",
        "aiperf",
        "profile",
        *where,
        *LOAD.split(),
        "--artifact-dir",
        kind,
        *options,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(Path(kind, "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 8
    assert not found["error_summary"], found["error_summary"]
    return found


def check_chats_with_the_servers_counts(demo: str) -> None:
    assert profile(demo, "chat", *EXACT.split())["output_sequence_length"]["avg"] == 16


def check_completions(demo: str) -> None:
    assert profile(demo, "completions")["time_to_first_token"]["avg"] > 0


def check_responses(demo: str) -> None:
    assert profile(demo, "responses")["time_to_first_token"]["avg"] > 0


def check_messages(demo: str) -> None:
    assert profile(demo, "messages")["time_to_first_token"]["avg"] > 0
