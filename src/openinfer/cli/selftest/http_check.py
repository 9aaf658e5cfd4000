"""A short check of a server over HTTP: start to ready, answers streamed and not, many at once, no block left in use."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openinfer.cli.api import Api
from openinfer.cli.bench.server import NotReady, serving
from openinfer.frontend.flag_types import key_of_environment


def check_server(model_dir: Path, log_path: Path) -> dict[str, Any]:
    """Start `openinfer serve` on the checkpoint and use it. Returns ok, the seconds to ready, and what was seen."""
    try:
        with serving(model_dir, (), log_path) as server:
            seen = _use(Api(server.url, key_of_environment()))
    except NotReady:
        return {"ok": False, "why": "not ready", "log": log_path.read_text()[-3000:]}
    code = server.process.returncode
    phases = re.findall(r"openinfer\S*: (.*: [0-9.]+ s)$", log_path.read_text(), re.MULTILINE)
    ok = seen["ok"] and code == 0
    return {"ready_s": round(server.ready_s, 2), "phases": phases, "exit_code": code, **seen, "ok": ok}


def _use(api: Api) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(n)] for n in (1, 7, 64, 300, 1024, 3000, 17, 129) * 4]
    alone = [_complete(api, prompt) for prompt in prompts[:8]]
    with ThreadPoolExecutor(32) as clients:
        together = list(clients.map(lambda p: _complete(api, p, stream=True), prompts))
    left = _gauges(api)
    for _ in range(50):  # the last step's blocks come back with the step after it
        if not any(left.values()):
            break
        time.sleep(0.02)
        left = _gauges(api)
    lengths = {len(tokens) for tokens in (*alone, *together)}
    return {
        "ok": lengths == {32} and bool(left) and not any(left.values()),
        "answers": len(alone) + len(together),
        "same_alone_and_together": sum(a == b for a, b in zip(alone, together, strict=False)),
        "left_behind": left,
    }


def _gauges(api: Api) -> dict[str, float]:
    names = r"^(\S*(?:running|waiting|cache_usage_perc|compiles_after_ready_total))\{.*?\} (\S+)$"
    return {name: float(value) for name, value in re.findall(names, api.metrics(), re.MULTILINE)}


def _complete(api: Api, prompt: list[int], *, stream: bool = False) -> list[int]:
    settings = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    text = api.read("POST", "/v1/completions", {"prompt": prompt, "stream": stream, **settings}).decode()
    if not stream:
        return list(json.loads(text)["choices"][0]["token_ids"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids") or []]
