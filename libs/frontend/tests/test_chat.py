"""/v1/chat/completions over a socket."""

import asyncio
import json
from typing import Any

import pytest

from openinfer.frontend.chat.parts import template_spec
from openinfer.frontend.errors import FlagError
from openinfer.frontend.http.params import SamplingDefaults
from openinfer.frontend.http.service import Service
from openinfer.frontend.http.text.chat_format import ChatFormat
from openinfer.frontend.render_pool import RenderPool
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.thread_driver import ThreadDriver

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def live(start: Any, tokenizer: Any) -> Any:
    return start({"script": [*tokenizer._core.encode("four it is").ids, 2], "step_delay_s": 0.0005})


def test_defaults_of_template_variables_give_way_to_the_request(start: Any, tokenizer: Any) -> None:
    source = "{{ mood }}{{ reasoning_effort }}{{ messages[0].content }}"
    app = {"template": template_spec(source, {}), "template_options": {"mood": "a", "reasoning_effort": "b"}}
    live = start(app=app)

    def prompt(**fields: Any) -> str:
        body = live.post("/v1/chat/completions/render", messages=HELLO, **fields).json()
        return str(tokenizer.decode(body["token_ids"], skip_special_tokens=False))

    said = HELLO[0]["content"]
    assert prompt() == f"ab{said}"
    assert prompt(reasoning_effort="high") == f"ahigh{said}"
    assert prompt(chat_template_kwargs={"mood": "c", "reasoning_effort": "d"}) == f"cd{said}"


def test_defaults_for_variables_that_the_template_has_not_are_refused(tokenizer: Any) -> None:
    chats = ChatFormat(renderer=RenderPool(template_spec("{{ mood }}", {})), options={"moood": 1})
    service = Service(
        ThreadDriver(FakeEngine), tokenizer=tokenizer, chat_format=chats, defaults=SamplingDefaults(),
        model_names=(), log_requests=False, tracing=None, board=None,
    )  # fmt: skip

    async def start_and_close() -> None:
        await service.client.start()
        try:
            await service.prepare()
        finally:
            await service.close()
            await service.client.close()

    with pytest.raises(FlagError, match=r"has no variable moood; it has mood"):
        asyncio.run(start_and_close())


def test_whole_answer(live: Any) -> None:
    body = live.post("/v1/chat/completions", model="fake", messages=HELLO, return_token_ids=True).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "four it is", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert body["prompt_token_ids"][:4] == [1, 92, 90, 266]
    assert body["usage"]["prompt_tokens"] == 24


def test_streamed_answer(live: Any) -> None:
    text = live.post(
        "/v1/chat/completions", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in [*chunks, last])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "four it is"
    assert all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert last["usage"]["completion_tokens"] == live_tokens(live)


def live_tokens(live: Any) -> int:
    body = live.post("/v1/chat/completions", messages=HELLO).json()
    return int(body["usage"]["completion_tokens"])


def test_the_default_is_the_rest_of_the_context(start: Any) -> None:
    small = start({"max_model_len": 50, "script": [300]})
    usage = small.post("/v1/chat/completions", messages=HELLO).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (24, 26)


def test_max_completion_tokens_wins(live: Any) -> None:
    for fields, expected in (({"max_tokens": 3}, 3), ({"max_tokens": 3, "max_completion_tokens": 2}, 2)):
        body = live.post("/v1/chat/completions", messages=HELLO, **fields).json()
        assert body["usage"]["completion_tokens"] == expected
        assert body["choices"][0]["finish_reason"] == "length"


def test_thinking_can_be_switched_off(live: Any) -> None:
    counts = [
        live.post("/v1/chat/completions", messages=HELLO, max_tokens=1, chat_template_kwargs=kwargs).json()[
            "usage"
        ]["prompt_tokens"]
        for kwargs in ({}, {"enable_thinking": False})
    ]
    assert counts == [24, 30]


def test_text_parts_are_joined(live: Any) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2+2?"}]
    sent = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "return_token_ids": True}
    same = {
        "messages": [{"role": "user", "content": "What is\n2+2?"}],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    first, second = (live.post("/v1/chat/completions", **body).json() for body in (sent, same))
    assert first["prompt_token_ids"] == second["prompt_token_ids"]


def test_logprobs_shape(live: Any) -> None:
    choice = live.post(
        "/v1/chat/completions", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=2
    ).json()["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert set(first) == {"token", "logprob", "bytes", "top_logprobs"}
    assert (
        bytes(first["bytes"]).decode()
        == first["token"]
        == choice["message"]["content"][: len(first["token"])]
    )
    assert first["top_logprobs"][0]["token"] == first["token"]
    assert len(choice["logprobs"]["content"]) == 2
    bare = live.post("/v1/chat/completions", messages=HELLO, logprobs=True, max_tokens=1).json()["choices"][0]
    assert bare["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({}, "messages", "at least one"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["hi"]}, "messages", "expected object"),
        ({"messages": [{"content": "x"}]}, "messages", r"messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages", r"messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages", "tool_calls"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "function"),
        ({"messages": HELLO, "tools": TOOLS}, "tools", "--tool-call-parser"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs", "expected bool"),
        ({"messages": HELLO, "max_completion_tokens": 4096}, "max_completion_tokens", "4096"),
        ({"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "messages", "4096"),
    ],
)
def test_refusals_name_the_field(live: Any, fields: dict[str, Any], param: str | None, word: str) -> None:
    refused = live.post("/v1/chat/completions", **fields)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert word in error["message"]


def test_neutral_values_of_unsupported_fields_pass(live: Any) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "no_such_field": 1,
    }
    assert live.post("/v1/chat/completions", messages=HELLO, max_tokens=1, **neutral).status_code == 200
