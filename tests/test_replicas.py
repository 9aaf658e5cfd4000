"""--data-parallel-size with real engines on a CPU: a replica is killed under load; each has its part of the options."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options
from openinfer.recipes.engine.replicas import split

MODEL = Path(__file__).parent / "goldens" / "qwen3-tiny"


def engines_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"engine_process" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_a_replica_is_killed_under_load_and_comes_back(server: Callable[..., Any], tmp_path: Path) -> None:
    tiers = ("--kv-offload-dir", str(tmp_path), "--kv-offload-disk-gb", "0.1")
    one = server(MODEL, "--data-parallel-size", "2", "--max-num-seqs", "4", *tiers)
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 480) for _ in range(150)] for _ in range(6)]

    def ask(prompt: list[int]) -> tuple[int, Any]:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=60)
        found = answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text
        return answer.status_code, found

    right = [ask(prompt)[1] for prompt in prompts]
    assert [ask(prompt)[1] for prompt in prompts] == right
    metrics = httpx.get(f"{one.url}/metrics").text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="qwen3-tiny"} 864.0' in metrics  # 9 pages each
    assert len(list(tmp_path.glob("replica-[01]/*/about.json"))) == 2
    engines = engines_of(one.process.pid)
    assert len(engines) == 2
    answers: list[tuple[int, tuple[int, Any]]] = []

    def load(index: int) -> None:
        for turn in range(6):
            number = (index + turn) % 6
            answers.append((number, ask(prompts[number])))

    threads = [threading.Thread(target=load, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    os.kill(engines[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    failed = [text for _, (status, text) in answers if status != 200]
    assert len(failed) <= 4  # those that it had
    assert all("SIGKILL" in text or "503" in text for text in failed)
    assert all(found == right[number] for number, (status, found) in answers if status == 200)
    deadline = time.monotonic() + 30
    while len(set(engines_of(one.process.pid)) - {engines[0]}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    while httpx.get(f"{one.url}/health").json()["status"] != "ok" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [ask(prompt) for prompt in prompts] == [(200, tokens) for tokens in right]
    assert set(one.settled().values()) == {0.0}
    assert one.stop() == 0


def test_each_replica_has_its_part_of_the_options() -> None:
    given = Options(device="cpu", kv_offload_gb=8.0, kv_offload_dir="kv", kv_offload_disk_gb=100.0)
    first, second = split(given, 2)
    assert (first.device, first.kv_offload_gb, first.kv_offload_disk_gb) == ("cpu", 4.0, 50.0)
    assert [one.kv_offload_dir for one in (first, second)] == ["kv/replica-0", "kv/replica-1"]
    assert [one.device for one in split(Options(device="cuda"), 2)] == ["cuda:0", "cuda:1"]
    assert [one.device for one in split(Options(device="cuda", device_ids="3,1"), 2)] == ["cuda:3", "cuda:1"]
    ranks = split(Options(device="cuda", tensor_parallel_size=2), 2)
    assert [(one.device, one.device_ids, one.tensor_parallel_size) for one in ranks] == [
        ("cuda", "0,1", 2),
        ("cuda", "2,3", 2),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(kv_events_config="{}"), "--kv-events-config is not possible with --data-parallel-size"),
        (Options(enable_sleep_mode=True), "--enable-sleep-mode is not possible with --data-parallel-size"),
        (Options(trace="t"), "--trace is not possible with --data-parallel-size"),
        (Options(device="cuda:1"), "name their GPUs by --device-ids"),
        (Options(device="cuda", device_ids="0"), "name 2 different GPUs"),
    ],
)
def test_options_of_one_engine_are_refused(options: Options, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        split(options, 2)
