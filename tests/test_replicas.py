"""--data-parallel-size with real engines on a CPU: a replica is killed under load; each has its part of the options."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from openinfer.kvpool import InvalidConfig
from openinfer.recipes.engine.devices import split
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options

MODEL = Path(__file__).parent / "goldens" / "qwen3-tiny"


def engines_of(pid: int) -> list[int]:
    found = list[int]()
    for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"engine_process" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(int(one))
    return found


def test_a_replica_is_killed_under_load_and_comes_back(server: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--kv-offload-dir", str(tmp_path), "--kv-offload-disk-gb", "0.1", "--enable-sleep-mode")
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/kv",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    one = server(
        MODEL,
        "--data-parallel-size",
        "2",
        "--max-num-seqs",
        "4",
        *flags,
        "--kv-events-config",
        json.dumps(events),
    )
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
    assert [ranks_of_events(f"ipc://{tmp_path}/r{end}") for end in ("", "_dp1")] == [{0}, {1}]
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
    wait_until_both_serve(one, engines[0])
    assert [ask(prompt) for prompt in prompts] == [(200, tokens) for tokens in right]
    assert httpx.post(f"{one.url}/sleep").status_code == 200
    assert ask(prompts[0])[0] == 503
    os.kill(engines[1], signal.SIGKILL)
    wait_until_both_serve(one, engines[1])
    assert httpx.get(f"{one.url}/is_sleeping").json() == {"is_sleeping": True}
    assert (
        httpx.post(f"{one.url}/wake_up").status_code == 200
    )  # also the one that was started while the other slept
    assert [ask(prompt) for prompt in prompts] == [(200, tokens) for tokens in right]
    assert set(one.settled().values()) == {0.0}
    assert one.stop() == 0


def wait_until_both_serve(one: Any, dead: int) -> None:
    deadline = time.monotonic() + 30
    while len(set(engines_of(one.process.pid)) - {dead}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    while httpx.get(f"{one.url}/health").json()["status"] != "ok" and time.monotonic() < deadline:
        time.sleep(0.05)


def ranks_of_events(replay: str) -> set[int]:
    """The data-parallel ranks of the events that a replica has published."""
    found: set[int] = set()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(replay)
        client.send_multipart([b"", bytes(8)])
        while client.poll(5000):
            *_, payload = client.recv_multipart()
            if not payload:
                return found
            found.add(msgspec.msgpack.decode(payload)[2])
    raise AssertionError("no end of the replay within 5 s")


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
        (Options(trace="t"), "--trace is not possible with --data-parallel-size"),
        (Options(device="cuda:1"), "names one GPU: name them by --device-ids alone"),
        (Options(device="cuda", device_ids="0"), "name 2 different GPUs"),
    ],
)
def test_options_of_one_engine_are_refused(options: Options, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        split(options, 2)


def test_replicas_publish_events_at_ports_that_follow() -> None:
    given = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600"}
    found = [
        json.loads(one.kv_events_config or "")
        for one in split(Options(kv_events_config=json.dumps(given)), 3)
    ]
    assert [(one["endpoint"], one["replay_endpoint"], one["data_parallel_rank"]) for one in found] == [
        ("tcp://*:5557", "tcp://*:5600", 0),
        ("tcp://*:5558", "tcp://*:5601", 1),
        ("tcp://*:5559", "tcp://*:5602", 2),
    ]
    given["replay_endpoint"] = "tcp://*:5558"
    with pytest.raises(
        InvalidConfig, match="need 2 ports each, one for each replica; give ports further apart"
    ):
        split(Options(kv_events_config=json.dumps(given)), 2)
    (_, second) = split(Options(kv_events_config='{"endpoint": "ipc:///tmp/kv"}'), 2)
    assert json.loads(second.kv_events_config or "")["endpoint"] == "ipc:///tmp/kv_dp1"
