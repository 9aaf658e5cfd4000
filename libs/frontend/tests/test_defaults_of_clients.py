"""What clients send by default is served, or ignored with a word in the answer's headers; never a 400."""

import json
from typing import Any

import httpx
import pytest

from openinfer.frontend import APIError
from openinfer.frontend.http import ChatTemplate

CHAT = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHATML = "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}"
STRICT = (
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('the system message comes first') }}{%- endif -%}"
    "{%- if m.role not in ('system', 'user', 'assistant') -%}{{ raise_exception('unknown role') }}{%- endif -%}"
    "[{{ m.role }}]{{ m.content }}{%- endfor -%}"
)


@pytest.fixture(scope="module")
def live(start: Any, tokenizer: Any) -> Any:
    script = tokenizer._core.encode("four it is", add_special_tokens=False).ids
    return start({"script": [*script, 2]}, {"reasoning_parser": "qwen3"})


def warnings(answer: httpx.Response) -> list[str]:
    return answer.headers.get_list("warning")


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": [{"role": "developer", "content": "Be short."}, *HI]}, None),
        ({"messages": [*HI, {"role": "assistant", "content": None}, *HI]}, None),
        ({"messages": [*HI, {"role": "assistant"}, *HI]}, None),
        ({"messages": [*HI, {"role": "tool", "tool_call_id": "c", "content": None}]}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 5.0, "n": "1", "seed": 3.0, "top_k": "20", "temperature": "0.5"}, None),
        ({"stop": ["a"] * 16}, None),
        ({"separate_reasoning": True}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        *(
            ({"reasoning_effort": effort}, None)
            for effort in ("none", "minimal", "low", "medium", "high", "max")
        ),
        ({"reasoning_effort": "enormous"}, "enormous"),
        *(({field: value}, None) for value in (True, False) for field in ("enable_thinking", "think")),
        ({"think": "low"}, None),
        ({"reasoning": {"effort": "high", "exclude": True}}, None),
        ({"reasoning": {"enabled": False}}, None),
        ({"reasoning": {"effort": "enormous"}}, "enormous"),
        ({"verbosity": "low"}, "verbosity low"),
        ({"verbosity": "medium"}, None),
    ],
)
def test_chat(live: Any, fields: dict[str, Any], word: str | None) -> None:
    for stream in (False, True):
        answer = live.post(CHAT, **{"messages": HI, "max_tokens": 5, "stream": stream, **fields})
        assert answer.status_code == 200, answer.text
        if stream and word == "stream_options":
            continue
        assert len(warnings(answer)) == (word is not None)
        assert all(said.startswith('299 openinfer "') and word in said for said in warnings(answer))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"reasoning": {"effort": "low"}}, None),
        ({"text": {"verbosity": "high"}}, "verbosity high"),
        ({"truncation": "auto"}, "truncation auto"),
        ({"input": [{"role": "developer", "content": "Be short."}, *HI]}, None),
        ({"input": [*HI, {"role": "assistant", "content": None}, *HI]}, None),
    ],
)
def test_responses(live: Any, fields: dict[str, Any], word: str | None) -> None:
    answer = live.post("/v1/responses", **{"input": "hi", "max_output_tokens": 5, **fields})
    assert answer.status_code == 200, answer.text
    assert len(warnings(answer)) == (word is not None)
    assert all(word in said for said in warnings(answer))
    assert answer.json()["truncation"] == fields.get("truncation", "disabled")


def test_a_warning_is_printable(live: Any) -> None:
    answer = live.post(CHAT, messages=HI, max_tokens=1, reasoning_effort='a"\r\nx: y\\é' + "z" * 999)
    (said,) = warnings(answer)
    assert said.startswith("299 openinfer \"reasoning effort a'''x: y''zzz")
    assert said.isascii()
    assert len(said) < 400


