"""Drills: what a server does under what seldom happens. Figures are printed (`pytest -s`) for docs/faults.md."""

import contextlib
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

SCRIPT = [sys.executable, str(Path(__file__).parent / "fake_recipe.py")]
SHORT = {"prompt": [5], "max_tokens": 3}
Launch = Callable[..., Any]


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def processor_s(pid: int) -> float:
    """Seconds of processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(url: str) -> float:
    """The seconds of one request."""
    began = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} open files are needed, the system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_idle_connections_cost_little_and_hold_up_nobody(model_dir: Path, launch: Launch, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # as shells have it; the server asks for more
    try:
        server = launch(model_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    port, pid = int(server.url.rsplit(":", 1)[1]), server.process.pid
    for _ in range(20):
        ask(server.url)
    before = private_bytes(pid)
    with open_files(count + 200), contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        began = processor_s(pid)
        waits = sorted(ask(server.url) for _ in range(30))
        each_s = (processor_s(pid) - began) / 30
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        each = (private_bytes(pid) - before) / count
    print(
        f"{count} idle: {each:.0f} bytes each, a request {waits[15] * 1e3:.1f} ms, at most {waits[-1] * 1e3:.1f} ms"
    )
    assert files > count
    assert each < 20_000
    assert each_s < 0.1
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_more_connections_than_files_do_not_stop_the_server(
    model_dir: Path, tmp_path: Path, loop: str
) -> None:
    """asyncio lets them wait, uvloop closes them at once."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    else:
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    command = ["bash", "-c", 'ulimit -n 80; exec "$@"', "-", *SCRIPT, str(model_dir), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    url = next(line for line in process.stderr if "ready on" in line).split("ready on ")[1].split()[0]
    with contextlib.ExitStack() as stack:
        address, opened = ("127.0.0.1", int(url.rsplit(":", 1)[1])), []
        for _ in range(120):
            opened.append(stack.enter_context(socket.create_connection(address, timeout=5)))
        readable, _, _ = select.select(opened[-1:], [], [], 10 if loop == "uvloop" else 0.5)
        assert bool(readable) == (loop == "uvloop")
        assert process.poll() is None
    until = time.monotonic() + 20
    while True:
        with contextlib.suppress(httpx.HTTPError):
            ask(url)
            break
        assert time.monotonic() < until
    process.kill()
    _, said = process.communicate()
    assert said.count("new connections wait: Too many open files") == (loop == "asyncio")
    assert "Traceback" not in said


def test_a_log_on_a_full_disk_does_not_stop_a_server(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        command = [*SCRIPT, str(model_dir), "--port", str(port), "--log-requests"]
        process = subprocess.Popen(command, stderr=full, stdout=full)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 20
    while True:
        with contextlib.suppress(httpx.HTTPError):
            ask(url)
            break
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    for _ in range(20):
        ask(url)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_a_directory_that_cannot_be_written_to_is_one_line(model_dir: Path) -> None:
    # Not even root can write below /proc. tempfile would take another directory by itself.
    code = """
import runpy, sys, tempfile
tempfile.tempdir, sys.argv = "/proc", sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    for flags in ([], ["--frontends", "2"]):
        command = [sys.executable, "-c", code, SCRIPT[1], str(model_dir), "--port", "0", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr, done.stderr
        assert "/proc/openinfer-" in done.stderr.splitlines()[-1]


def test_clocks_that_jump_change_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start({"step_delay_s": 0.001}, hang_timeout_s=5.0)
    rng, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + rng.choice([-1, 1]) * rng.randrange(400 * 86_400))
    for stream in (False, True) * 10:
        body = {**SHORT, "max_tokens": 20, "ignore_eos": True, "stream": stream}
        assert live.http.post("/v1/completions", json=body).status_code == 200
        assert live.http.get("/health").status_code == 200
        assert live.http.get("/metrics").status_code == 200
