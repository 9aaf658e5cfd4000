"""Pages of other origins, HTTPS, and the head of a stream."""

import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend.http.cors import Cors

DATA = Path(__file__).parent / "data"
ORIGIN = "http://localhost:3000"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


def test_a_preflight_is_answered_without_a_key_and_its_call_has_the_header(start: Any) -> None:
    live = start(app={"cors": Cors((ORIGIN,), ("POST",)), "api_key": "k"})
    asked = live.http.options("/v1/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    for key, status in (("k", 200), ("wrong", 401)):
        for stream in (False, True):
            headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
            answer = live.http.post(
                "/v1/completions", json={"prompt": [5], "stream": stream}, headers=headers
            )
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = live.http.options("/v1/completions", headers={**PREFLIGHT, "origin": "http://evil"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_any_origin(start: Any) -> None:
    live = start(app={"cors": Cors(("*",))})
    asked = live.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in asked.headers
    with_cookies = start(app={"cors": Cors(("*",), credentials=True)})
    asked = with_cookies.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.headers["access-control-allow-credentials"] == "true"


def test_no_origin_is_the_default(start: Any) -> None:
    live = start()
    assert live.http.options("/v1/completions", headers=PREFLIGHT).status_code == 405
    answer = live.http.post("/v1/completions", json={"prompt": [5]}, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_flags(model_dir: Path, launch: Callable[..., Any]) -> None:
    server = launch(model_dir, "--allowed-origins", f'["{ORIGIN}"]', "--allowed-methods", '["POST"]')
    asked = httpx.options(f"{server.url}/v1/completions", headers=PREFLIGHT)
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert asked.headers["access-control-allow-methods"] == "POST"


def test_https(model_dir: Path, launch: Callable[..., Any]) -> None:
    cert, key = DATA / "cert.pem", DATA / "key.pem"  # of 127.0.0.1, for a hundred years
    server = launch(model_dir, "--ssl-certfile", cert, "--ssl-keyfile", key)
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(verify=trusting, base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        body = {"prompt": [5], "max_tokens": 3, "stream": True}
        assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--ssl-certfile", "nowhere.pem"], "nowhere.pem"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--allowed-origins", "*"], "is not a JSON list of strings"),
        (["--allowed-headers", "[1]"], "is not a JSON list of strings"),
    ],
)
def test_wrong_flags_are_one_line(model_dir: Path, flags: list[str], word: str) -> None:
    command = [sys.executable, str(Path(__file__).parent / "fake_recipe.py"), str(model_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode in (1, 2)
    assert word in done.stderr.splitlines()[-1]


def test_the_head_of_a_stream_does_not_wait_for_a_slow_engine(start: Any) -> None:
    live = start({"step_delay_s": 1.5})
    body = {"prompt": [5], "max_tokens": 1, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as answer:
        assert live.driver.stats().generation_tokens == 0
        assert answer.status_code == 200
        assert "[DONE]" in answer.read().decode()


def test_a_refusal_that_comes_late_ends_the_stream(start: Any) -> None:
    live = start({"step_delay_s": 0.6, "max_running": 1, "max_waiting": 0})
    running = {"prompt": [5], "max_tokens": 6, "stream": True, "ignore_eos": True}
    with live.http.stream("POST", "/v1/completions", json=running) as first:
        next(first.iter_lines())
        late = live.post("/v1/completions", prompt=[6], max_tokens=1, stream=True)
    assert late.status_code in (200, 503)  # as soon as the engine says so, or after the head has left
    assert "queue" in late.text
