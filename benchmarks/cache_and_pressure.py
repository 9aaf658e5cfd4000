"""The effect of prefix caching, a small pool and mixed loads on a running server; each part starts its own server.

    python benchmarks/cache_and_pressure.py MODEL_DIR [prefix] [shared] [pressure] [mixed] [--json FILE]

prefix: time to the first token of a 16,384-token prompt, cold and repeated, as token ids and as text, and of multi-turn
chats. shared: 20 chats over one system prompt of 700 tokens, with the prefix cache and without.
pressure: 500 requests whose working set is three times the pool. mixed: inter-token latencies of 16 steady streams
while 8,192-token prompts arrive, under several chunk policies.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY = 150_000


class Server:
    """A server that was started for one part."""

    def __init__(self, port: int) -> None:
        self.port = port

    def stream(self, body: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        """Post a streamed completion; the times of its chunks with text, since it was sent, and its usage."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        times, usage = [], {}
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter() - start
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"])
                if chunk.get("choices"):
                    times.append(now)
                usage = chunk.get("usage") or usage
        connection.close()
        return times, usage

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
            text = response.read().decode()
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}\{{.*?\}} (\S+)$", text, re.MULTILINE))


@contextmanager
def server(model: str, *flags: str) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
    command = [sys.executable, "-m", "openinfer.cli", "serve", model, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError(Path(log.name).read_text()[-2000:])
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        yield Server(port)
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256, VOCABULARY) for _ in range(count)]


def greedy(prompt: object, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def prefix(model: str) -> dict[str, Any]:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) for _ in range(3000)]
    found: dict[str, Any] = {}
    with server(model) as s:
        s.stream(greedy(random_ids(rng, 100), 4))
        s.stream(greedy("to warm the tokenizer up", 4))
        for kind in ("ids", "text"):
            cold, warm = [], []
            for _ in range(3):
                prompt: object = random_ids(rng, 16384)
                if kind == "text":
                    prompt = text_of(s, rng, words)
                times, usage = s.stream(greedy(prompt, 4))
                cold.append(1e3 * times[0])
                for _ in range(5):
                    times, usage = s.stream(greedy(prompt, 4))
                    warm.append(1e3 * times[0])
            found[kind] = {
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cold_ttft_ms": statistics.median(cold),
                "warm_ttft_ms": statistics.median(warm),
                "warm_ttft_ms_all": warm,
            }
        turns = []
        chat = random_ids(rng, 700)
        for turn in range(5):
            times, usage = s.stream(greedy(chat, 32))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            turns.append({"turn": turn, "prompt": len(chat), "cached": cached, "ttft_ms": 1e3 * times[0]})
            chat = chat + random_ids(rng, 200)
        found["multi_turn"] = turns
        found["metrics"] = {
            "queries": s.metric("vllm:prefix_cache_queries_total"),
            "hits": s.metric("vllm:prefix_cache_hits_total"),
        }
    return found


