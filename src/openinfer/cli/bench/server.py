"""A server of our own to measure: started, waited for, weighed and stopped."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600.0
SAY_S = 10.0
"""Between two lines about a server that starts."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    process, url: its process, which has ended after the block of `running`, and its URL. ready_s: seconds from process
    start to /health. pss_bytes: idle memory, the proportional set size of the server's processes."""

    process: subprocess.Popen[bytes]
    url: str
    ready_s: float
    pss_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {"ready_s": round(self.ready_s, 3), "pss_bytes": self.pss_bytes}


class NotReady(RuntimeError):
    """The server ended or did not answer in time; the message holds the end of its log."""

    user_can_mend = True


def free_port() -> int:
    """A port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(model_dir: Path, flags: Sequence[str], log: Path | None = None) -> Iterator[Server]:
    """`openinfer serve` of a checkpoint on a free port; see `running`. log: its log, which stays; None: none does."""
    port = free_port()
    words = ["openinfer.cli", "serve", str(model_dir), "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder, running(words, port, log or Path(folder) / "log") as server:
        yield server


@contextlib.contextmanager
def running(module: Sequence[str], port: int, log_path: Path) -> Iterator[Server]:
    """Run `python -m` with these arguments, which serves on the port, until the block is left. Raises NotReady."""
    command = [sys.executable, "-m", *module]
    with log_path.open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(process, port, log_path, began)
        ready_s = time.monotonic() - began
        time.sleep(1.0)  # what start-up leaves to the background is then done
        yield Server(process, f"http://127.0.0.1:{port}", ready_s, sum(map(_pss, _family(process.pid))))
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log_path: Path, began: float) -> None:
    """Return once /health is 200; say every SAY_S seconds where the start is. Raises NotReady."""
    told = began
    while not _healthy(port):
        now = time.monotonic()
        if process.poll() is not None or now - began > START_TIMEOUT_S:
            end = log_path.read_text(errors="replace")[-2000:]
            raise NotReady(f"the server is not ready after {now - began:.0f} s:\n{end}")
        if now - told >= SAY_S:
            told, lines = now, log_path.read_text(errors="replace").splitlines() or ["nothing yet"]
            print(f"openinfer: the server starts, {now - began:.0f} s so far: {lines[-1]}", file=sys.stderr)
        time.sleep(0.01)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[int]:
    """The process and all that came of it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            after_name = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(after_name[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found


def _pss(pid: int) -> int:
    """Proportional set size in bytes; 0 where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
