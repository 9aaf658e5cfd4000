"""One rule for what is HTTP here, whatever parser is behind it: the rule by itself, then both parsers over a socket."""

import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import openinfer.frontend.http.connections as connections
from openinfer.frontend.http.framing import HEAD_BYTES, Framing

pytestmark = pytest.mark.attack

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"prompt": [5], "max_tokens": 2}).encode()
PLAIN = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x;ext=1\r\n%b\r\n0\r\nT: v\r\n\r\n" % (len(BODY), BODY)
BAD = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "bare LF": b"GET /health HTTP/1.1\nHost: x\n\n",
    "one bare LF": b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "bare CR": b"GET /health HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    "folded": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "folded at once": b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n",
    "space before the colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "length with coding": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "another coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding in 1.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a signed size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "a size with an underscore": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\n",
    "a long extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"e" * 300 + b"\r\n{}\r\n0\r\n\r\n",
    "a chunk that goes on": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n",
    "long trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: vvvv\r\n" * 10_000,
    "many small trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T:\r\n" * 257,
    "many small headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A:\r\n" * 255 + b"\r\n",
    "empty lines": b"\r\n" * 257,
    "chunks of a byte": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 600,
    "another host in the target": b"GET http://y/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target without a path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target of another scheme": b"GET ftp://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a head that comes at once": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: bbbb\r\n" * 10_000 + b"\r\n",
}


def fed(raw: bytes, sizes: Iterator[int]) -> tuple[int, str | None, int]:
    """Sound bytes, what is wrong, and heads, of bytes that come in such pieces."""
    framing, at = Framing(), 0
    while at < len(raw):
        size = next(sizes)
        sound, violation = framing.feed(raw[at : at + size])
        if violation is not None:
            return at + sound, str(violation), framing.heads
        at += size
    return len(raw), None, framing.heads


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_so_however_it_is_cut(name: str) -> None:
    rng = random.Random(name)
    whole = fed(PLAIN + BAD[name], iter([1 << 30]))
    assert whole[1] is not None
    assert whole[0] >= len(PLAIN)
    for most in (1, 2, 7, 1000):
        cut = fed(PLAIN + BAD[name], iter(lambda most=most: rng.randint(1, most), 0))
        assert cut[1:] == whole[1:]


def test_sound_messages_pass_however_they_are_cut() -> None:
    rng = random.Random(0)
    raw = b"\r\n".join([PLAIN, CHUNKED, b"GET / HTTP/1.0\r\n\r\n", PLAIN])
    for most in (1, 3, 50, 10_000):
        for _ in range(20):
            assert fed(raw, iter(lambda most=most: rng.randint(1, most), 0)) == (len(raw), None, 4)


def test_a_body_is_not_looked_at() -> None:
    body = b"\n\r\n\n Host: \r" * 1000
    raw = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert fed(raw * 2, iter(lambda: 999, 0)) == (2 * len(raw), None, 2)


@pytest.mark.parametrize(("size", "sent"), [(1, 517), (16, 586), (127, 65_537), (128, 10**5), (10**4, 10**5)])
def test_chunks_may_be_many_or_small(size: int, sent: int) -> None:
    """512, and one more for each 128 bytes."""
    chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
    framing = Framing()
    framing.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    passed = next((count for count in range(10**5) if framing.feed(chunk)[1] is not None), 10**5)
    assert passed == sent
    framing = Framing()  # the next body of a connection begins anew
    for _ in range(3):
        body = b"1\r\nx\r\n" * 500 + b"0\r\n\r\n"
        assert framing.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)[1] is None


