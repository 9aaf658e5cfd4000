"""evalscope: questions of our own, answered and scored, and its load test, streamed and whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[2] / "demo" / "qwen3"
QUESTIONS = [(f"How much is {n} + {n}?", str(2 * n), str(n)) for n in range(2, 6)]
# Told to be offline, it takes the tokenizer's folder for a name.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}


def evalscope(*arguments: str) -> str:
    """The output of the command."""
    command = [sys.executable, "-m", "evalscope.cli.cli", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def found(folder: str, pattern: str) -> Any:
    """The only such file, read as JSON."""
    (path,) = Path(folder).rglob(pattern)
    return json.loads(path.read_text())


def check_questions(demo: str) -> None:
    """Data sets of the hubs are not to be had here."""
    folder = Path("questions")
    folder.mkdir()
    rows = [{"messages": [{"role": "user", "content": q}], "response": answer} for q, answer, _ in QUESTIONS]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = {"general_qa": {"local_path": str(folder.resolve()), "subset_list": ["sums"]}}
    evalscope(
        *(
            "eval",
            "--model",
            "qwen3",
            "--api-url",
            f"{demo}/v1",
            "--api-key",
            "x",
            "--eval-type",
            "openai_api",
        ),
        *("--datasets", "general_qa", "--dataset-args", json.dumps(arguments), "--work-dir", "eval"),
    )
    report = found("eval", "reports/qwen3/general_qa.json")
    assert report["metrics"][0]["categories"][0]["subsets"][0]["num"] == len(QUESTIONS), report


def check_loads(demo: str) -> None:
    common = ["perf", "--model", "qwen3", "--api", "openai", "--tokenizer-path", str(TOKENIZER)]
    load = "--dataset random --min-prompt-length 16 --max-prompt-length 32 --min-tokens 8 --max-tokens 8"
    for kind, path in (("--stream", "/v1/chat/completions"), ("--no-stream", "/v1/completions")):
        where = [*common, "--url", f"{demo}{path}", *load.split(), kind, "--number", "8", "--parallel", "2"]
        evalscope(*where, "--outputs-dir", f"perf{kind}", "--no-timestamp")
        summary = found(f"perf{kind}", "benchmark_summary.json")
        assert summary["Failed Requests"] == 0, summary
