"""What arrives at a socket when nobody is polite: raw bytes, cut and half-closed connections, odd framing. Seeded.

A client of its own, because real ones cannot send most of this. Whoever sends something whole gets a whole answer;
nobody gets a 500; afterwards the server is as it was before: healthy, all blocks free, no connection kept, nothing in
its log that speaks of a bug.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

pytestmark = pytest.mark.attack

ALLOWED = {100, 200, 307, 400, 403, 404, 405, 408, 413, 415, 431, 503}
AT_ONCE = 32
PATIENCE_S = 0.15  # for an answer to what may be no request at all
WHOLE_S = 60.0  # for one that must come


@dataclass
class Case:
    """Bytes in pieces, and what is done after them.

    answers: how many whole answers must come; None when there may be none.
    ending: read, or after the bytes: close, reset, half (close the sending side and read).
    """

    kind: str
    pieces: list[bytes]
    answers: int | None = None
    ending: str = "read"
    statuses: set[int] = field(default_factory=lambda: ALLOWED)


def request(
    method: str = "POST",
    target: str = "/v1/completions",
    body: bytes | None = None,
    headers: tuple[str, ...] = (),
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def good_body(rng: random.Random, **more: Any) -> bytes:
    prompt = [rng.randrange(480) for _ in range(rng.randint(1, 6))]
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 3), "stream": rng.random() < 0.3, **more}
    return json.dumps(fields).encode()


def good(rng: random.Random) -> bytes:
    chat = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    return rng.choice(
        [
            request(body=good_body(rng)),
            request(body=good_body(rng)),
            request(target="/v1/chat/completions", body=chat),
            request("GET", "/health"),
            request("GET", "/v1/models"),
        ]
    )


def lines(text: str) -> list[str]:
    """One a line, with escapes."""
    return [line.strip().encode().decode("unicode_escape") for line in text.strip().splitlines()]


def cut(rng: random.Random, raw: bytes, most: int = 8) -> list[bytes]:
    edges = sorted({0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randint(0, most)))})
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def whole(rng: random.Random) -> Case:
    return Case("whole", cut(rng, good(rng)), 1, statuses={200})


def pipelined(rng: random.Random) -> Case:
    count = rng.randint(2, 6)
    return Case("pipelined", cut(rng, b"".join(good(rng) for _ in range(count))), count, statuses={200})


def chunked(rng: random.Random) -> Case:
    """A body in chunks, with extensions and trailers as the standard allows."""
    raw = b""
    for piece in cut(rng, good_body(rng)):
        extension = rng.choice([b"", b";a=b", b';c="d e"'])
        raw += b"%x" % len(piece) + extension + b"\r\n" + piece + b"\r\n"
    head = request(headers=("Transfer-Encoding: chunked",))
    end = b"0\r\n" + rng.choice([b"", b"X-Trailer: 1\r\n"]) + b"\r\n"
    return Case("chunked", cut(rng, head + raw + end), 1, statuses={200})


def bad_chunks(rng: random.Random) -> Case:
    sizes = [b"-1", b"zz", b"", b"1" * 40, b"0x4", b"ffffffffffffffff", b"5;" + b"a" * 5000, b"+3", b"3 "]
    head = request(
        headers=("Transfer-Encoding: " + rng.choice(["chunked", "Chunked", "gzip, chunked", "x"]),)
    )
    raw = (
        head
        + b"2\r\n{}\r\n" * rng.randint(0, 2)
        + rng.choice(sizes)
        + b"\r\n"
        + good_body(rng)
        + b"\r\n0\r\n\r\n"
    )
    return Case("bad chunks", cut(rng, raw), ending=rng.choice(["read", "close", "half"]))


def mutated(rng: random.Random) -> Case:
    raw = bytearray(good(rng))
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(raw))
        match rng.randrange(5):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                del raw[at : at + rng.randint(1, 10)]
            case 3:
                raw[at:at] = rng.randbytes(rng.randint(1, 10))
            case _:
                raw[at:at] = raw[at : at + rng.randint(1, 30)]
        raw = raw or bytearray(b"\r")
    return Case("mutated", cut(rng, bytes(raw), 3), ending=rng.choice(["read", "close", "half"]))


GREETINGS = [
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-x\r\n"),
    *(b"GET /\r\n", b"GET / HTTP/0.9\r\n\r\n", b"GET / HTTP/3.7\r\n\r\n", b"\r\n" * 500, b"\0" * 4000, b"{}"),
    *(b"GET  / HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", b"get / http/1.1\r\n\r\n"),
]


def garbage(rng: random.Random) -> Case:
    raw = rng.choice([*GREETINGS, rng.randbytes(rng.randint(1, 3000))])
    return Case("garbage", cut(rng, raw, 3), ending=rng.choice(["read", "close", "half"]))


HEADERS = [
    *lines(r"""
        Content-Length: -1
        Content-Length: 5, 6
        Content-Length: 99999999999999999999
        Content-Length: 1e3
        Content-Length: \xb2
        Content-Length:
        Content-Length: 5\r\nContent-Length: 6
        Content-Length: 10\r\nTransfer-Encoding: chunked
        Transfer-Encoding: identity
        X: a\r\n b
        X : a
        : a
        X\xe9: a
        X: \x01\x02
        X: \xff\xfe
        novalue
        Connection: close, keep-alive
        Connection: \xff
        Expect: 100-continue
        Expect: 200-maybe
        Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13
        Upgrade: h2c\r\nConnection: Upgrade
        Host: a\r\nHost: b
        Content-Type: text/xml
        Content-Encoding: gzip
        traceparent: 00-zz-yy-01
        X-Request-Id: \xe9 x
        Authorization: Bearer \xff
        x-api-key: \xe9
        Accept-Encoding: \xff
    """),
    *(
        f"{name}: {'a' * size}"
        for name, size in (("traceparent", 999), ("X-Request-Id", 999), ("Cookie", 9000))
    ),
    *(f"{name}: {'a' * size}" for name, size in (("Authorization", 9000), ("X", 70_000))),
]


def odd_headers(rng: random.Random) -> Case:
    many = tuple(f"X-{n}: {n}" for n in range(rng.choice([0, 0, 100, 3000])))
    chosen = tuple(rng.sample(HEADERS, rng.randint(1, 2)))
    method = rng.choice(["POST", "POST", "GET", "BREW", "OPTIONS"])
    raw = request(method, body=good_body(rng) if rng.random() < 0.7 else None, headers=many + chosen)
    return Case("odd headers", cut(rng, raw, 2), ending=rng.choice(["read", "close", "half"]))


TARGETS = [
    *lines(r"""
        *
        //
        /../../etc/passwd
        /%00
        /%ff%fe
        /%
        /v1/models/%2e%2e/%00
        /v1/models/\xe9
        /v1/models/%F0%9F%98%80
        http://
        http://x/health
        http://[::1/health
        /health#f
        x
        ?
        /v1//completions
        /v1/completions/
        /V1/MODELS
        /state?x=%00
    """),
    *("/v1/models/" + "a" * 8000, "/health?" + "q=1&" * 2000),
]


def odd_targets(rng: random.Random) -> Case:
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
    body = good_body(rng) if rng.random() < 0.3 else None
    raw = request(method, rng.choice(TARGETS), body, ("Connection: close",))
    return Case("odd targets", cut(rng, raw, 2))


BODIES = [
    *(
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"nul",
        b"",
        b" " * 10_000,
    ),
    *(b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud800"}', b'{"prompt": [5], "max_tokens": 1e999}', b"1e400"),
    *(b'{"prompt": [5], "temperature": NaN}', b'{"prompt": [5], "prompt": [6], "max_tokens": 1}', b"'x'"),
    *(b'{"prompt": [5], "seed": ' + b"9" * 5000 + b"}", b'{"prompt": [' + b"5," * 50_000 + b"5]}"),
    *(b'{"prompt": "' + b"a" * 200_000 + b'", "max_tokens": 1}', b'{"prompt": [-1]}', b'{"prompt": [1e2]}'),
]
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
]


def odd_bodies(rng: random.Random) -> Case:
    body = rng.choice([*BODIES, rng.randbytes(rng.randint(0, 300))])
    raw = request(target=rng.choice(PATHS), body=body, headers=("Content-Type: application/json",))
    return Case("odd bodies", cut(rng, raw, 3), 1, statuses=ALLOWED - {100})


def truncated(rng: random.Random) -> Case:
    raw = good(rng)
    return Case(
        "truncated",
        cut(rng, raw[: rng.randrange(len(raw))], 3),
        ending=rng.choice(["close", "reset", "half"]),
    )


def leaving(rng: random.Random) -> Case:
    """A client that asks for much, and goes."""
    much = good_body(rng, max_tokens=2000, ignore_eos=True, n=rng.randint(1, 3), stream=rng.random() < 0.5)
    return Case(
        "leaving", cut(rng, request(body=much), 2), ending=rng.choice(["close", "reset", "half then close"])
    )


KINDS: list[Callable[[random.Random], Case]] = [
    *(
        whole,
        pipelined,
        chunked,
        bad_chunks,
        mutated,
        garbage,
        odd_headers,
        odd_targets,
        odd_bodies,
        truncated,
    ),
    *(mutated, truncated, leaving),
]


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one answer. Raises IncompleteReadError, or ValueError for what is no answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    version, status, *_ = first.split(" ")
    if version != "HTTP/1.1":
        raise ValueError(f"an answer begins with {first!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if int(status) < 200:
        return int(status), b""
    if "content-length" in headers:
        return int(status), await reader.readexactly(int(headers["content-length"]))
    if headers.get("transfer-encoding") != "chunked":
        return int(status), await reader.read()
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return int(status), body


async def run_case(port: int, case: Case, rng: random.Random) -> list[str]:
    """What is wrong with how the server took it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.003)
        if case.ending in ("close", "reset") or case.ending.startswith("half"):
            await end(writer, case.ending)
        if case.ending in ("close", "reset", "half then close"):
            await asyncio.sleep(rng.random() * 0.01)
            return []
        return await judge(reader, case)
    finally:
        writer.close()
        with suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1)


