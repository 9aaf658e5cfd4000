"""guidellm: short loads over completions, chats and responses, and multi-turn chats; no request fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[2] / "demo" / "qwen3"
REQUESTS = 8


def load(url: str, path: str, profile: str, data: str = "") -> Any:
    """The figures that guidellm measured of a load with `profile` on an endpoint."""
    options = {
        "backend": f"kind=openai_http,target={url},model=qwen3,request_format={path}",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens=16{data}",
        "profile": profile,
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "output": "kind=json,path=report.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] >= REQUESTS, metrics["request_totals"]
    assert metrics["request_totals"]["errored"] == 0
    return metrics


def check_completions(demo: str) -> None:
    found = load(demo, "/v1/completions", "kind=concurrent,streams=2")
    assert found["output_token_count"]["successful"]["mean"] == 16


def check_chats(demo: str) -> None:
    found = load(demo, "/v1/chat/completions", "kind=constant,rate=8")
    assert found["output_token_count"]["successful"]["mean"] == 16
    assert found["time_to_first_token_ms"]["successful"]["mean"] > 0


def check_chats_of_two_turns(demo: str) -> None:
    found = load(demo, "/v1/chat/completions", "kind=concurrent,streams=2", ",turns=2")
    assert found["output_token_count"]["successful"]["mean"] == 16


def check_responses(demo: str) -> None:
    found = load(demo, "/v1/responses", "kind=synchronous")
    assert found["output_token_count"]["successful"]["mean"] == 16
