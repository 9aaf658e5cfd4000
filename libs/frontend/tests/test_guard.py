"""Keys, request ids and log lines."""

import json
import logging
import time
from typing import Any

import pytest

from openinfer.frontend.logs import set_up_logging


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer s3cret"}, 200),
        ({"authorization": "bearer s3cret"}, 200),
        ({"x-api-key": "s3cret"}, 200),
        ({"authorization": "Basic s3cret"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "s3cret"}, 401),
        ({"x-api-key": "s3cre"}, 401),
    ],
)
def test_keys_guard_all_but_the_probes(start: Any, headers: dict[str, str], status: int) -> None:
    live = start(app={"api_key": "s3cret"})
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        assert live.http.get(path, headers=headers).status_code == status
    for path in ("/tokenize", "/v1/messages", "/nowhere"):
        refused = live.http.post(path, headers=headers, json={})
        assert (refused.status_code == 401) == (status == 401)
    assert live.http.get("/health", headers=headers).status_code == 200
    assert live.http.get("/ready", headers=headers).status_code == 200


def test_request_ids_are_kept_or_made(start: Any) -> None:
    live = start(app={"api_key": "s3cret"})
    key = {"authorization": "Bearer s3cret"}
    own = live.http.get("/v1/models", headers={**key, "x-request-id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    for given in ("a b", "x" * 129, ""):
        made = live.http.get("/v1/models", headers={**key, "x-request-id": given})
        assert len(made.headers["x-request-id"]) == 32
    assert live.http.get("/v1/models").headers["x-request-id"]  # a refusal has one too
    body = {"prompt": [5], "max_tokens": 1, "stream": True}
    streamed = live.http.post("/v1/completions", json=body, headers={**key, "x-request-id": "s"})
    assert streamed.headers["x-request-id"] == "s"


def test_a_request_is_logged_with_its_id(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    live = start(app={"log_requests": True})
    with caplog.at_level(logging.INFO, "openinfer.frontend.http.service"):
        live.http.post(
            "/v1/completions", json={"prompt": [5], "max_tokens": 2}, headers={"x-request-id": "id-7"}
        )
        deadline = time.monotonic() + 5
        while live.service.active or not any(hasattr(one, "fields") for one in caplog.records):
            assert time.monotonic() < deadline  # the line comes after the answer
            time.sleep(0.005)
    (record,) = [one for one in caplog.records if hasattr(one, "fields")]
    assert record.fields["request_id"] == "id-7"
    assert record.fields["completion_tokens"] == 2
    assert "id id-7" in record.getMessage()


@pytest.mark.parametrize("form", ["text", "json"])
def test_one_line_whatever_it_holds(
    root: logging.Logger, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", form)
    logging.getLogger("x").info("a\nINFO forged \x1b[31m", extra={"fields": {"n": 1}})
    logging.getLogger("x").debug("not this")
    (line,) = capfd.readouterr().err.splitlines()
    assert "\x1b" not in line
    if form == "json":
        entry = json.loads(line)
        assert (entry["level"], entry["logger"], entry["n"]) == ("info", "x", 1)
        assert entry["message"].startswith("a\nINFO forged")
    else:
        assert line == "INFO x: a\\nINFO forged \\x1b[31m"
