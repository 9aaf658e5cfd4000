"""Other people's routers in front of two replicas: `python scripts/check_routers.py [--environment FOLDER]`.

Two servers of demo/qwen3 on the CPU publish KV events. vllm-router (kv_aware) and Dynamo's indexer read them, each as
its authors ship it, pinned below, in an environment of its own. Documents are put on a replica of our choice, past the
routers. The cache of each replica is small, so that documents move to a tier of host memory. Then

 - 32 of 32 questions on these documents must reach the replica that has the document;
 - the indexer must find every whole block of the documents; some must be in host memory alone;
 - of a hybrid model (demo/qwen3_5), and of a server with two engines, the indexer must find every token too;
 - one replica is killed while it answers: the router goes on, and only that replica's own answers are lost.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from openinfer.cli.bench.server import free_port, serving

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vllm-router==0.1.17", "ai-dynamo-runtime==1.6.1")
BARE = "ai-dynamo==1.6.1"  # it depends on a package that PyPI does not have
BLOCK = 16
SMALL = ("--kv-cache-memory-bytes", "4000000", "--max-model-len", "384", "--kv-offload-gb", "0.1")
"""A cache of two documents, and a tier behind it."""
DOCUMENTS, QUESTIONS = 8, 4
START_LIMIT_S = 120


class CheckFailed(Exception):
    """A router does not work with these servers; the message says where."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, help="folder with the routers, or to install them into")
    args = parser.parse_args()
    with ExitStack() as stack:
        kept = Path(args.environment or stack.enter_context(tempfile.TemporaryDirectory()))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        install(kept)
        replicas = [stack.enter_context(replica(logs, f"replica{n}", "qwen3", SMALL)) for n in range(2)]
        urls, events, pids = zip(*replicas, strict=True)
        hybrid, hybrid_events, _ = stack.enter_context(replica(logs, "hybrid", "qwen3_5"))
        router = stack.enter_context(vllm_router(kept, logs, urls, events))
        indexer = stack.enter_context(dynamo_indexer(kept, logs, "qwen3", events))
        hybrids = stack.enter_context(dynamo_indexer(kept, logs, "qwen3_5", (hybrid_events,)))
        pair, first, _ = stack.enter_context(replica(logs, "pair", "qwen3", ("--data-parallel-size", "2")))
        second = f"{first.rpartition(':')[0]}:{int(first.rpartition(':')[2]) + 1}"
        ranks = stack.enter_context(dynamo_indexer(kept, logs, "qwen3", (first,), more=f",1:1={second}"))
        documents = [f"Document {n}: " + f"the {n} of {n * 37 % 101} goes to {n * 53 % 89}. " * 12
                     for n in range(DOCUMENTS)]  # fmt: skip
        for n, document in enumerate(documents):
            ask(urls[n % 2], document)
            ask(hybrid, document)
            ask(pair, document)
        time.sleep(1)  # events are on their way
        check_hits(router, documents)
        check_index(indexer, urls, "qwen3", documents)
        check_index(hybrids, (hybrid,), "qwen3_5", documents)
        check_ranks(ranks, pair, documents)
        check_death(router, urls, pids)
    print("routers: all checks hold")
    return 0


def install(folder: Path) -> None:
    """The routers' environment, unless it is there."""
    if (folder / "bin" / "vllm-router").exists():
        return
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", BARE], check=True)


