"""Other people's clients, each in an environment of its own: `python scripts/check_clients.py [CLIENT ...]`.

For every client (all by default) a fresh environment gets the pinned packages below, from PyPI or npm. The client's
program in scripts/clients runs there against three servers on the loopback: a small model of random weights on the CPU,
one that says what a request tells it to say (speaker.py), and a small trained model. Besides clients there are `page`,
which looks at / with a headless Chromium, and `openapi`, which runs Schemathesis on the document. No other address can
be reached: telemetry is off, and proxies lead nowhere (Qwen Code, which heeds no NO_PROXY, has none). With `--write`
the table of docs/clients.md gets the rows of the clients that ran. With `--here` no environment is made: the script's
own has the clients.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "scripts" / "clients"
CHECKPOINT = ROOT / "tests" / "goldens" / "qwen3-tiny"
DEMO = ROOT / "demo" / "qwen3"
TABLE = ROOT / "docs" / "clients.md"


@dataclass(frozen=True)
class Client:
    """packages: pinned, the client's own first. tried: what its program does, for the table.
    bare: pinned, installed without what they depend on; the client's own is the first of them, if there are any."""

    name: str
    packages: tuple[str, ...]
    tried: str
    npm: bool = False
    bare: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The version of the client's own package."""
        return (*self.bare, *self.packages)[0].rpartition("@" if self.npm else "==")[2]


AI_SDK = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7")
# A torch without CUDA's libraries, where pip knows one.
TORCH = "torch==2.13.0"
# The packages that vLLM's benchmark client imports, of the eighty that vLLM depends on.
VLLM_PARTS = """aiohttp==3.14.5 apache-tvm-ffi==0.1.11 cachetools==8.0.1 cbor2==6.3.0 cloudpickle==3.1.2
    einops==0.8.2 fastapi==0.165.0
    llguidance==1.9.1 msgspec==0.22.0 openai==3.54.0 openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7
    pillow==13.0.0 prometheus_client==0.26.0 psutil==7.2.2 py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0
    regex==2026.11.15 requests==2.34.2 tqdm==4.70.1 transformers==5.20.2 uvloop==0.23.0"""
CLIENTS = {
    "agents": Client(
        "openai-agents", ("openai-agents==0.24.0",), "agents with tools, hand-overs, streams, both APIs"
    ),
    "aider": Client("aider", ("aider-chat==0.86.2",), "edits a file in two turns"),
    "aiperf": Client("aiperf", ("aiperf==0.13.0",), "loads on chats, completions, responses and messages"),
    "anthropic": Client(
        "anthropic", ("anthropic==2.12.0",), "messages, streams, tools, typed answers, thoughts"
    ),
    "autogen": Client(
        "autogen",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        "chats, streams, an assistant with a tool, typed answers",
    ),
    "claude_code": Client(
        "Claude Code",
        ("@anthropic-ai/claude-code@2.1.197",),
        "commands in three sessions, over /v1/messages; what they reuse",
        npm=True,
    ),
    "codex": Client(
        "Codex CLI",
        ("@openai/codex@0.171.0",),
        "commands and a tool of an MCP server in two turns, over /v1/responses; what they reuse",
        npm=True,
    ),
    "crewai": Client(
        "crewai", ("crewai==1.15.30",), "its models, streams, a crew with a tool, typed answers"
    ),
    "dspy": Client("dspy", ("dspy==3.4.1",), "a signature in JSON, completions of noise"),
    "evalscope": Client(
        "evalscope", ("evalscope[perf]==1.14.1",), "questions of our own, scored; its load test"
    ),
    "guidance": Client(
        "guidance", ("guidance[openai]==0.3.1",), "chats, choices, patterns, schemas, grammars"
    ),
    "guidellm": Client(
        "guidellm", ("guidellm==0.8.1", TORCH), "loads on completions, chats of one and two turns, responses"
    ),
    "haystack": Client("haystack", ("haystack-ai==3.4.0",), "its chat generator, an agent with a tool"),
    "instructor": Client("instructor", ("instructor==1.17.0",), "typed answers in its modes"),
    "langchain": Client(
        "langchain-openai", ("langchain-openai==1.7.3",), "chats, tools, structured output, streams"
    ),
    # It wants mcp as soon as there are tools.
    "litellm": Client(
        "litellm", ("litellm==1.106.2", "mcp==2.3.0"), "its routes for OpenAI, vLLM and Anthropic"
    ),
    "llama_index": Client(
        "llama-index", ("llama-index-llms-openai-like==0.8.1",), "chats, streams, a tool, typed answers"
    ),
    "llm": Client("llm", ("llm==0.36",), "prompts, conversations, a schema, a tool, on three APIs"),
    "lm_eval": Client(
        "lm-eval", ("lm-eval[api]==0.4.13",), "log-likelihoods, generations, chats, the server's tokenizer"
    ),
    "locust": Client("locust", ("locust==2.47.0",), "six users for five seconds, whole answers and streams"),
    "mirascope": Client(
        "mirascope",
        ("mirascope[openai,anthropic]==2.8.2",),
        "calls, streams, a tool, typed answers, on three APIs",
    ),
    "opencode": Client(
        "opencode", ("opencode-ai@1.18.33",), "commands in two turns on three APIs; what they reuse", npm=True
    ),
    "openai_node": Client(
        "openai-node", ("openai@6.49.0", "zod@4.6.7"), "chats, tool runner, responses, zod", npm=True
    ),
    "openapi": Client("Schemathesis", ("schemathesis==4.32.5",), "the OpenAPI document, 5 minutes"),
    "outlines": Client(
        "outlines", ("outlines[openai]==1.3.3",), "chats, streams, types, patterns, choices, a grammar"
    ),
    "page": Client("Chromium", ("selenium==4.51.0",), "the page at /"),
    "pydantic_ai": Client(
        "pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), "tools, types with dates, both APIs"
    ),
    "qwen_code": Client(
        "Qwen Code", ("@qwen-code/qwen-code@0.15.10",), "commands in two turns; what they reuse", npm=True
    ),
    "semantic_kernel": Client(
        "semantic-kernel",
        ("semantic-kernel==1.45.0",),
        "chats, texts, an agent with a plug-in, typed answers",
    ),
    "smolagents": Client(
        "smolagents", ("smolagents[openai]==1.26.0",), "chats, streams, calls, five stop strings"
    ),
    "vercel_ai": Client(
        "Vercel AI SDK", AI_SDK, "tool loops of two steps with both providers, objects", npm=True
    ),
    "vllm": Client(
        "vLLM's benchmark",
        (TORCH, *VLLM_PARTS.split()),
        "`vllm bench serve`, without the rest of vLLM: completions, chats, responses",
        bare=("vllm==0.33.0", "xgrammar==0.2.8"),
    ),
}
ALONE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
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