@pytest.fixture(params=["h11", "httptools"])
def live(request: pytest.FixtureRequest, start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    else:
        pytest.importorskip("httptools")
    return start({"step_delay_s": 0.002}, {"template": None})  # no chats: a process less to start


def exchange(live: Any, *parts: bytes) -> bytes:
    """All that the server says to these bytes, until it closes or has said nothing for a while."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=0.7) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.01)
            while data := connection.recv(1 << 16):
                received += data
        except (ConnectionError, TimeoutError):
            pass
    return received


def test_both_parsers_refuse_the_same(live: Any) -> None:
    for name, raw in BAD.items():
        said = exchange(live, raw)
        assert said[:12] in (b"HTTP/1.1 400", b""), name  # a reset may overtake the answer
        assert b"200" not in said[:15], name
    assert live.http.get("/health").status_code == 200


def test_an_absolute_target_is_its_path(live: Any) -> None:
    for target in (
        b"http://x/health",
        b"HTTP://x/health",
        b"http://x/health?a=http://y/",
        b"https://x/%68ealth",
    ):
        said = exchange(live, b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert said.startswith(b"HTTP/1.1 200"), (target, said)


def test_what_follows_a_refusal_is_not_parsed(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a request that was answered before: 404 here, as 401 and 413."""
    monkeypatch.setattr(connections, "LINGER_S", 0.5)
    seen, feed = list[int](), Framing.feed
    monkeypatch.setattr(Framing, "feed", lambda self, data: seen.append(len(data)) or feed(self, data))
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert live.http.get("/health").status_code == 200
        assert connection.recv(1 << 16) == b""
    assert sum(seen) < 1000


@pytest.mark.parametrize(
    "raw",
    [PLAIN, CHUNKED, PLAIN + CHUNKED + PLAIN, PLAIN + PLAIN + CHUNKED[:-60], PLAIN + BAD["two hosts"]],
    ids=["plain", "chunked", "three", "two and a half", "one and a bad one"],
)
def test_a_client_that_closes_its_sending_half_is_answered(live: Any, raw: bytes) -> None:
    count = sum(raw.count(body) for body in (PLAIN, CHUNKED))
    for stream in (False, True):
        sent = raw.replace(b'"max_tokens": 2', b'"stream": 1    ' if stream else b'"max_tokens": 2')
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while data := connection.recv(1 << 16):
                said += data
        assert said.startswith(b"HTTP/1.1 200")
        assert said.count(b"HTTP/1.1 200") == said.count(b"HTTP/1.1 ") == count
        assert said.count(b"[DONE]") == (count if stream else 0)


def test_a_slow_answer_to_a_closed_half_has_no_other_byte(
    live: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Urgent bytes ask whether the client is still there; a reader gets none of them."""
    monkeypatch.setattr(connections, "LOOK_S", (0.01, 0.01, 0.01))
    slow = start({"step_delay_s": 0.1}, {"template": None})
    with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as connection:
        connection.sendall(PLAIN.replace(b'"max_tokens": 2', b'"max_tokens": 5'))
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while data := connection.recv(1 << 16):
            said += data
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(body)["usage"]["completion_tokens"] == 5


def test_a_whole_request_before_a_bad_one_is_answered(live: Any) -> None:
    said = exchange(live, PLAIN + BAD["two hosts"])
    assert said.startswith(b"HTTP/1.1 200")
    assert said.count(b"HTTP/1.1 ") == 1


def test_a_bad_body_is_refused_after_the_answers_before(live: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The application reads the body, or waits behind another request, when the server has refused it."""
    bad = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    for parts, answers in (
        ([bad, b"xyz\r\n"], 0),
        ([bad + b"xyz\r\n"], 0),
        ([PLAIN + bad + b"xyz\r\n"], 1),
        ([PLAIN * 3 + bad + b"xyz\r\n"], 3),
        ([PLAIN * 3 + bad, b"xyz\r\n"], 3),
    ):
        said = exchange(live, *parts)
        assert said.count(b"HTTP/1.1 200") == said.count(b'"finish_reason"') == answers, (parts, said)
        assert said.count(b"HTTP/1.1 400") <= 1
    assert live.http.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("wish", [b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__", b"Upgrade: websocket"])
def test_the_body_of_a_request_that_wishes_to_upgrade_is_read(live: Any, wish: bytes) -> None:
    head = (
        HEAD
        + b"Connection: Upgrade, HTTP2-Settings\r\n"
        + wish
        + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    )
    for parts in (
        [head + BODY + PLAIN],
        [head, BODY[:5], BODY[5:], PLAIN],
        [head[:40], head[40:], BODY + PLAIN],
    ):
        said = exchange(live, *parts)
        assert said.count(b"HTTP/1.1 200") == 2, said
        assert said.count(b'"finish_reason"') == 2
    assert exchange(live, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")[:10] == b"HTTP/1.1 4"


def test_trailers_and_requests_that_nobody_reads_are_bounded(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PIPELINED", 8)
    get = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    for begin, more in (
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"T: " + b"v" * 60_000 + b"\r\n"),
        (get, get * 2000),
        (PLAIN, PLAIN * 500),
    ):
        sent = 0
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
            try:
                connection.sendall(begin)
                for _ in range(2000):
                    connection.sendall(more)
                    sent += len(more)
            except (ConnectionError, TimeoutError):
                pass
        assert sent < 40 << 20
    assert live.http.get("/health").status_code == 200
    assert HEAD_BYTES == 65536
