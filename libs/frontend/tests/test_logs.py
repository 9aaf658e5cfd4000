"""Logs of both processes: one form, the request's id in them, nothing forged, no secret."""

import json
import logging
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend.logs import REQUEST_ID, LogLines, set_up_logging

SECRET = "s3cret-key-1"


@pytest.fixture
def launch(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Without tokenizers and processes that render chats, because no test here sends a text."""
    return lambda *args: launch(*args, "--skip-tokenizer-init")


def logged(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_names_the_request_that_it_is_about(
    root: logging.Logger, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", form)
    token = REQUEST_ID.set("id-7")
    logging.getLogger("x").info("within")
    REQUEST_ID.reset(token)
    logging.getLogger("x").info("outside")
    within, outside = logged(capfd)
    if form == "json":
        assert json.loads(within)["request_id"] == "id-7"
        assert "request_id" not in json.loads(outside)
    else:
        assert (within, outside) == ("INFO x: within, id id-7", "INFO x: outside")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_forges_nothing_and_no_secret_shows(
    root: logging.Logger, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", form, [SECRET, "key"])
    try:
        raise ValueError(f"a\nINFO forged \x1b[31m {SECRET}")
    except ValueError:
        logging.getLogger("x").exception("with %s and a key\nERROR forged", SECRET)
    lines = logged(capfd)
    text = "\n".join(lines)
    assert SECRET not in text
    assert "***" in text
    assert "a key" in text  # too short to be hidden
    assert "\x1b" not in text
    assert not any(line.startswith(("INFO forged", "ERROR forged")) for line in lines)
    if form == "json":
        (line,) = lines
        assert "INFO forged" in json.loads(line)["exception"]
    else:
        assert lines[0] == "ERROR x: with *** and a key\\nERROR forged"
        assert all(line.startswith("  ") for line in lines[1:])


def test_what_is_printed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stream = LogLines(logging.getLogger("x"))
    with caplog.at_level(logging.INFO, "x"):
        print("half a ", end="", file=stream)
        print("line\rnext\n\nthird", end="", file=stream)
    assert [record.getMessage() for record in caplog.records] == ["half a line", "next"]


def test_every_line_of_a_server_is_json(model_dir: Path, launch: Callable[..., Any]) -> None:
    flags = ("--log-format", "json", "--log-requests", "--api-key", SECRET, "--frontends", "2")
    server = launch(model_dir, *flags, "--engine", '{"fail_at_step": 3}')
    headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "id-9"}
    body = {"prompt": [5], "max_tokens": 50}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 500
    code, rest = server.end()
    assert code == 1
    lines = [json.loads(line) for line in [*server.lines, *rest.splitlines()]]
    assert SECRET not in json.dumps(lines)
    (raised,) = [line for line in lines if line["logger"] == "openinfer.frontend.engine_process"]
    assert "step failed, as asked" in raised["exception"]
    ours = [line for line in lines if line.get("request_id")]  # the outcome, and what its frontend said
    assert {line["request_id"] for line in ours} == {"id-9"}
    (outcome,) = [line for line in ours if "engine_id" in line]
    assert outcome["engine_id"] > 0


def test_an_engine_that_refuses_with_an_exception_names_the_sequence(
    model_dir: Path, launch: Callable[..., Any]
) -> None:
    server = launch(model_dir, "--log-format", "json", "--log-requests", "--engine", '{"raise_prompt": 7}')
    for prompt in ([7], [5]):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    server.process.send_signal(signal.SIGTERM)
    _, rest = server.end()
    lines = [json.loads(line) for line in rest.splitlines()]
    (raised,) = [line for line in lines if "exception" in line]
    refused, served = [line for line in lines if "outcome" in line]
    assert served["outcome"] == "ok"
    assert f"sequence {refused['engine_id']}" in raised["message"]


def ended(server: Any) -> list[str]:
    server.process.send_signal(signal.SIGTERM)
    code, rest = server.end()
    assert code == 0
    return rest.splitlines()


def test_the_access_log_has_a_line_a_request(model_dir: Path, launch: Callable[..., Any]) -> None:
    server = launch(model_dir, "--api-key", SECRET)
    with httpx.Client(base_url=server.url, headers={"x-request-id": "id-5"}) as http:
        key = {"authorization": f"Bearer {SECRET}"}
        http.post("/v1/completions?k=v", json={"prompt": [5], "max_tokens": 2}, headers=key)
        http.get("/v1/models")
        http.get("/no/such%0aline/" + "x" * 500, headers=key)
        http.get("/state", headers=key)
    lines = [line.partition(" - ") for line in ended(server) if "frontend.http.access" in line]
    assert all(
        re.fullmatch(r"INFO openinfer\.frontend\.http\.access: 127\.0\.0\.1:\d+", head)
        for head, _, _ in lines
    )
    done, refused, unknown = (line for _, _, line in lines)  # the page asks for /state all the time
    assert re.fullmatch(r'"POST /v1/completions HTTP/1\.1" 200 in \d+\.\d{3} s, id id-5', done)
    assert refused.startswith('"GET /v1/models HTTP/1.1" 401 in ')
    assert re.fullmatch(r'"GET /no/such%0Aline/x{100,190} HTTP/1\.1" 404 in \S+ s, id id-5', unknown)


def test_a_line_of_the_access_log_has_fields(model_dir: Path, launch: Callable[..., Any]) -> None:
    server = launch(model_dir, "--log-format", "json", "--frontends", "2")
    httpx.get(f"{server.url}/health", headers={"x-request-id": "id-6"})
    (line,) = [json.loads(one) for one in ended(server) if "frontend.http.access" in one]
    shown = {"method": "GET", "path": "/health", "status": 200, "request_id": "id-6", "level": "info"}
    assert shown.items() <= line.items()
    assert line["client"].startswith("127.0.0.1:")
    assert line["seconds"] >= 0


@pytest.mark.parametrize("cut", ["in the body", "unary"])
def test_a_client_that_leaves_before_the_status_is_logged_without_one(
    start: Any, caplog: pytest.LogCaptureFixture, cut: str
) -> None:
    live = start({"step_delay_s": 0.02}, {"access_log": True, "template": None})
    body = json.dumps({"prompt": [5], "max_tokens": 3000, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with caplog.at_level(logging.INFO, "openinfer.frontend.http.access"):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(head + (body[:5] if cut == "in the body" else body))
            while cut == "unary" and not live.service.active:
                time.sleep(0.005)
            if cut == "in the body":  # the server has begun to read it
                assert live.http.get("/health").status_code == 200
        until = time.monotonic() + 20
        while "POST" not in caplog.text and time.monotonic() < until:
            time.sleep(0.005)
    (line,) = [line for line in caplog.messages if "POST" in line]
    assert '"POST /v1/completions HTTP/1.1" 0 in ' in line


@pytest.mark.parametrize(
    "flag", ["--no-access-log", pytest.param("--disable-uvicorn-access-log", marks=pytest.mark.slow)]
)
def test_the_access_log_can_be_left_out(model_dir: Path, launch: Callable[..., Any], flag: str) -> None:
    server = launch(model_dir, flag)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not any("/health" in line for line in ended(server))


@pytest.mark.parametrize("frontends", [1, 2])
def test_the_last_line_says_what_was_served(
    model_dir: Path, launch: Callable[..., Any], frontends: int
) -> None:
    server = launch(model_dir, "--frontends", frontends, "--step-delay", "0.01")
    for _ in range(3):
        body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    expected = "3 answers, 1 aborted, 0 failed; 6 prompt tokens (0 cached), 12 tokens generated"
    assert re.fullmatch(rf"openinfer: stopped after 0:00:\d\d: {re.escape(expected)}", ended(server)[-1])