@dataclass
class Outcome:
    """How a client's program went: its exit code, how many of its checks passed, and what it says of the model."""

    code: int
    passed: int = 0
    model: str = ""
    problem: str = ""


def main() -> int:
    """Check the clients asked for; 0 if all pass, 77 if none failed and one was skipped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], metavar="CLIENT")
    parser.add_argument("--write", action="store_true", help="write the outcomes into docs/clients.md")
    parser.add_argument("--here", action="store_true", help="install no client: this environment has them")
    args = parser.parse_args()
    results = {}
    serve = ["-m", "openinfer.cli", "serve", str(CHECKPOINT), "--device", "cpu", "--port", "0"]
    # A short context, because the noise of random weights has no end of its own and must not take minutes.
    real = [*serve, "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "512"]
    demo = ["-m", "openinfer.cli", "serve", str(DEMO), "--device", "cpu", "--port", "0"]
    with (
        server("real", real) as real_url,
        server("speaker", [str(PROGRAMS / "speaker.py")]) as speaker_url,
        server("demo", demo) as demo_url,
    ):
        for client in args.clients or CLIENTS:
            try:
                results[client] = check(client, [real_url, speaker_url, demo_url], here=args.here)
            except CheckFailed as error:
                results[client] = Outcome(1, problem=str(error).splitlines()[-1].strip())
                print(f"{client}: FAILED: {error}", flush=True)
            if args.write:
                write_table(client, results[client])
    codes = [outcome.code for outcome in results.values()]
    return 1 if 1 in codes else max(codes)


def write_table(name: str, outcome: Outcome) -> None:
    """Put a client's row into the table, in the place of an older one."""
    head, _, rest = TABLE.read_text().partition("| --- |")
    table, _, after = rest.partition("\n\n")
    line, *rows = table.splitlines()
    found = {row.split(" | ")[0]: row for row in rows}
    client = CLIENTS[name]
    passed = {0: f"all {outcome.passed}", SKIPPED: "skipped"}.get(outcome.code, "no")
    fault = outcome.model or outcome.problem or "nothing"
    found[f"| {client.name}"] = f"| {client.name} | {client.version} | {client.tried} | {passed} | {fault} |"
    rows = [f"{head}| --- |{line}", *sorted(found.values(), key=str.lower)]
    TABLE.write_text("\n".join(rows) + (f"\n\n{after}" if after else "\n"))


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


def check(client: str, urls: list[str], *, here: bool) -> Outcome:
    """Install a client, if it is not here, and run its program with the servers' addresses. Raises CheckFailed."""
    with tempfile.TemporaryDirectory(prefix=f"openinfer-{client}-") as temporary:
        folder = Path(temporary)
        program = run_by(sys.executable, client) if here else install(client, folder)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"TMPDIR": temporary, "HOME": temporary, **ALONE}
        code, output = command(client, [*program, *urls], env, folder)
    # The line may begin with the client's own output, so the search is not anchored.
    said = re.findall(rf"{client}_client: .*", output)
    print("\n".join(said), flush=True)
    faults = [line.partition("model: ")[2] for line in said if "_client: model: " in line]
    skipped = said[-1].partition("skipped, ")[2] if code == SKIPPED else ""
    return Outcome(code, sum("_client: check_" in line for line in said), "; ".join(faults), skipped)


def install(client: str, folder: Path) -> list[str]:
    """Make the client's environment; the command that runs its program there. Raises CheckFailed."""
    packages = CLIENTS[client].packages
    what = f"install {' '.join(packages)}"
    if not CLIENTS[client].npm:
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        # Not compiled: most modules of a large package are never imported.
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
        command(what, [*pip, *packages], dict(os.environ), folder)
        if bare := CLIENTS[client].bare:
            command(f"install {' '.join(bare)}", [*pip, "--no-deps", *bare], dict(os.environ), folder)
        return run_by(python, client)
    (folder / "package.json").write_text('{"private": true}')
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages]
    command(what, npm, dict(os.environ), folder)
    for name in ("checks.mjs", f"{client}_client.mjs"):  # packages are found from where a program lies
        shutil.copy(PROGRAMS / name, folder)
    return ["node", f"{client}_client.mjs"]


def run_by(python: str, client: str) -> list[str]:
    """The command that runs a client's program."""
    return [python, str(PROGRAMS / "run.py"), f"{client}_client"]


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
