"""Commands that ask a server which wants an API key."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import chat
from openinfer.cli.api import Api, ApiError
from openinfer.cli.bench import eval as bench_eval
from openinfer.cli.bench import serve as bench_serve

KEY = "s3cret-schlüssel"
USAGE = {"prompt_tokens": 2, "completion_tokens": 1}
CASE = {"kind": "k", "messages": [{"role": "user", "content": "?"}], "check": {"contains": ["yes"]}}


class Handler(BaseHTTPRequestHandler):
    """Answers those who have the key, in chunks where the path is one of a stream."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = {"text": "yes", "message": {"content": "yes"}, "delta": {"content": "yes"}}
        self._answer({"choices": [choice], "usage": USAGE}, stream=body.get("stream", False))

    def _answer(self, body: Any, *, stream: bool = False) -> None:
        known = self.headers.get("Authorization", "").encode("latin-1") == f"Bearer {KEY}".encode()
        data = json.dumps(
            body if known else {"error": {"message": "the API key is missing or wrong"}}
        ).encode()
        data = b"data: " + data + b"\n\ndata: [DONE]\n\n" if stream and known else data
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def commands(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[Callable[[list[str]], int], list[str]]]:
    (tmp_path / "cases.jsonl").write_text(json.dumps(CASE) + "\n")
    found = ["--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    return {
        "bench serve": (bench_serve.main, ["--base-url", url, "--num-prompts", "2", "--num-warmups", "1", *found]),
        "bench eval": (bench_eval.main, [url, "--cases", str(tmp_path / "cases.jsonl"), *found]),
        "chat": (chat.main, [url]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bench serve", "bench eval", "chat"])
@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_key_opens_the_server_and_is_never_shown(
    name: str, how: str, commands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    main, words = commands[name]
    given = ["--api-key", KEY] if how == "flag" else []
    if how == "environment":
        monkeypatch.setenv("OPENINFER_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["openinfer", *name.split(), *words, *given, f"--api-key={KEY}"])
    assert main([*words, *given]) == 0
    shown = [*capsys.readouterr(), *(path.read_text() for path in tmp_path.glob("found.json"))]
    assert not [text for text in shown if "s3cret" in text]
    assert len(shown) == (2 if name == "chat" else 3)


@pytest.mark.parametrize("name", ["bench serve", "bench eval", "chat"])
def test_without_the_key_the_server_s_words_are_one_line(
    name: str, commands: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words = commands[name]
    monkeypatch.delenv("OPENINFER_API_KEY", raising=False)
    assert main(words) == 1
    assert f"openinfer {name}: error: the API key is missing or wrong\n" in capsys.readouterr().err
    monkeypatch.setenv("OPENINFER_API_KEY", "")
    assert main(words) == 1
    assert "error: OPENINFER_API_KEY: an API key is" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://h:port", "http://h:70000"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ApiError, match=r"is not http://HOST\[:PORT\]"):
        Api(url)


def serve(listener: socket.socket, answers: list[bytes]) -> None:
    """Give each connection its answer and end it."""
    for answer in answers:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)


def chat_with(answers: list[bytes]) -> int:
    """The exit code of a chat of one question with a server of these answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("hello\n"))
        thread = threading.Thread(target=serve, args=(listener, answers))
        thread.start()
        code = chat.main([f"http://127.0.0.1:{listener.getsockname()[1]}"])
        thread.join()
    return code


BEGUN = b"HTTP/1.1 200 OK\r\n"
MODEL = BEGUN + b'Content-Length: 26\r\n\r\n{"data": [{"id": "m"}]}   '


def test_an_answer_that_breaks_off_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The server goes in the middle of its list of models, and of a streamed answer."""
    half = BEGUN + b"Content-Length: 99\r\n\r\n{"
    chunk = BEGUN + b'Transfer-Encoding: chunked\r\n\r\n16\r\ndata: {"choices": []}\n\r\n'
    for answers in ([half], [MODEL, chunk]):
        assert chat_with(answers) == 1
        said = capsys.readouterr().err
        assert re.search(r"error: the answer of http://\S+ broke off: .*; the server's log", said)


@pytest.mark.attack
@pytest.mark.parametrize(
    "chunk",
    [
        b"{oops", b'{"x":1}', b"[]", b"5", b"null", b'{"error":"x\x1b[2J"}', b'{"error":{"message":["x\ny"]}}',
        b'{"choices":{}}', b'{"choices":[5]}', b'{"choices":[{"delta":[]}]}', b'{"choices":[{"delta":{"content":5}}]}',
        b'{"choices":[{"delta":{"reasoning":{}}}]}', b"\xff", b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"content":"\\ud800"}}]}', b"[" * 100_000, b'{"x":' * 100_000,
    ],
    ids=range(17),
)  # fmt: skip
def test_chunks_that_are_none_are_one_line(chunk: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_with([MODEL, BEGUN + b"\r\ndata: " + chunk + b"\n\ndata: [DONE]\n\n"]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"openinfer chat: error: [^\x00-\x1f]+\n", said)


@pytest.mark.attack
@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01", b"HTTP/1.1 abc OK\r\n\r\n", BEGUN + b"x" * 100_000, BEGUN + b"\r\n" + b"[" * 100_000,
        BEGUN + b'\r\n{"data":[]}', BEGUN + b'\r\n{"data":[{"id":5}]}', BEGUN + b"\r\n\xff\xfe",
        BEGUN + b'\r\n{"data":{"0":1}}', BEGUN + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
        b"HTTP/1.1 404 No\r\n\r\n\x1b[2J<html>\n", b'HTTP/1.1 500 No\r\n\r\n{"error":[[5]]}',
        b"HTTP/1.1 302 Go\r\nLocation: /x\r\n\r\n", b'HTTP/1.1 400 No\r\nContent-Length: 99\r\n\r\n{"error":',
        b"HTTP/1.1 400 No\r\n\r\n" + b"[" * 100_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_models_that_are_none_are_one_line(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_with([answer]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"openinfer chat: error: [^\x00-\x1f]+\n", said)


@pytest.mark.parametrize(
    "url", ["http://a..b", f"http://{'a' * 70}.x", "http://127.0.0.1:1/ü", "http://h\x1b[2J"]
)
def test_a_host_that_cannot_be_asked_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main([url]) == 1
    assert re.fullmatch(r"openinfer chat: error: [^\x00-\x1f]+\n", capsys.readouterr().err)
