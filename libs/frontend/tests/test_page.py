"""The page at `/` and the numbers under it; in a browser: scripts/check_clients.py page, from the checkout."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.errors import FlagError
from openinfer.frontend.flag_types import check_plan
from openinfer.frontend.http import pages


@pytest.mark.parametrize("path", ["/", "/plan"])
def test_a_page_is_whole_and_asks_nobody_else(path: str, start: Any) -> None:
    live = start(app={"api_key": "s3cret", "plan": b"{}"})
    answer = live.http.get(path)  # without a key: it holds nothing
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(
        r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", answer.text
    )
    links = re.findall(r"\b(?:src|href)=\S+", answer.text)
    assert links[0] == 'href="/favicon.svg">'
    assert links[1:] == (['href="/">chat</a>'] if path == "/plan" else [])
    policy = answer.headers["content-security-policy"].split("; ")
    for kind in ("script", "style"):  # no other runs, and no attribute can hold one
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    for guarded in ("/state", "/plan.json"):
        assert live.http.get(guarded).status_code == 401
    icon = live.http.get("/favicon.svg")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")


def test_the_plan_is_the_one_given(start: Any) -> None:
    assert start(app={"plan": b'{"bench": "plan"}'}).http.get("/plan.json").json() == {"bench": "plan"}
    answer = start().http.get("/plan.json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_plan")


def test_a_file_that_is_no_plan_is_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(FileNotFoundError):
        check_plan(path)
    empty = '{"bench": "plan", "results": [{"points": []}]}'
    for text in ("no JSON", "[]", '{"bench": "serve", "results": []}', empty):
        path.write_text(text)
        with pytest.raises(FlagError, match="this is no file of `openinfer plan"):
            check_plan(path)
    path.write_text('{"bench": "plan", "results": [{"flags": "as asked", "points": [{}]}]}')
    check_plan(path)


NODE = shutil.which("node")
PLAN_JS = Path(pages.__file__).parent / "static" / "plan.js"
STUB = """
const node = () => ({
  addEventListener() {}, setAttribute() {}, append() {}, viewBox: { baseVal: { width: 300, height: 150 } }, cells: [],
  replaceChildren() { this.rows = []; },
  insertRow() { this.rows.push(node()); return this.rows.at(-1); },
  insertCell() { this.cells.push({}); return this.cells.at(-1); },
});
const nodes = new Proxy({}, { get: (all, id) => all[id] ??= node() });
globalThis.document = { getElementById: id => nodes[id], createElementNS: node, hidden: true };
globalThis.fetch = async () => ({ status: 404, ok: false });
globalThis.setTimeout = () => 0;
"""


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
def test_the_pages_figures_lie_between_the_points() -> None:
    checks = """
const points = [{ request_rate: 16, x: 10 }, { request_rate: 4, x: 4 }, { request_rate: "inf", x: 99 }];
const of = one => one.x;
const known = rated({ points });
console.log(JSON.stringify([known.length, ...[1, 4, 10, 16, 40].map(load => at(known, load, of))]));
const metric = (done, ttft) => ["time_to_first_token", "request_time_per_output_token"].map(
  name => `vllm:${name}_seconds_count{a="1"} ${done}\\nvllm:${name}_seconds_sum{a="1"} ${ttft}\\n`
).join("") + `vllm:request_success_total{a="1"} ${done}\\n`;
reading(metric(10, 1), 100); console.log(JSON.stringify(now));
reading(metric(30, 3), 110); console.log(JSON.stringify(now));
const point = (rate, ms) => ({
  request_rate: rate, input_len: 8, output_len: 4, requests_per_s: rate, rows: 2, cache: 0.5,
  ttft_ms: { p50: ms, p99: 2 * ms, mean: ms }, tpot_ms: { p50: ms, p99: 2 * ms, mean: ms }, binds: { bandwidth: 1 } });
show({ results: [{ flags: "as asked", knee: 2, points: [point("inf", 9), point(1, 10), point(4, 40)] }], gpus: 1 });
console.log(JSON.stringify([nodes.live.textContent, nodes.rows.rows[0].cells.map(cell => cell.textContent)]));
"""
    done = subprocess.run(
        [str(NODE), "-e", STUB + PLAN_JS.read_text() + checks], capture_output=True, text=True, check=True
    )
    between, none, now, (live, row) = map(json.loads, done.stdout.splitlines())
    assert between == [2, 4, 4, 7, 10, 10]
    assert none is None
    assert now == pytest.approx({"rate": 2, "ttft_ms": 100, "tpot_ms": 100})
    assert live.startswith(
        "This server: 2.00 requests/s in the last minute, TTFT 100 ms where 20.0 are predicted"
    )
    assert row == ["as asked", "20.0 / 40.0", "20.0 / 40.0", "2.00", "2", "50.0 %", "bandwidth 100 %"]


def test_the_state_is_the_engines(start: Any) -> None:
    live = start({"max_running": 4})
    before = live.http.get("/state").json()
    assert (before["model"], before["healthy"], before["detail"]) == ("fake", True, "ok")
    assert (before["running"], before["waiting"], before["kv_capacity_tokens"]) == (0, 0, 4 * 4096)
    assert before["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    live.post("/v1/completions", prompt=[5], max_tokens=7)
    after = live.http.get("/state").json()
    assert after["generation_tokens"] - before["generation_tokens"] == 7
    assert after["prompt_tokens"] - before["prompt_tokens"] == 1
    assert after["time"] > before["time"]
    assert (after["drafts"], after["draft_tokens"], after["accepted_by_position"]) == (0, 0, [])
