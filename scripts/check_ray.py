"""examples/ray_serve with two replicas on this machine: `python scripts/check_ray.py [--environment FOLDER]`.

Ray Serve is installed as its authors ship it, pinned below, in an environment of its own. Under load

 - questions on a document must reach the replica that has the document;
 - one replica is killed, then one server: no request fails but the streams that it had begun, and another is started;
 - the command with other flags replaces both replicas, a third is added under load, and no request fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from check_routers import CheckFailed, answers, ask, chat, running

from openinfer.cli.bench.server import free_port

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ray[serve]==2.60.0",)
MODEL = ROOT / "demo" / "qwen3"
DOCUMENTS, QUESTIONS, CLIENTS = 8, 4, 6
LIMIT_S = 180


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, help="folder with Ray, or to install it into")
    args = parser.parse_args()
    with ExitStack() as stack:
        kept = Path(args.environment or stack.enter_context(tempfile.TemporaryDirectory()))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        install(kept)
        port = str(free_port())
        url = f"http://127.0.0.1:{port}"
        name = f"ray-{port}"
        stack.enter_context(
            running(name, logs, command(kept, port, "--replicas", "2"), answers(f"{url}/v1/models"))
        )
        check_hits(url)
        check_death(url, "replica")
        check_death(url, "server")
        check_update(kept, url, port, logs / name)
    print("ray: all checks hold")
    return 0


def install(folder: Path) -> None:
    """Ray's environment, unless it is there."""
    if (folder / "bin" / "ray").exists():
        return
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *PACKAGES], check=True)


def command(environment: Path, port: str, *own: str) -> list[str]:
    """The example's command. openinfer runs in the environment of this script."""
    return [str(environment / "bin" / "python"), str(ROOT / "examples/ray_serve/app.py"), str(MODEL), *own,
            "--cpus", "0.5", "--port", port, "--command", f"{sys.executable} -m openinfer.cli",
            "--", "--device", "cpu", "--served-model-name", f"on-{port}"]  # fmt: skip


def servers(port: str) -> dict[int, int]:
    """Process ids of the replicas' servers, each with that of its parent, which is Ray's."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"on-{port}".encode() in words and b"serve" in words and b"--replicas" not in words:
            found[int(folder.name)] = parent
    return found


def check_hits(url: str) -> None:
    """Questions on a document must find it in the cache of the replica that they reach."""
    documents = [f"{n * 7919} is the number of this document. " + f"the {n} of {n * 37 % 101} goes on. " * 12
                 for n in range(DOCUMENTS)]  # fmt: skip
    found = 0
    for turn in range(QUESTIONS + 1):
        for document in documents:
            usage = ask(url, f"{document} Question {turn}: who?")
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found += turn > 0 and cached > usage["prompt_tokens"] // 2
    print(f"ray: {found} of {DOCUMENTS * QUESTIONS} questions reached the replica with their document")
    if found < DOCUMENTS * QUESTIONS:
        raise CheckFailed("Ray's router does not keep prefixes together")


class Load:
    """Clients that ask one request after the other; half of them stream. outcomes: how many ended in which way."""

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def _ask(self, client: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            text = f"{(client + 1) * turn * 7919} " * 20  # nothing that Ray's router would keep together
            self.outcomes[self._once(text, stream=client % 2 == 0)] += 1

    def _once(self, text: str, *, stream: bool) -> str:
        """answered, broken (off, after it had begun) or failed."""
        body = chat(text, max_tokens=60, stream=stream, ignore_eos=True)
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                pieces = response.read()
        except http.client.IncompleteRead as error:
            return "broken" if error.partial else "failed"
        except (OSError, http.client.HTTPException):
            return "failed"
        if stream:
            return "answered" if b"data: [DONE]" in pieces else "broken"
        return "answered" if json.loads(pieces)["usage"]["completion_tokens"] == 60 else "broken"

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(LIMIT_S)


def check_death(url: str, killed: str) -> None:
    """Kill a replica, or its server alone, under load."""
    port, load = url.rpartition(":")[2], Load(url)
    before = servers(port)
    with load.running():
        time.sleep(2)
        began = time.monotonic()
        os.kill(min(before) if killed == "server" else before[min(before)], signal.SIGKILL)
        wait_for(
            lambda: len(servers(port)) == 2 and set(servers(port)) != set(before),
            "a replica does not come back",
        )
        back = time.monotonic() - began
        time.sleep(2)
    print(
        f"ray: a {killed} was killed under load: {dict(load.outcomes)}; another was started {back:.1f} s later"
    )
    if load.outcomes["failed"] or load.outcomes["broken"] > CLIENTS // 2:
        raise CheckFailed("only the killed replica's streams may break off")


def check_update(environment: Path, url: str, port: str, log: Path) -> None:
    """Replace the replicas under load, and let Ray add a third."""
    address = re.search(r"RAY_ADDRESS=(\S+)", log.read_text())
    if address is None:
        raise CheckFailed("the command does not print the address of its cluster")
    before, load = set(servers(port)), Load(url)
    with load.running():
        update = subprocess.run(
            command(environment, port, "--replicas", "2:3", "--requests", "1", "--drain", "30"), capture_output=True,
            text=True, env={**os.environ, "RAY_ADDRESS": address[1]}, timeout=LIMIT_S,
        )  # fmt: skip
        if update.returncode:
            raise CheckFailed(update.stdout + update.stderr)
        wait_for(lambda: not before & set(servers(port)), "the old replicas do not leave")
        wait_for(lambda: len(servers(port)) == 3, "no replica is added")
    print(f"ray: both replicas were replaced under load, a third was added: {dict(load.outcomes)}")
    if set(load.outcomes) != {"answered"}:
        raise CheckFailed("an update must lose nothing")


def wait_for(holds: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise CheckFailed(problem)
        time.sleep(0.1)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine of two cores takes longer than Ray's 5 s
    }
    sys.exit(main())
