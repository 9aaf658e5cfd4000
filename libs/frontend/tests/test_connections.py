"""What a connection may cost before there is a request, with either HTTP parser."""

import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import openinfer.frontend.http.connections as connections

WITHOUT_CHATS = {"template": None}  # a process less to start


@pytest.fixture(params=["h11", "httptools"])
def live(request: pytest.FixtureRequest, start: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with that parser, impatient."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.4)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    monkeypatch.setattr("openinfer.frontend.http.body.BODY_TIMEOUT_S", 0.4)
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    else:
        pytest.importorskip("httptools")
    return start({"step_delay_s": 0.01}, WITHOUT_CHATS)


def send(live: Any, raw: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    connection.sendall(raw)
    return connection


def rest(connection: socket.socket) -> bytes:
    with connection:
        received = b""
        try:
            while data := connection.recv(1 << 16):
                received += data
        except ConnectionResetError:
            pass
        return received


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    count = len(body) if length is None else length
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % count, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


SHORT = json.dumps({"prompt": [5], "max_tokens": 2}).encode()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"a" * (1 << 20),
        b"GET /health HTTP/1.1\r\n" + b"X: aaaaaaaaaaaaaa\r\n" * 20_000,
        b"GET /" + b"a" * (1 << 20),
    ],
    ids=["one long header", "many headers", "a long path"],
)
def test_a_head_is_bounded(live: Any, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 60.0)  # it is the size that ends it
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    try:
        connection.sendall(head)
    except ConnectionError:  # refused before all of it was sent
        pass
    assert rest(connection)[:12] in (b"HTTP/1.1 400", b"")  # a reset may overtake the answer
    assert live.http.get("/health").status_code == 200


def test_a_large_body_is_no_large_head(live: Any) -> None:
    body = json.dumps({"prompt": [5] * 3000, "max_tokens": 1, "unknown": "x" * 300_000}).encode()
    connection = send(
        live, post(body) + post(body) + post(SHORT, b"X: " + b"a" * 30_000, b"Connection: close")
    )
    assert rest(connection).count(b"HTTP/1.1 200") == 3


def cut(connection: socket.socket) -> bool:
    """Send a drop; whether the other side has left."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_one_that_sends_nothing_or_a_head_drop_by_drop_is_closed(live: Any) -> None:
    silent = send(live, b"")
    dropping, deadline = send(live, b"GET /hea"), time.monotonic() + 60
    after_one = send(live, post(SHORT))
    assert b"200" in after_one.recv(1 << 16)
    after_one.sendall(b"GET /hea")
    while not cut(dropping):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    dropping.close()
    assert rest(silent) == b""
    rest(after_one)


def test_a_reader_that_takes_nothing_is_cut(live: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.4)
    busy = start({"max_model_len": 1_000_000}, WITHOUT_CHATS)
    busy.buffer_little()
    body = {
        "prompt": [5],
        "max_tokens": 900_000,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect(("127.0.0.1", busy.port))
    connection.sendall(post(json.dumps(body).encode()))
    deadline = time.monotonic() + 60
    while not busy.service.active:
        time.sleep(0.005)
    while busy.service.active:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert busy.driver.stats().generation_tokens < 900_000
    connection.close()


def test_a_long_answer_is_not_a_long_head(live: Any) -> None:
    body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True, "stream": True}
    received = rest(send(live, post(json.dumps(body).encode(), b"Connection: close")))
    assert b"[DONE]" in received


def test_a_body_that_does_not_come_is_408(live: Any) -> None:
    connection = send(live, post(b'{"prompt"', length=100))
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    connection.close()


@pytest.mark.parametrize("coding", [b"Content-Length: 70000", b"Transfer-Encoding: chunked"])
def test_an_answer_before_the_body_keeps_the_connection(live: Any, coding: bytes) -> None:
    connection = send(live, b"POST /nowhere HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % coding)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
    chunked = coding.endswith(b"chunked")
    connection.sendall(b"%x\r\n" % 70000 * chunked + b"a" * 70000 + b"\r\n0\r\n\r\n" * chunked)
    time.sleep(0.1)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"HTTP/1.1 200" in rest(connection)


@pytest.mark.parametrize("coding", [b"Content-Length: 2000000", b"Transfer-Encoding: chunked"])
def test_an_answer_before_a_large_body_ends_the_connection(
    live: Any, coding: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 60)
    connection = send(live, b"POST /nowhere HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % coding)
    if coding.endswith(b"chunked"):
        connection.sendall(b"%x\r\n" % 2_000_000 + b"a" * 1_500_000)
    answer = rest(connection)  # to the end, which comes from the server
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_websocket_is_not_offered(live: Any) -> None:
    head = [b"GET /health HTTP/1.1", b"Host: x", b"Connection: Upgrade", b"Upgrade: websocket"]
    head += [b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Version: 13"]
    connection = send(live, b"\r\n".join(head) + b"\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.close()


def test_the_log_says_which_loop_and_parser(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("httptools")
    with caplog.at_level(logging.INFO, "openinfer.frontend.http.server"):
        start()
    assert "event loop asyncio, HTTP parser httptools" in caplog.text
