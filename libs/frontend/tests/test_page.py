"""The page at `/` and the numbers under it; in a browser: scripts/check_clients.py page, from the checkout."""

import base64
import hashlib
import re
from typing import Any


def test_the_page_is_whole_and_asks_nobody_else(start: Any) -> None:
    live = start(app={"api_key": "s3cret"})
    answer = live.http.get("/")  # without a key: it holds nothing
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(
        r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", answer.text
    )
    assert re.findall(r"\b(?:src|href)=\S+", answer.text) == ['href="/favicon.svg">']
    policy = answer.headers["content-security-policy"].split("; ")
    for kind in ("script", "style"):  # no other runs, and no attribute can hold one
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert live.http.get("/state").status_code == 401
    icon = live.http.get("/favicon.svg")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")


def test_the_state_is_the_engines(start: Any) -> None:
    live = start({"max_running": 4})
    before = live.http.get("/state").json()
    assert (before["model"], before["healthy"], before["detail"]) == ("fake", True, "ok")
    assert (before["running"], before["waiting"], before["kv_capacity_tokens"]) == (0, 0, 4 * 4096)
    live.post("/v1/completions", prompt=[5], max_tokens=7)
    after = live.http.get("/state").json()
    assert after["generation_tokens"] - before["generation_tokens"] == 7
    assert after["prompt_tokens"] - before["prompt_tokens"] == 1
    assert after["time"] > before["time"]
    assert (after["drafts"], after["draft_tokens"], after["accepted_by_position"]) == (0, 0, [])