async def end(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "reset":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how.startswith("half"):
        with suppress(OSError):
            writer.write_eof()


async def judge(reader: asyncio.StreamReader, case: Case) -> list[str]:
    complaints = []
    count = 0
    try:
        while case.answers is None or count < case.answers:
            limit = PATIENCE_S if case.answers is None else WHOLE_S
            status, body = await asyncio.wait_for(read_answer(reader), limit)
            if status not in case.statuses:
                complaints.append(f"status {status}: {body[:200]!r}")
            count += status >= 200
    except (
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ConnectionError,
        TimeoutError,
        ValueError,
    ) as error:
        if case.answers is not None:
            complaints.append(f"{count} of {case.answers} answers, then {error!r}")
    return [f"{case.kind}: {one}; sent {b''.join(case.pieces)[:300]!r}" for one in complaints]


async def bombard(port: int, cases: int, seed: int) -> list[str]:
    """Send so many cases, some at once; all complaints."""
    rng = random.Random(seed)
    complaints: list[str] = []
    left = iter(range(cases))

    async def worker(own: random.Random) -> None:
        for _ in left:
            case = own.choice(KINDS)(own)
            complaints.extend(await run_case(port, case, own))

    await asyncio.gather(*(worker(random.Random(rng.random())) for _ in range(AT_ONCE)))
    return complaints


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("cases", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_server_outlives_the_wire(tiny: Any, start: Callable[..., Any], cases: int) -> None:
    server = start(tiny.path, "--max-num-seqs", "32")
    port = urlsplit(server.url).port
    before = open_files(server.process.pid)
    complaints = asyncio.run(bombard(port, cases, seed=cases))
    assert not complaints, "\n".join(complaints[:20])
    assert server.settled() == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
    assert httpx.get(f"{server.url}/health").status_code == 200
    deadline = time.monotonic() + 10
    while open_files(server.process.pid) > before + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert open_files(server.process.pid) <= before + 2
    bugs = [line for line in server.log if "Traceback" in line or "ERROR" in line or "Exception" in line]
    assert not bugs, "".join(server.log[-60:])
    again = {
        "prompt": tiny.prompt(0),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=again, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == tiny.greedy(0)[:8]


FAULTS = {
    "500": b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n",
    "cut short": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
    "silence": b"",
    "no http": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzz_would_see_it(fault: str) -> None:
    """A server that answers all but every tenth connection well."""
    count = iter(range(10**6))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bad = next(count) % 10 == 9
        with suppress(ConnectionError):
            await reader.read(1 << 16)
            writer.write(FAULTS[fault] if bad else b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()

    async def main() -> int:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        rng = random.Random(3)
        found = 0
        for _ in range(60):
            found += len(await run_case(port, Case("whole", [good(rng)], 1, statuses={200}), rng))
        server.close()
        return found

    assert asyncio.run(main()) == 6