@contextmanager
def running(
    name: str, logs: Path, command: list[str], ready: Callable[[], bool]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that became ready; ended at the end. Raises CheckFailed with its log."""
    log = logs / name
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=logs)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"{name} did not get ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url: str) -> Callable[[], bool]:
    """Whether an address answers a GET with 200."""

    def found() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    return found


@contextmanager
def replica(logs: Path, name: str, model: str, more: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """A server of a demo model: its address, that of its events, and its process id."""
    events = f"tcp://127.0.0.1:{free_port()}"
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": events})
    flags = ["--device", "cpu", "--kv-events-config", config, *more]
    with serving(ROOT / "demo" / model, flags, logs / name) as server:
        yield server.url, events, server.process.pid


@contextmanager
def vllm_router(
    environment: Path, logs: Path, urls: tuple[str, ...], events: tuple[str, ...]
) -> Iterator[str]:
    port = free_port()
    command = [str(environment / "bin" / "vllm-router"), "--port", str(port), "--policy", "kv_aware",
               "--worker-urls", *urls, "--kv-event-block-size", str(BLOCK), "--kv-event-model", "qwen3",
               "--prometheus-port", str(free_port())]  # fmt: skip
    for url, source in zip(urls, events, strict=True):
        command += ["--kv-event-source", f"{url}={source}"]
    url = f"http://127.0.0.1:{port}"
    with running("vllm-router", logs, command, answers(f"{url}/v1/models")):
        yield url


@contextmanager
def dynamo_indexer(
    environment: Path, logs: Path, model: str, events: tuple[str, ...], more: str = ""
) -> Iterator[str]:
    port = free_port()
    workers = ",".join(f"{n}={source}" for n, source in enumerate(events, start=1)) + more
    command = [str(environment / "bin" / "python"), "-m", "dynamo.indexer", "--port", str(port),
               "--block-size", str(BLOCK), "--model-name", model, "--workers", workers]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running(f"dynamo.indexer at {port}", logs, command, answers(f"{url}/workers")):
        yield url


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def ask(base: str, text: str) -> dict[str, Any]:
    """The usage of a short answer."""
    usage: dict[str, Any] = post(f"{base}/v1/chat/completions", chat(text))["usage"]
    return usage


def check_hits(router: str, documents: list[str]) -> None:
    """Every question must find its document in the cache of the replica that it reaches."""
    found = []
    for question in range(QUESTIONS):
        for n, document in enumerate(documents):
            usage = ask(router, f"{document} Question {question}: who?")
            cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
            found.append(cached > prompt // 2)
            if not found[-1]:
                print(f"document {n}: {cached} of {prompt} tokens are cached")
    print(f"vllm-router: {sum(found)} of {len(found)} questions reached the replica with their document")
    if not all(found):
        raise CheckFailed("vllm-router does not know where the documents are")


def check_index(indexer: str, urls: tuple[str, ...], model: str, documents: list[str]) -> None:
    """The indexer must find all whole blocks of each document, on its replica."""
    total = matched = on_device = 0
    for n, document in enumerate(documents):
        prompt = {name: value for name, value in chat(document).items() if name != "max_tokens"}
        number = n % len(urls)
        tokens = post(f"{urls[number]}/tokenize", prompt)["tokens"]
        found = post(f"{indexer}/query", {"token_ids": tokens, "model_name": model})["instances"]
        total += len(tokens) // BLOCK * BLOCK
        matched += found.get(str(number + 1), {}).get("longest_matched", 0)
        on_device += found.get(str(number + 1), {}).get("gpu", 0)
    print(f"dynamo.indexer of {model}: {matched} of {total} tokens, {on_device} of them on the device")
    if matched < total or (model == "qwen3") != (on_device < total):
        raise CheckFailed("Dynamo's indexer misses blocks")


def check_ranks(indexer: str, url: str, documents: list[str]) -> None:
    """The indexer must find each document at one rank of a server with two engines, and documents at both ranks."""
    found, total = [0, 0], 0
    for document in documents:
        prompt = {name: value for name, value in chat(document).items() if name != "max_tokens"}
        tokens = post(f"{url}/tokenize", prompt)["tokens"]
        ranks = post(f"{indexer}/query", {"token_ids": tokens, "model_name": "qwen3"})["scores"].get("1", {})
        total += len(tokens) // BLOCK * BLOCK
        best = max(ranks, key=ranks.__getitem__, default="0")
        found[int(best)] += ranks.get(best, 0)
    print(f"dynamo.indexer of --data-parallel-size 2: {found[0]} + {found[1]} of {total} tokens")
    if sum(found) < total or not all(found):
        raise CheckFailed("Dynamo's indexer misses blocks of a rank")


def check_death(router: str, urls: tuple[str, ...], pids: tuple[int, ...]) -> None:
    """Kill a replica with an answer under way; every later request is answered by the other."""
    whole = [False, False]

    def stream(n: int) -> None:
        body = chat("count", max_tokens=300, stream=True, ignore_eos=True)
        request = urllib.request.Request(f"{urls[n]}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                whole[n] = any(line.strip() == b"data: [DONE]" for line in response)
        except (OSError, http.client.HTTPException):
            pass  # the server is gone

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    print(f"answers under way when one replica was killed: whole are {whole} (its own, the other's)")
    if whole != [False, True]:
        raise CheckFailed("the killed replica's answer must break off, and the other's must not")
    lost = []
    for n in range(12):
        try:
            ask(router, f"after death {n}")
        except (urllib.error.HTTPError, OSError) as error:
            lost.append(str(error))
    print(f"vllm-router: {12 - len(lost)} of 12 requests answered after one replica was killed")
    if lost:
        raise CheckFailed(f"requests were lost: {lost[:3]}")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
