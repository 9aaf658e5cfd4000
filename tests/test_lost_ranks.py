"""A server of several ranks that loses one: every request ends with one error, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from openinfer.kernels.testing import of_the_day

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
FLAGS = ("--tensor-parallel-size", "2", "--max-num-seqs", "4", "--max-num-queued-reqs", "16")
BODY = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}


def children(pid: int, name: str) -> list[int]:
    """Processes below `pid` whose command line has `name`."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    below = [int(one) for one in found]
    named = [one for one in below if name in Path(f"/proc/{one}/cmdline").read_text()]
    return named + [deeper for one in below for deeper in children(one, name)]


class Load:
    """Eight requests under way, half of them streamed: more than there are rows, so some wait."""

    def __init__(self, url: str) -> None:
        self.ends: list[tuple[bool, int]] = []
        self._threads = [threading.Thread(target=self._ask, args=(url, n % 2 == 0)) for n in range(8)]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/metrics").text.count('"} 4.0') == 0 and time.monotonic() < deadline:
            time.sleep(0.05)

    def _ask(self, url: str, stream: bool) -> None:
        answer = httpx.post(f"{url}/v1/completions", json={**BODY, "stream": stream}, timeout=60)
        # A stream that had begun ends with the error and [DONE]; any other answer is the error itself.
        done = answer.text.rstrip().endswith("data: [DONE]") == (answer.status_code == 200)
        self.ends.append((done, answer.text.count('"error"')))

    def wait(self) -> list[tuple[bool, int]]:
        for thread in self._threads:
            thread.join(60)
        return self.ends


ENDED = [(True, 1)] * 8


@pytest.mark.parametrize("who", of_the_day(["follower_process", "engine_process"]))
def test_a_lost_rank_ends_the_server(server, who):
    found = server(TINY, *FLAGS)
    pids = children(found.process.pid, "_process")
    load = Load(found.url)
    (victim,) = children(found.process.pid, who)
    os.kill(victim, signal.SIGKILL)
    assert load.wait() == ENDED
    assert found.process.wait(20) == 1
    assert not [pid for pid in pids if alive(pid)]
    if who == "follower_process":
        assert any("rank 1 of 2 was killed by SIGKILL" in line for line in found.log)


def test_a_lost_rank_is_replaced(server):
    """Killed, then stopped: the engine that hangs for a second is ended and started again."""
    found = server(TINY, *FLAGS, "--restart-engine", "--engine-hang-timeout", "1")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        pids = children(found.process.pid, "engine_process") + (
            ranks := children(found.process.pid, "follower_process")
        )
        load = Load(found.url)
        os.kill(ranks[0], number)
        assert load.wait() == ENDED
        deadline = time.monotonic() + 30
        while httpx.get(f"{found.url}/health").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        answer = httpx.post(f"{found.url}/v1/completions", json={**BODY, "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert not [pid for pid in pids if alive(pid)]
    assert found.stop() == 0


def alive(pid: int) -> bool:
    """Whether a process runs; given a moment to end."""
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return Path(f"/proc/{pid}").exists()
