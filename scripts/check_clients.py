"""What people point at a server, each in an environment of its own: `python scripts/check_clients.py [CLIENT ...]`.

For every client (all by default) a fresh environment gets the pinned packages below, and its program in scripts/clients
runs there against two servers on the loopback: a small model of random weights on the CPU, and one that says what it is
asked for (speaker.py). Besides clients there are `page`, which looks at / with a headless Chromium, and `openapi`,
which lets Schemathesis loose on the document. Nothing else can be reached: telemetry is off, proxies lead nowhere.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "scripts" / "clients"
CHECKPOINT = ROOT / "tests" / "goldens" / "qwen3-tiny"
CLIENTS: dict[str, tuple[str, ...]] = {
    "agents": ("openai-agents==0.24.0",),
    "anthropic": ("anthropic==2.12.0",),
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # it wants mcp as soon as there are tools
    "openapi": ("schemathesis==4.32.5",),
    "page": ("selenium==4.51.0",),
}
ALONE = {
    "DO_NOT_TRACK": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "SE_OFFLINE": "true",
}
START_LIMIT_S = 60
CLIENT_LIMIT_S = 900
SKIPPED = 77  # a program's exit code, with the reason as its last line


class CheckFailed(Exception):
    """A client does not work; the message says where."""


def main() -> int:
    """Check the clients asked for; 0 if all pass, 77 if none failed and one was skipped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], metavar="CLIENT")
    args = parser.parse_args()
    results = []
    serve = ["-m", "openinfer.cli", "serve", str(CHECKPOINT), "--device", "cpu", "--port", "0"]
    # A short context: noise that nobody bounds must not take minutes.
    real = [*serve, "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "512"]
    with server("real", real) as real_url, server("speaker", [str(PROGRAMS / "speaker.py")]) as speaker_url:
        for client in args.clients or CLIENTS:
            try:
                results.append(check(client, real_url, speaker_url))
            except CheckFailed as error:
                results.append(1)
                print(f"{client}: FAILED: {error}", flush=True)
    return 1 if 1 in results else max(results)


@contextmanager
def server(name: str, arguments: list[str]) -> Iterator[str]:
    """A server in a process of its own, by its address; ended in order, and its log searched for tracebacks."""
    with tempfile.TemporaryDirectory(prefix="openinfer-server-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen([sys.executable, *arguments], stderr=stream)
        try:
            yield wait_until_ready(name, process, log)
        finally:
            process.terminate()
            code = process.wait(30)
        if code or "Traceback" in log.read_text():
            raise CheckFailed(f"the {name} server ended with code {code}:\n{log.read_text()[-4000:]}")


def wait_until_ready(name: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """The address in its log. Raises CheckFailed."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"ready on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise CheckFailed(f"the {name} server did not get ready:\n{log.read_text()[-4000:]}")


def check(client: str, real: str, speaker: str) -> int:
    """Install a client and run its program; 0, or SKIPPED. Raises CheckFailed."""
    with tempfile.TemporaryDirectory(prefix=f"openinfer-{client}-") as temporary:
        folder = Path(temporary)
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *CLIENTS[client]]
        command(f"install {' '.join(CLIENTS[client])}", pip, dict(os.environ), folder)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"TMPDIR": temporary, **ALONE}
        program = [python, str(PROGRAMS / "run.py"), f"{client}_client", real, speaker]
        code, output = command(client, program, env, folder)
    print("\n".join(line for line in output.splitlines() if line.startswith(f"{client}_client")), flush=True)
    return code


def command(what: str, arguments: list[str], env: dict[str, str], cwd: Path) -> tuple[int, str]:
    """Run a command where litter may lie; its exit code (0 or SKIPPED) and output. Raises CheckFailed."""
    try:
        done = subprocess.run(
            arguments, env=env, text=True, capture_output=True, timeout=CLIENT_LIMIT_S, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{what} took longer than {CLIENT_LIMIT_S} s") from error
    if done.returncode not in (0, SKIPPED):
        tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-40:])
        raise CheckFailed(f"{what} failed with exit code {done.returncode}:\n    {tail}")
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
