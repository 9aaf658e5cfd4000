"""locust: users who chat, whole and streamed, for some seconds; no request fails. This file is the locustfile too."""

from __future__ import annotations

import json
import subprocess
import sys

from locust import FastHttpUser, HttpUser, constant, task

ASK = {
    "model": "qwen3-tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "ignore_eos": True,
}
LOAD = "--headless --users 6 --spawn-rate 6 --run-time 5 --stop-timeout 10 --json --skip-log"


class Chats(HttpUser):
    """With requests, whole answers and plain GETs."""

    wait_time = constant(0)

    @task(5)
    def chat(self) -> None:
        with self.client.post("/v1/chat/completions", json=ASK, catch_response=True) as answer:
            if answer.json()["usage"]["completion_tokens"] != 8:
                answer.failure("too few tokens")

    @task
    def models(self) -> None:
        self.client.get("/v1/models")


class Streams(FastHttpUser):
    """With geventhttpclient, answers as they come."""

    wait_time = constant(0)

    @task
    def stream(self) -> None:
        body = {**ASK, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            text = answer.stream.read()
            if not text.endswith(b"data: [DONE]\n\n"):
                answer.failure(f"ended with {text[-40:]!r}")


def check_a_load(real: str, speaker: str) -> None:
    command = [sys.executable, "-m", "locust", "-f", __file__, "--host", real, *LOAD.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {(one["method"], one["name"]) for one in found} == {
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
    }
    assert all(one["num_requests"] > 0 and one["num_failures"] == 0 for one in found), found
