"""What clients see when things break: engines that die or hang, clients that leave, queues that fill, the end."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

ENDLESS = {"prompt": [300], "max_tokens": 4000, "ignore_eos": True}
SLOW = {"step_delay_s": 0.002}
NO_CHATS = {"template": None}  # a process less to start


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait for it; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.002)
    return time.monotonic() - began


class Stream:
    """A streamed completion being read in a thread."""

    def __init__(self, live: Any, **body: Any) -> None:
        self.chunks = 0
        self.lines: list[str] = []
        self.status: int | None = None
        self._live = live
        self._body = {**ENDLESS, "stream": True, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url = f"http://127.0.0.1:{self._live.port}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=10) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.lines.append(line.removeprefix("data: "))
                    self.chunks += 1

    def wait_for_tokens(self) -> None:
        until(lambda: self.chunks > 2)

    def end(self) -> list[str]:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.lines


def post_raw(live: Any, **body: Any) -> socket.socket:
    """A request whose connection we keep, to drop it when we like."""
    raw = json.dumps({**ENDLESS, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", live.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("process", [False, True])
def test_an_engine_that_dies_mid_stream_is_an_error_then_done(start: Any, process: bool) -> None:
    live = start(
        {"step_delay_s": 0.01} | ({} if process else {"fail_at_step": 80}), NO_CHATS, process=process
    )
    stream = Stream(live)
    unary = threading.Thread(target=lambda: answers.append(live.post("/v1/completions", **ENDLESS)))
    answers: list[httpx.Response] = []
    unary.start()
    stream.wait_for_tokens()
    until(lambda: live.driver.stats().running == 2)
    if process:
        os.kill(live.driver.pid, signal.SIGKILL)
    *_, error, done = stream.end()
    unary.join(10)
    assert stream.status == 200
    assert done == "[DONE]"
    cause = "killed by SIGKILL" if process else "step failed, as asked"
    assert cause in json.loads(error)["error"]["message"]
    assert json.loads(error)["error"]["code"] == "engine_error"
    assert answers[0].status_code == 500
    for path in ("/health", "/ready"):
        refused = live.http.get(path)
        assert refused.status_code == 503
        assert cause in refused.text
    refused = live.post("/v1/completions", prompt=[5])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    live.begin_stop()
    live.thread.join(5)
    assert live.exit_code == 1


def test_the_server_ends_by_itself_when_the_engine_is_lost(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openinfer.frontend.http.server.DEATH_LINGER_S", 0.05)
    live = start(SLOW | {"fail_at_step": 3}, NO_CHATS)
    assert live.post("/v1/completions", **ENDLESS).status_code == 500
    live.thread.join(5)
    assert live.exit_code == 1


@pytest.mark.parametrize("process", [False, True])
def test_a_hung_engine_turns_health_to_503(start: Any, process: bool) -> None:
    live = start({"hang_at_step": 5, "step_delay_s": 0.01}, NO_CHATS, process=process, hang_timeout_s=1)
    stream = Stream(live)
    until(lambda: stream.chunks > 0)  # a busy machine may have four tokens in one chunk
    assert live.http.get("/health").status_code == 200
    until(lambda: live.http.get("/health").status_code == 503)
    assert "hangs" in live.http.get("/health").text
    live.begin_stop()  # aborting reaches no engine, but the client gets its end
    *_, error, done = stream.end()
    assert done == "[DONE]"
    assert "shutting down" in error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("process", [False, True])
def test_a_client_that_leaves_frees_its_kv(start: Any, stream: bool, process: bool) -> None:
    live = start(SLOW, NO_CHATS, process=process)
    connection = post_raw(live, stream=stream, n=3)
    until(lambda: live.driver.stats().kv_used_tokens > 10)
    connection.close()
    until(lambda: not live.service.active)
    live.post("/v1/completions", prompt=[5], max_tokens=1)  # its steps bring newer numbers
    assert live.driver.stats().kv_used_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_forgotten(start: Any, stream: bool) -> None:
    live = start(SLOW | {"max_running": 1}, NO_CHATS)
    running = Stream(live, max_tokens=300)
    running.wait_for_tokens()
    connection = post_raw(live, stream=stream)
    until(lambda: live.driver.stats().waiting == 1)
    connection.close()
    until(lambda: live.driver.stats().waiting == 0)
    assert running.end()[-1] == "[DONE]"


@pytest.mark.parametrize("kind", ["streamed", "unary", "queued"])
def test_blocks_are_free_again_within_100_ms(start: Any, kind: str) -> None:
    live = start(SLOW | {"max_running": 1}, NO_CHATS, process=True)
    held = lambda: live.driver.stats().kv_used_tokens  # noqa: E731
    seconds = []
    for _ in range(9):  # of other work on the machine, the median knows nothing
        first = post_raw(live, stream=kind == "streamed")
        until(lambda: held() > 3)
        if kind == "queued":
            second = post_raw(live)
            until(lambda: live.driver.stats().waiting == 1)
            second.close()
            seconds.append(until(lambda: live.driver.stats().waiting == 0))
            first.close()
            until(lambda: held() == 0)
        else:
            first.close()
            seconds.append(until(lambda: held() == 0))
    assert sorted(seconds)[4] < 0.1


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after(start: Any, stream: bool) -> None:
    live = start(SLOW | {"max_running": 1, "max_waiting": 1}, NO_CHATS)
    connections = [post_raw(live, stream=True)]
    until(lambda: live.driver.stats().running == 1)
    connections.append(post_raw(live, stream=True))
    until(lambda: live.driver.stats().waiting == 1)
    refused = live.post("/v1/completions", **ENDLESS, stream=stream)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert "queue is full" in refused.json()["error"]["message"]
    for connection in connections:
        connection.close()
    until(lambda: not live.service.active)
    assert live.post("/v1/completions", prompt=[5], max_tokens=1).status_code == 200


def test_one_refused_choice_ends_the_others(start: Any) -> None:
    live = start(SLOW | {"max_running": 1, "max_waiting": 1}, NO_CHATS)
    assert live.post("/v1/completions", **ENDLESS, n=8).status_code == 503
    until(lambda: not live.service.active)
    live.post("/v1/completions", prompt=[5], max_tokens=1)
    assert live.driver.stats().kv_used_tokens == 0


def test_a_slow_reader_gets_fewer_larger_events_and_all_the_text(start: Any, tokenizer: Any) -> None:
    # Enough text to fill the socket's buffers many times over while nobody reads.
    live = start({"max_model_len": 200_000, "script": [300]}, NO_CHATS)
    connection = post_raw(live, max_tokens=100_000, stream=True, return_token_ids=True)
    until(lambda: live.driver.stats().generation_tokens >= 100_000, timeout_s=20)
    connection.settimeout(10)
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += connection.recv(1 << 20)
    connection.close()
    lines = received.replace(b"\r\n", b"\n").split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 100_000
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == tokenizer.token_text(300) * 100_000
    assert len(events) < 50_000


def test_a_body_that_stops_coming_is_given_up(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openinfer.frontend.http.body.BODY_TIMEOUT_S", 0.1)
    live = start(app=NO_CHATS)
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    answer = connection.recv(1 << 16)
    while b"took longer than 0.1 s" not in answer:
        more = connection.recv(1 << 16)
        assert more, answer
        answer += more
    connection.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert live.post("/v1/completions", prompt=[5], max_tokens=1).status_code == 200


def test_shutdown_lets_requests_finish_and_refuses_new_ones(start: Any) -> None:
    live = start(SLOW, NO_CHATS, shutdown_timeout_s=10)
    stream = Stream(live, max_tokens=150)
    stream.wait_for_tokens()
    live.begin_stop()
    until(lambda: live.http.get("/ready").status_code == 503)
    assert live.http.get("/health").status_code == 200
    refused = live.post("/v1/completions", prompt=[5])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    *_, last, done = stream.end()
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    live.thread.join(5)
    assert live.exit_code == 0


def test_shutdown_aborts_what_takes_too_long(start: Any) -> None:
    live = start(SLOW, NO_CHATS, shutdown_timeout_s=0.1)
    stream = Stream(live)
    stream.wait_for_tokens()
    live.begin_stop()
    *_, error, done = stream.end()
    assert done == "[DONE]"
    assert json.loads(error)["error"]["message"] == "the server is shutting down"
    live.thread.join(5)
    assert live.exit_code == 0


def test_small_answers_are_not_delayed(start: Any) -> None:
    live = start(app=NO_CHATS)
    seconds = []
    for _ in range(20):
        began = time.monotonic()
        live.post("/v1/completions", prompt=[5], max_tokens=1)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.035  # Nagle and delayed acknowledgements cost 0.04 each


NUMBERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "priority", "logprobs", "prompt_logprobs")
ENDPOINTS = {
    "/v1/completions": {"prompt": [300], **dict.fromkeys((*NUMBERS, "temperature", "top_p", "min_p"))},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        **dict.fromkeys((*NUMBERS, "max_completion_tokens", "top_logprobs", "temperature")),
    },
    "/v1/responses": {
        "input": "x",
        **dict.fromkeys(("max_output_tokens", "top_logprobs", "temperature", "top_p")),
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x"}],
        "model": "fake",
        **dict.fromkeys(("max_tokens", "top_k", "temperature", "top_p")),
    },
}


def test_numbers_that_no_message_can_carry(start: Any) -> None:
    live = start({"features": ["prompt_logprobs"]}, process=True, hang_timeout_s=0.2)
    for path, body in ENDPOINTS.items():
        given = {name: value for name, value in body.items() if value is not None}
        for name in body.keys() - given.keys():
            for value in (2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400):
                answer = live.post(path, **({"max_tokens": 1} | given | {name: value}))
                assert answer.status_code < 500, (path, name, value, answer.text)
        for name, value in (
            ("stop_token_ids", [2**64]),
            ("logit_bias", {str(2**64): 1}),
            ("allowed_token_ids", [2**64]),
        ):
            answer = live.post(path, **({"max_tokens": 1} | given | {name: value}))
            assert answer.status_code < 500, (path, name, answer.text)
    assert not live.driver._sinks
    time.sleep(0.3)
    assert live.http.get("/health").status_code == 200
