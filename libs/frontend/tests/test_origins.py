"""Pages of other origins, HTTPS, and the head of a stream."""

import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend.http.guard import Cors

DATA = Path(__file__).parent / "data"
ORIGIN = "http://localhost:3000"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture(scope="module")
def local(start: Any) -> Any:
    """A server on loopback without a key."""
    return start(app={"local": True, "plan": b"{}", "cors": Cors(("https://chat.example",))})


@pytest.fixture(scope="module")
def elsewhere(start: Any) -> list[Any]:
    """One with a key, and one on another address than loopback."""
    return [start(app={"local": True, "api_key": "k"}), start()]


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
    assert live.http.options("/v1/completions", headers=PREFLIGHT).status_code == 403
    answer = live.http.post("/v1/completions", json={"prompt": [5]}, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")


CROSS = {"sec-fetch-site": "cross-site"}
EVIL = {"origin": "https://evil.example"}
PATHS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/sleep"), ("POST", "/wake_up"),
    ("POST", "/update_weights"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"), ("GET", "/v1/models"), ("GET", "/state"), ("GET", "/metrics"), ("GET", "/nowhere"),
]  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize(
    "headers",
    [
        EVIL,
        CROSS,
        {"sec-fetch-site": "same-site"},
        {**EVIL, **CROSS, "sec-fetch-mode": "no-cors", "content-type": "text/plain"},
        {**EVIL, **CROSS, "content-type": "application/json"},
        {"origin": "null", **CROSS},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    ],
    ids=range(8),
)
def test_pages_of_other_origins_are_refused_everywhere(local: Any, headers: dict[str, str]) -> None:
    live = local
    for method, path in PATHS:
        answer = live.http.request(method, path, headers=headers, content=b"")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin"), path
    assert not live.driver.stats().asleep
    for path in ("/", "/plan", "/health", "/ready", "/favicon.svg"):
        assert live.http.get(path, headers=headers).status_code == 200


def test_pages_of_this_origin_and_of_allowed_ones_call(start: Any, local: Any) -> None:
    live = local
    allowed = start(app={"cors": Cors(("https://chat.example",))})
    body = {"prompt": [5], "max_tokens": 1}
    own = f"http://127.0.0.1:{live.port}"
    for server, headers in (
        (live, {}),
        (live, {"origin": own}),
        (live, {"origin": own.upper(), "sec-fetch-site": "same-origin"}),
        (live, {"sec-fetch-site": "none"}),
        (live, {"origin": "https://llm.example", "host": "llm.internal", "sec-fetch-site": "same-origin"}),
        (live, {"origin": "https://llm.internal", "host": "llm.internal:443"}),
        (allowed, {"origin": "https://chat.example", **CROSS}),
        (start(app={"cors": Cors(("*",))}), {**EVIL, **CROSS}),
    ):
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200, headers
    refused = allowed.http.post("/v1/completions", json=body, headers=EVIL)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")
    link = {**CROSS, "sec-fetch-mode": "navigate"}
    assert live.http.get("/metrics", headers=link).status_code == 200
    assert live.http.post("/sleep", headers=link).status_code == 403


@pytest.mark.attack
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("rebound.evil.example", 403), ("rebound.evil.example:8000", 403), ("EVIL.example.", 403),
        ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("u@evil.example", 403),
        ("evil.example:x", 403), ("other.chat.example", 403), ("[::1].evil.example", 403), ("evil.local", 403),
        ("localhost", 200), ("LocalHost:8000", 200), ("localhost.", 200), ("a.localhost:1", 200), ("x", 200),
        ("127.0.0.1", 200), ("127.0.0.1:99", 200), ("[::1]", 200), ("[::1]:8000", 200), ("[::ffff:127.0.0.1]", 200),
        ("192.168.1.5:8000", 200), ("host.docker.internal:8000", 200), ("chat.example", 200), ("Chat.Example:80", 200),
    ],
)  # fmt: skip
def test_on_loopback_without_a_key_no_name_of_a_stranger_is_taken(
    local: Any, elsewhere: list[Any], host: str, status: int
) -> None:
    """DNS rebinding: a page's own name leads here, so that all of it is of one origin."""
    headers = {"host": host, "origin": f"http://{host}"} if status == 403 else {"host": host}
    for path in ("/state", "/v1/models", "/metrics"):
        answer = local.http.get(path, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "foreign_host"
    for other in elsewhere:
        headers = {"host": host, "authorization": "Bearer k"}
        assert other.http.get("/state", headers=headers).status_code == 200


@pytest.mark.attack
def test_the_host_of_an_absolute_target_is_the_host(local: Any) -> None:
    ask = b"GET http://evil.example/state HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"
    for host, status in ((b"evil.example", b"403"), (b"localhost", b"400")):
        with socket.create_connection(("127.0.0.1", local.port), timeout=10) as connection:
            connection.sendall(ask % host)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)


def test_weights_are_updated_with_a_key_or_a_flag(start: Any) -> None:
    body = {"path": "x", "version": "v"}
    refused = start().http.post("/update_weights", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_enabled")
    assert start(app={"weight_updates": True}).http.post("/update_weights", json=body).status_code == 200
    keyed, key = start(app={"api_key": "k"}), {"authorization": "Bearer k"}
    assert keyed.http.post("/update_weights", json=body).status_code == 401
    assert keyed.http.post("/update_weights", json=body, headers=key).status_code == 200


def test_a_server_on_loopback_knows_it(model_dir: Path, launch: Callable[..., Any]) -> None:
    server = launch(model_dir)
    evil = {"host": "evil.example"}
    assert httpx.get(f"{server.url}/state", headers=evil).json()["error"]["code"] == "foreign_host"
    assert httpx.get(f"{server.url}/state").status_code == 200
    assert httpx.post(f"{server.url}/update_weights", json={}).json()["error"]["code"] == "not_enabled"


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