def shared(model: str) -> dict[str, Any]:
    """For each chat: the length of its prompt, the prefix hit, and the time to the first token."""
    raw = json.loads((Path(model) / "config.json").read_text())
    vocabulary = raw.get("text_config", raw)["vocab_size"]
    found: dict[str, Any] = {}
    for name, flags in (("with", []), ("without", ["--no-enable-prefix-caching"])):
        rng = random.Random(1)
        system, chats = [rng.randrange(256, vocabulary) for _ in range(700)], []
        with server(model, *flags) as s:
            for _ in range(3):  # warm up, with other prompts
                s.stream(greedy([rng.randrange(256, vocabulary) for _ in range(300)], 4))
            queries, hits = (s.metric(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits"))
            for _ in range(20):
                own = [rng.randrange(256, vocabulary) for _ in range(rng.randrange(20, 200))]
                times, usage = s.stream(greedy(system + own, 16))
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                chats.append({"prompt": len(system + own), "cached": cached, "ttft_ms": 1e3 * times[0]})
            queries = s.metric("vllm:prefix_cache_queries_total") - queries
            hits = s.metric("vllm:prefix_cache_hits_total") - hits
        found[name] = {
            "hit_rate": hits / queries if queries else 0.0,
            "chats_that_hit": sum(chat["cached"] > 0 for chat in chats),
            "ttft_ms_median_from_the_second": statistics.median(chat["ttft_ms"] for chat in chats[1:]),
            "chats": chats,
        }
    return found


def text_of(s: Server, rng: random.Random, words: list[str]) -> str:
    """Text of about 16,384 tokens."""
    sample = " ".join(rng.choices(words, k=400))
    _, usage = s.stream(greedy(sample, 1))
    return " ".join(rng.choices(words, k=int(400 * 16384 / usage["prompt_tokens"])))


def pressure(model: str) -> dict[str, Any]:
    """500 requests of 64..1,024 tokens in and 32..256 out, 128 at a time, in a pool of a third of what those need."""
    found = {}
    for label, tokens in (("roomy", 400_000), ("a third", 128 * (544 + 144) // 3)):
        rng = random.Random(2)
        jobs = [(random_ids(rng, rng.randrange(64, 1025)), rng.randrange(32, 257)) for _ in range(500)]
        bytes_a_token = kv_bytes_per_token(Path(model))
        with server(
            model, "--kv-cache-memory-bytes", str(tokens * bytes_a_token), "--max-model-len", "2048"
        ) as s:
            s.stream(greedy(random_ids(rng, 100), 4))
            start = time.perf_counter()
            with ThreadPoolExecutor(128) as clients:
                usages = list(clients.map(lambda job: s.stream(greedy(*job))[1], jobs))
            seconds = time.perf_counter() - start
            right = sum(u["completion_tokens"] == n for u, (_, n) in zip(usages, jobs, strict=True))
            found[label] = {
                "pool_tokens": tokens,
                "requests": len(jobs),
                "complete": right,
                "seconds": seconds,
                "output_tokens_per_s": sum(n for _, n in jobs) / seconds,
                "preemptions": s.metric("vllm:num_preemptions_total"),
                "blocks_left": s.metric("vllm:kv_cache_usage_perc"),
            }
    return found


def kv_bytes_per_token(model: Path) -> int:
    c = json.loads((model / "config.json").read_text())
    return 4 * int(c["num_hidden_layers"]) * int(c["num_key_value_heads"]) * int(c["head_dim"])


def mixed(model: str, policies: dict[str, list[str]]) -> dict[str, Any]:
    """16 steady streams; alone, and while an 8,192-token prompt arrives every half second."""
    found = {}
    for label, flags in policies.items():
        with server(model, *flags) as s:
            s.stream(greedy(random_ids(random.Random(3), 100), 4))
            found[label] = {"flags": flags, "alone": _streams(s, 0), "disturbed": _streams(s, 8)}
    return found


def _streams(s: Server, prompts: int) -> dict[str, Any]:
    rng = random.Random(4 + prompts)
    bodies = [greedy(random_ids(rng, 512), 1200) for _ in range(16)]
    long = [greedy(random_ids(rng, 8192), 2) for _ in range(prompts)]
    gaps: list[float] = []
    ttft: list[float] = []
    lock = threading.Lock()

    def steady(body: dict[str, Any]) -> None:
        times, _ = s.stream(body)
        with lock:
            gaps.extend(b - a for a, b in itertools.pairwise(times[100:]))

    threads = [threading.Thread(target=steady, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    for body in long:
        time.sleep(0.4)
        threads.append(threading.Thread(target=lambda b=body: ttft.append(s.stream(b)[0][0])))
        threads[-1].start()
    for thread in threads:
        thread.join()
    cuts = statistics.quantiles(gaps, n=1000)
    return {
        "itl_p50_ms": 1e3 * cuts[499],
        "itl_p99_ms": 1e3 * cuts[989],
        "itl_max_ms": 1e3 * max(gaps),
        "prompt_ttft_ms": [1e3 * t for t in ttft],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("parts", nargs="*", default=["prefix", "shared", "pressure", "mixed"])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="LABEL=FLAGS",
        help="server flags of the mixed part, under a label; default: chunks of 2048 and of 256 tokens",
    )
    args = parser.parse_args()
    policies = {p.partition("=")[0]: p.partition("=")[2].split() for p in args.policy} or {
        "2048 tokens a step": [],
        "256 tokens a step": ["--max-num-batched-tokens", "256", "--max-num-seqs", "128"],
    }
    found: dict[str, Any] = {"command": " ".join(sys.argv)}
    for part in args.parts:
        run = {
            "prefix": prefix,
            "shared": shared,
            "pressure": pressure,
            "mixed": lambda m: mixed(m, policies),
        }[part]
        found[part] = run(args.model)
        print(part, json.dumps(found[part], indent=1), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
