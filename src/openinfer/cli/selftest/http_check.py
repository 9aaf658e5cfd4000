"""A short check of a server over HTTP: start to ready, answers streamed and not, many at once, no block left in use."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def check_server(model_dir: Path, log_path: Path, *, timeout_s: float = 120.0) -> dict[str, Any]:
    """Start `openinfer serve` on the checkpoint and use it. Returns ok, the seconds to ready, and what was seen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    start = time.monotonic()
    command = [sys.executable, "-m", "openinfer.cli", "serve", str(model_dir), "--port", str(port)]
    keyless = {name: value for name, value in os.environ.items() if name != "OPENINFER_API_KEY"}
    with log_path.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=keyless)
    try:
        while _status(f"{base}/ready") != 200:
            if server.poll() is not None or time.monotonic() - start > timeout_s:
                return {"ok": False, "why": "not ready", "log": log_path.read_text()[-3000:]}
            time.sleep(0.02)
        ready_s = time.monotonic() - start
        seen = _use(base)
    finally:
        server.terminate()
        code = server.wait(60)
    phases = re.findall(r"openinfer\S*: (.*: [0-9.]+ s)$", log_path.read_text(), re.MULTILINE)
    return {
        "ready_s": round(ready_s, 2),
        "phases": phases,
        "exit_code": code,
        **seen,
        "ok": seen["ok"] and code == 0,
    }


def _use(base: str) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(n)] for n in (1, 7, 64, 300, 1024, 3000, 17, 129) * 4]
    alone = [_complete(base, prompt) for prompt in prompts[:8]]
    with ThreadPoolExecutor(32) as clients:
        together = list(clients.map(lambda p: _complete(base, p, stream=True), prompts))
    left = _gauges(base)
    for _ in range(50):  # the last step's blocks come back with the step after it
        if not any(left.values()):
            break
        time.sleep(0.02)
        left = _gauges(base)
    lengths = {len(tokens) for tokens in (*alone, *together)}
    return {
        "ok": lengths == {32} and bool(left) and not any(left.values()),
        "answers": len(alone) + len(together),
        "same_alone_and_together": sum(a == b for a, b in zip(alone, together, strict=False)),
        "left_behind": left,
    }


def _gauges(base: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{base}/metrics", timeout=10) as response:
        text = response.read().decode()
    names = r"^(\S*(?:running|waiting|cache_usage_perc|compiles_after_ready_total))\{.*?\} (\S+)$"
    return {name: float(value) for name, value in re.findall(names, text, re.MULTILINE)}


def _complete(base: str, prompt: list[int], *, stream: bool = False) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body["stream"] = stream
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if not stream:
        return list(json.loads(text)["choices"][0]["token_ids"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids") or []]


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return 0
