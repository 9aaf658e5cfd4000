"""Nothing that one request asks may cost more than it is worth, and nothing it holds may hold up the others."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import openinfer.frontend.http.body as bodies
import openinfer.frontend.http.text.chat_format as chat_format
from openinfer.frontend import APIError, render_pool
from openinfer.frontend.chat.parts import overlap
from openinfer.frontend.http import ChatTemplate, Tokenizer
from openinfer.frontend.http.text import prompt_text
from openinfer.frontend.testing import FakeEngine

pytestmark = pytest.mark.attack

P = {"prompt": [5], "max_tokens": 1}
HI = {"role": "user", "content": "hi"}
ALL_CONTENTS = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})


@pytest.fixture(scope="module")
def live(start: Any) -> Any:
    return start({"max_running": 4, "max_model_len": 1000})


def refused(live: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = live.http.post(path, json=body)
    assert answer.status_code == 400, answer.text[:300]
    error: dict[str, Any] = answer.json()["error"]
    assert len(error["message"]) <= 1010
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stop": "x" * 1025}, "stop", "1024"),
        ({"user": "x" * 1025}, "user", "1024"),
        ({"n": 65, "max_tokens": 999}, "n", "65 sequences"),  # 65,000 tokens of 16 pools of 4,000
        ({"prompt": [[5]] * 65, "max_tokens": 999}, None, "lower n or max_tokens"),
        ({"prompt": [5] * 1000}, "prompt", "1000 tokens"),
        ({"prompt": [[5], [5] * 2000]}, "prompt", "2000 tokens"),
        ({"prompt": [5] * 3_000_000}, "prompt", "3000000 tokens"),
    ],
)
def test_what_is_too_much_is_refused_by_name(
    live: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    began = time.process_time()
    error = refused(live, "/v1/completions", P | fields)
    assert error["param"] == param
    assert words in error["message"]
    assert time.process_time() - began < 5  # the server is a thread of this process


def test_just_enough_is_served(live: Any) -> None:
    answer = live.post(
        "/v1/completions", prompt=[5], max_tokens=999, n=16, stop=["x" * 1024], user="x" * 1024
    )
    assert answer.status_code == 200


def test_logprobs_of_a_very_long_answer_are_refused(start: Any) -> None:
    live = start({"max_model_len": 500_000})
    body = {"prompt": [5], "max_tokens": 450_000, "logprobs": 20}
    error = refused(live, "/v1/completions", body)
    assert (error["param"], error["code"]) == ("logprobs", "request_too_large")


def test_what_the_client_sent_is_not_sent_back_at_length(live: Any) -> None:
    answer = live.http.post("/v1/completions", json=P | {"model": "m" * 1_000_000})
    assert answer.status_code == 404
    assert len(answer.content) < 1200


def test_messages_are_counted(live: Any) -> None:
    error = refused(live, "/v1/chat/completions", {"messages": [HI] * 4097})
    assert (error["param"], "4096" in error["message"]) == ("messages", True)


MANY = bodies.MAX_OBJECTS


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * (MANY - 1) + b"0]",
        b"[" + b"[[]]," * (MANY // 2) + b"0]",
        b"[" + b"{}," * MANY + b"0]",
        b"[" + b'{"a":0},' * (MANY // 2) + b"0]",
        b"[" + b'"",' * MANY + b"0]",
        b'["\\\\",' + b'"a",' * MANY + b"0]",
        b'{"a":' * MANY + b"0" + b"}" * MANY,
        b"[" + b"5," * (bodies.MAX_VALUES + 1) + b"0]",
    ],
    ids=range(8),
)
def test_values_of_a_body_are_counted_before_they_are_made(
    live: Any, value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(bodies, "_decode", lambda *_: decoded.append(1))
    for raw in (b'{"prompt": [5], "unknown": %b}' % value, b'{"messages": [{"role": %b}]}' % value):
        with pytest.raises(APIError, match="more than 262144 objects, arrays and strings") as caught:
            bodies._check_count(raw)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")
        answer = live.http.post("/v1/completions", content=raw)
        assert (answer.status_code, decoded) == (413, [])


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * (MANY - 10) + b"0]",
        b"[" + b"5," * (bodies.MAX_VALUES - 10) + b"0]",
        b'"' + b'[{,\\"' * 2_000_000 + b'"',
        b'"' + b"\\\\" * 3_000_000 + b'"',
    ],
    ids=["just enough lists", "just enough numbers", "a text with marks", "a text of backslashes"],
)
def test_what_is_within_a_text_does_not_count(value: bytes) -> None:
    bodies._check_count(b'{"prompt": %b}' % value)
    assert json.loads(b'{"prompt": %b}' % value)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/sleep", "/v1/load_lora_adapter"]
)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_that_is_not_json_by_its_type_is_415(live: Any, path: str, kind: str) -> None:
    answer = live.http.post(path, content=b'{"prompt": [5]}', headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ;x", None]
)
def test_json_by_any_spelling_is_taken(live: Any, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert (
        live.http.post("/v1/completions", content=json.dumps(P).encode(), headers=headers).status_code == 200
    )


@pytest.mark.parametrize("depth", [100, 900, 5000])
def test_deep_nesting_is_no_server_error(live: Any, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    for field in (f'"tools": [{tool}]', f'"chat_template_kwargs": {{"x": {deep}}}', f'"metadata": {deep}'):
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 1, {field}}}'
        assert live.http.post("/v1/chat/completions", content=body).status_code in (200, 400)


def test_overlap_is_the_longest() -> None:
    for text in ("", "a", "ab", "aba", "abab", "xaba", "ababa", "b" * 9):
        for marker in ("abab", "aab", "a", "ba", "bbb"):
            brute = max(n for n in range(len(marker)) if text.endswith(marker[:n]))
            assert overlap(text, marker) == brute, (text, marker)


def test_overlap_of_long_texts_is_quick() -> None:
    began = time.process_time()
    for _ in range(100):
        overlap("a" * 100_000, "a" * 500 + "b" + "a" * 500)
    assert time.process_time() - began < 1


def quadratic(tokenizer: Tokenizer) -> ChatTemplate:
    source = (
        "{% for m in messages %}{% for a in m.content %}{% for b in m.content %}{% set x = a ~ b %}"
        "{% endfor %}{% endfor %}{% endfor %}done"
    )
    return ChatTemplate(source, tokenizer.special_tokens)


def test_a_template_that_takes_too_long_is_stopped_and_holds_up_nobody(
    start: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_format, "RENDER_TIMEOUT_S", 1.0)
    live = start(app={"template": quadratic(tokenizer)})
    answers: list[httpx.Response] = []
    long = {"messages": [{"role": "user", "content": "x" * 50_000}]}
    asking = threading.Thread(target=lambda: answers.append(live.post("/v1/chat/completions", **long)))
    asking.start()
    answered = 0
    while asking.is_alive():
        assert live.http.get("/health").status_code == 200
        answered += 1
    asking.join()
    assert answers[0].status_code == 400
    assert "takes longer than 1 s" in answers[0].json()["error"]["message"]
    assert answered > 5
    assert live.post("/v1/chat/completions", messages=[HI], max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_prompt_of_10_mb_is_refused_before_it_is_encoded(start: Any, path: str) -> None:
    live = start({"max_model_len": 2048})
    text = "word and " * 1_100_000
    body: dict[str, Any] = {"max_tokens": 1, "model": "fake", "prompt": text}
    if path == "/v1/responses":
        body = {"input": text}
    elif path != "/v1/completions":
        body = {"max_tokens": 1, "model": "fake", "messages": [{"role": "user", "content": text}]}
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    answer = live.post(path, **body)
    assert answer.status_code == 400
    words = "tokens > 2048 maximum" if path == "/v1/messages" else "maximum context length is 2048 tokens"
    assert words in answer.json()["error"]["message"]
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 300_000  # KB


def test_a_text_of_10_mb_is_not_tokenized_on_request(start: Any) -> None:
    live = start({"max_model_len": 2048})
    for body in ({"prompt": "word " * 2_000_000}, {"messages": [HI | {"content": "word " * 2_000_000}]}):
        answer = live.post("/tokenize", **body)
        assert answer.status_code == 400
        assert "at most 1048576 are tokenized" in answer.json()["error"]["message"]


def encode(
    tokenizer: Tokenizer, text: str, limit: int, gone: Callable[[], bool] = lambda: False
) -> list[int]:
    async def left() -> bool:
        return gone()

    info = FakeEngine(max_model_len=limit, vocab_size=1 << 20).info
    return asyncio.run(prompt_text.encode_prompt(tokenizer, [text], False, info, "prompt", left))


def test_long_texts_are_counted_in_slices(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the word and 12 \n  x" * 5_000
    ids = tokenizer._core.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(prompt_text, "USUAL_CHARS", 0)
    monkeypatch.setattr(prompt_text, "SLICE_CHARS", 2_500)
    for limit in (len(ids) + 1, 2 * len(ids)):
        assert encode(tokenizer, text, limit) == ids
    counted: list[int] = []
    count = Tokenizer.count

    def spy(self: Tokenizer, part: str) -> int:
        counted.append(len(part))
        return count(self, part)

    monkeypatch.setattr(Tokenizer, "count", spy)
    monkeypatch.setattr(Tokenizer, "most_chars_a_token", None)
    with pytest.raises(APIError, match=r"has .* tokens or more"):
        encode(tokenizer, text, len(ids) // 4)
    assert sum(counted) < len(text) / 3
    counted.clear()
    with pytest.raises(APIError, match="the client has left"):
        encode(tokenizer, text, len(ids) // 4, gone=lambda: len(counted) == 3)
    assert len(counted) == 3
    monkeypatch.setattr(prompt_text, "TIMEOUT_S", 0.0)
    with pytest.raises(APIError, match="takes longer than 0 s"):
        encode(tokenizer, text, len(ids))


def test_no_text_has_more_characters_than_its_tokens_can_have(tokenizer: Tokenizer) -> None:
    most = tokenizer.most_chars_a_token
    assert most is not None
    for text in (
        "\u1100\u1161\u11a8" * 99,
        "e\u0301" * 99,
        " " * 999,
        "\u03b1\u0313\u0300\u0345" * 99,
        "word and " * 99,
    ):
        assert len(text) <= most * len(tokenizer.encode_short(text))


HUNGRY = "{% set x = namespace(v='x' * 1000) %}{% for c in messages[-1].content %}{% set x.v = x.v * 100 %}{% endfor %}"


def test_a_template_that_takes_all_memory_is_a_400_and_the_next_chat_is_served(start: Any) -> None:
    live = start(app={"template": ChatTemplate(HUNGRY + "{{ messages[-1].content }}", {})})
    big = live.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 9}], max_tokens=1)
    assert big.status_code == 400
    assert "refuses these messages: MemoryError" in big.json()["error"]["message"]
    assert (
        live.post("/v1/chat/completions", messages=[HI | {"content": "x"}], max_tokens=1).status_code == 200
    )


def test_a_renderer_starts_under_a_lower_limit_of_memory() -> None:
    """As of `ulimit -v`."""
    low = 1 << 30
    done = subprocess.run(
        [sys.executable, "-m", "openinfer.frontend.render_process"],
        input=json.dumps(ChatTemplate("x{{ tools }}", {}).spec._asdict()) + "\n",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (low, low)),
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == {"variables": []}
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_render_process_that_is_lost_while_it_waits_costs_nothing(
    start: Any, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_pool, "LIFE_TIMEOUT_S", 1.0)
    live = start(app={"template": ALL_CONTENTS})
    ask = {"messages": [HI], "max_tokens": 1}
    assert live.post("/v1/chat/completions", **ask).status_code == 200
    (worker,) = live.service.chat_format.renderer._idle
    os.kill(worker.pid, number)
    assert [live.post("/v1/chat/completions", **ask).status_code for _ in range(2)] == [200, 200]
    (other,) = live.service.chat_format.renderer._idle
    assert other.pid != worker.pid


def test_where_new_render_processes_are_lost_too_the_server_is_at_fault(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start(app={"template": ALL_CONTENTS})
    ask = {"messages": [HI], "max_tokens": 1}
    assert live.post("/v1/chat/completions", **ask).status_code == 200
    (worker,) = live.service.chat_format.renderer._idle
    worker.kill()

    async def spawn() -> Any:
        raise BlockingIOError(11, "no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(render_pool, "spawn", spawn)
        refused = live.post("/v1/chat/completions", **ask)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "renderer_lost")
    assert refused.headers["retry-after"]
    assert "no more processes" in refused.json()["error"]["message"]
    assert live.post("/v1/chat/completions", **ask).status_code == 200


def test_large_chats_are_rendered_as_small_ones_are(start: Any) -> None:
    live = start({"max_model_len": 200_000}, app={"template": ALL_CONTENTS})
    small = [HI, {"role": "assistant", "content": "ho"}] * 2 + [HI]
    large = [*small[:-1], {"role": "user", "content": "hi " * 10_000}]
    for messages in (small, large):
        count = live.post("/tokenize", messages=messages).json()["count"]
        usage = live.post("/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens"] == count
    bad = live.post("/v1/chat/completions", messages=[*large, {"role": "user", "content": 5}])
    assert bad.status_code == 400


def test_larger_than() -> None:
    assert not chat_format._larger_than(10, ["abc", {"k": "v"}, 1, None])
    assert chat_format._larger_than(10, ["abc", {"k": "v" * 20}])
    assert chat_format._larger_than(10, [0] * 11)
    assert chat_format._larger_than(10, [[[["x" * 5], "x" * 5]]])
    assert not chat_format._larger_than(20, json.loads("[" * 15 + "]" * 15))