def test_a_number_that_is_none_stays_refused(live: Any) -> None:
    for value in (5.5, "five", "", True, [5]):
        refused = live.post(CHAT, messages=HI, max_tokens=value)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_continuous_usage_counts_what_came_so_far(live: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": [5], "n": 2})):
        found = events(live.post(path, **body, max_tokens=4, stream=True, stream_options=options))
        *chunks, last = [event for event in found if event["choices"] == [] or "usage" in event]
        counts: dict[int, list[int]] = {}
        for chunk in chunks:
            counts.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"]["completion_tokens"])
            assert chunk["usage"]["prompt_tokens"] > 0
        assert all(count == sorted(count) and count[-1] == 4 for count in counts.values())
        assert last["usage"]["completion_tokens"] == 4 * len(counts)
    bare = events(live.post(CHAT, messages=HI, max_tokens=2, stream=True))
    assert not any("usage" in event for event in bare)


def test_thoughts_stay_in_the_content_if_asked(start: Any, tokenizer: Any) -> None:
    text = "<think>\nhm\n</think>\n\nfour"
    live = start(
        {"script": [*tokenizer._core.encode(text, add_special_tokens=False).ids, 2]},
        {"reasoning_parser": "qwen3"},
    )
    apart = live.post(CHAT, messages=HI, separate_reasoning=True).json()
    message = apart["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "four")
    assert "reasoning_content" not in message  # a client that knows both names shows the thoughts once
    assert apart["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    together = live.post(CHAT, messages=HI, separate_reasoning=False).json()["choices"][0]["message"]
    assert together["content"] == text
    assert "reasoning" not in together


def test_reasoning_tokens_of_a_stream_and_of_several_choices(start: Any, tokenizer: Any) -> None:
    text = "<think>\nhm\n</think>\n\nfour"
    live = start(
        {"script": [*tokenizer._core.encode(text, add_special_tokens=False).ids, 2]},
        {"reasoning_parser": "qwen3"},
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(live.post(CHAT, messages=HI, n=2, stream=True, stream_options=options))
    assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    counts = [
        event["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for event in found[2:-1]
        if "usage" in event
    ]
    assert max(counts) == 6
    cut = live.post(CHAT, messages=HI, max_tokens=3).json()["usage"]
    assert cut["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_system_fingerprint(live: Any) -> None:
    for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": [5]})):
        whole = live.post(path, **body, max_tokens=2).json()
        streamed = events(live.post(path, **body, max_tokens=2, stream=True))
        marks = {whole["system_fingerprint"], *(event["system_fingerprint"] for event in streamed)}
        assert len(marks) == 1
        assert marks.pop().startswith("openinfer-")


def test_refusal_is_there_and_null(live: Any) -> None:
    choice = live.post(CHAT, messages=HI, max_tokens=2, logprobs=True).json()["choices"][0]
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"]["refusal"] is None


def test_tokenizer_info(live: Any) -> None:
    info = live.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "im_start" in info["chat_template"]


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


def test_developer_is_system_where_the_template_has_no_such_role() -> None:
    assert ChatTemplate(CHATML, {}).render(turns(("developer", "a"), ("user", "b"))) == "[system]a[user]b"
    knows = ChatTemplate(CHATML + "{#- developer -#}", {})
    assert knows.render(turns(("developer", "a"), ("user", "b"))) == "[developer]a[user]b"


def test_system_messages_that_a_template_has_no_place_for() -> None:
    many = turns(("system", "a"), ("developer", "b"), ("user", "c"), ("system", "d"), ("user", "e"))
    assert ChatTemplate(CHATML, {}).render(many) == "[system]a[system]b[user]c[system]d[user]e"
    strict = ChatTemplate(STRICT, {})
    assert strict.render(many) == "[system]a\n\nb[user]c[user]d[user]e"
    assert strict.render(turns(("user", "a"), ("system", "b"))) == "[user]a[user]b"
    with pytest.raises(APIError, match="unknown role"):
        strict.render(turns(("narrator", "a")))


def test_a_budget_that_cannot_be_kept_is_refused_by_name_and_an_effort_served(live: Any) -> None:
    for field in ("thinking_token_budget", "thinking_budget", "max_thinking_tokens"):
        refused = live.post(CHAT, messages=HI, max_tokens=5, **{field: 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert "this engine has no grammars" in refused.json()["error"]["message"]
    thinking = {"type": "enabled", "budget_tokens": 3}
    for path in (CHAT, "/v1/messages"):
        refused = live.post(path, messages=HI, max_tokens=5, thinking=thinking)
        assert refused.status_code == 400
        assert "thinking is not supported" in refused.json()["error"]["message"]
    off = live.post(CHAT, messages=HI, max_tokens=5, thinking={"type": "disabled", "budget_tokens": 3})
    assert off.status_code == 200
    assert live.post(CHAT, messages=HI, max_tokens=5, reasoning_effort="low").status_code == 200


def test_a_wish_of_a_schema_is_warned_of(start: Any) -> None:
    live = start({"features": ["grammar"]}, {"tool_parser": "hermes"})
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields, field in (
        ({"response_format": wanted}, "response_format"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        answer = live.post(CHAT, messages=HI, max_tokens=3, **fields)
        assert answer.status_code == 200, answer.text
        assert sum(f"uniqueItems in {field}" in said for said in warnings(answer)) == 1


def test_metrics_of_vllm_and_of_the_process(live: Any) -> None:
    assert live.post(CHAT, messages=HI, max_tokens=3).status_code == 200
    lines = dict(
        line.rsplit(" ", 1) for line in live.http.get("/metrics").text.splitlines() if line[0] != "#"
    )
    assert float(lines["process_resident_memory_bytes"]) > 1e6
    found = {name.partition("{")[0].removesuffix("_total"): name for name in lines}
    assert 'reason="capacity"' in found["vllm:num_requests_waiting_by_reason"]
    sources = [
        float(value) for name, value in lines.items() if name.startswith("vllm:prompt_tokens_by_source_total")
    ]
    whole = [float(value) for name, value in lines.items() if name.startswith("vllm:prompt_tokens_total")]
    assert sum(sources) == sum(whole) > 0
    awake = [
        value
        for name, value in lines.items()
        if "engine_sleep_state" in name and 'sleep_state="awake"' in name
    ]
    assert awake == ["1.0"]
