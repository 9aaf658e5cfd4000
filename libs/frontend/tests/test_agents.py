"""What coding agents send is served, and what they read in an answer or a refusal is there, on all three APIs."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend.contract import Request, StepOutputs
from openinfer.frontend.http import ChatTemplate, Tokenizer
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.thread_driver import ThreadDriver

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"city": "Bonn"}}\n</tool_call>'
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
TEMPLATE = (Path(__file__).parent / "data" / "agents.jinja").read_text()
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


@pytest.fixture(scope="module")
def speak(start: Any, tokenizer: Any) -> Any:
    """speak(text, engine=..., **app): a server whose model always says text."""
    made: dict[str, Any] = {}

    def make(text: str = "ok", engine: dict[str, Any] | None = None, **app: Any) -> Any:
        if (key := repr((text, engine, app))) not in made:
            made[key] = new(text, engine, app)
        return made[key]

    def new(text: str, engine: dict[str, Any] | None, app: dict[str, Any]) -> Any:
        script = [*tokenizer._core.encode(text, add_special_tokens=False).ids, 2]
        options = {
            "template": ChatTemplate(TEMPLATE, {}),
            "tool_parser": "hermes",
            "reasoning_parser": "qwen3",
        }
        return start({"script": script, **(engine or {})}, options | app)

    return make


@pytest.fixture(scope="module")
def live(speak: Any) -> Any:
    return speak()


def ask(live: Any, path: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    if path == MESSAGES:
        body["max_tokens"] = 200
    answer: httpx.Response = live.post(path, **{**body, **fields})
    return answer


def served(live: Any, path: str, **fields: Any) -> httpx.Response:
    answer = ask(live, path, **fields)
    assert answer.status_code == 200, answer.text
    return answer


def refused(live: Any, path: str, **fields: Any) -> dict[str, Any]:
    answer = ask(live, path, **fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def tokens(live: Any, path: str, **fields: Any) -> int:
    usage = served(live, path, **fields).json()["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


# ---- context_management


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        {},
        {"edits": []},
        {"edits": None},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "clear_thinking_20251015"}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
    ],
)
def test_context_management_that_has_nothing_to_do(live: Any, wanted: Any) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        served(live, path, context_management=wanted)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"type": "clear_tool_uses_20250919"}, "clear_tool_uses_20250919"),
        ({"type": "compact_20260112"}, "compact_20260112"),
        ({"type": "clear_thinking_20251015", "keep": "some"}, "keep"),
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}, "keep"),
        ({"type": "clear_thinking_20251015", "keep": {"type": "tokens", "value": 1}}, "keep"),
    ],
)
def test_context_management_that_cannot_be_done_is_refused_by_name(live: Any, edit: Any, word: str) -> None:
    error = refused(live, MESSAGES, context_management={"edits": [edit]})
    assert "context_management" in error["message"]
    assert word in error["message"]


def test_older_thoughts_are_cleared(start: Any, tokenizer: Any) -> None:
    source = "{%- for m in messages -%}({{ m.reasoning }}){{ m.content }}{%- endfor -%}"
    live = start({"script": [5, 2]}, {"template": ChatTemplate(source, {})})
    thought = {"type": "thinking", "thinking": "a long thought", "signature": "x"}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "b"}]}
    messages = [*HI, turn, *HI, turn, *HI, turn, *HI]

    def count(**fields: Any) -> int:
        return tokens(live, MESSAGES, messages=messages, **fields)

    def keep(kept: Any) -> int:
        edit = {"type": "clear_thinking_20251015", "keep": kept}
        return count(context_management={"edits": [edit]})

    one = len(tokenizer.encode_short("(a long thought)")) - len(tokenizer.encode_short("()"))
    assert keep("all") == count()
    assert [count() - keep({"type": "thinking_turns", "value": value}) for value in (1, 2, 3, 9)] == [
        *(2 * one, one, 0, 0)
    ]
    assert keep(None) == count() - 2 * one


# ---- what is not for the model


def test_the_billing_header_is_not_in_the_prompt(live: Any) -> None:
    head = "x-anthropic-billing-header: cc_version=2.1.197.%s; cc_entrypoint=sdk-cli; cch=00000;"
    plain = tokens(live, MESSAGES, system="You are terse.")
    for mark in ("abc", "a longer one"):
        block = {"type": "text", "text": head % mark, "cache_control": {"type": "ephemeral"}}
        terse = {"type": "text", "text": "You are terse."}
        assert tokens(live, MESSAGES, system=[block, terse]) == plain
        assert tokens(live, MESSAGES, system=f"{head % mark}\nYou are terse.") == plain
        system = {"role": "system", "content": f"{head % mark}\nYou are terse."}  # through a proxy
        assert tokens(live, CHAT, messages=[system, *HI]) == tokens(
            live, CHAT, messages=[{"role": "system", "content": "You are terse."}, *HI]
        )
    assert tokens(live, MESSAGES, system=[{"type": "text", "text": head % "a"}]) == tokens(live, MESSAGES)
    quoted = f"What is {head % 'abc'}"
    assert tokens(live, MESSAGES, messages=[{"role": "user", "content": quoted}]) > plain


def test_the_marks_of_claude_code_are_the_users(live: Any) -> None:
    for role in ("ctx", "msg"):
        assert tokens(live, MESSAGES, messages=[{"role": role, "content": "hi"}]) == tokens(live, MESSAGES)


# ---- refusals for length


@pytest.fixture(scope="module")
def short(speak: Any) -> Any:
    return speak(engine={"max_model_len": 256})


def long_chat(live: Any, count: int, path: str) -> dict[str, Any]:
    """A request whose prompt has that many tokens."""
    content = "a" + " a" * (count - 1 - (tokens(live, path) - 1))
    return {"messages": [{"role": "user", "content": content}]} if path != RESPONSES else {"input": content}


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_chat_is_refused_in_the_words_that_agents_read(short: Any, stream: bool) -> None:
    error = refused(short, MESSAGES, **long_chat(short, 300, MESSAGES), stream=stream)
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 300 tokens > 256 maximum",
    }
    at_the_edge = refused(short, MESSAGES, **long_chat(short, 256, MESSAGES), stream=stream)
    assert at_the_edge["message"] == "prompt is too long: 256 tokens > 255 maximum"
    both = refused(short, MESSAGES, **long_chat(short, 200, MESSAGES), max_tokens=100, stream=stream)
    assert both["message"] == (
        "input length and `max_tokens` exceed context limit: 200 + 100 > 256, decrease input length or `max_tokens` "
        "and try again"
    )
    for path, field in ((CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")):
        what = "input" if path == RESPONSES else "messages"
        alone = refused(short, path, **long_chat(short, 300, path), stream=stream)
        assert (alone["code"], alone["param"]) == ("context_length_exceeded", what)
        words = f"This model's maximum context length is 256 tokens. However, {what} has 300 tokens"
        assert alone["message"].startswith(words)
        both = refused(short, path, **long_chat(short, 200, path), **{field: 100}, stream=stream)
        assert (both["code"], both["param"]) == ("context_length_exceeded", field)
        assert "maximum context length is 256 tokens. However, you requested 300 tokens" in both["message"]
        assert f"(200 in {what}, 100 in {field})" in both["message"]


def test_a_text_that_is_not_even_encoded_is_refused_in_the_same_words(short: Any) -> None:
    endless = {"role": "user", "content": "x" * 2_000_000}
    message = refused(short, MESSAGES, messages=[endless])["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(" tokens > 256 maximum")
    error = refused(short, CHAT, messages=[endless])
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in error["message"]


# ---- what is not text


@pytest.mark.parametrize("kind", ["image", "document"])
def test_what_a_tool_gives_beside_text_is_named_in_its_place(live: Any, tokenizer: Any, kind: str) -> None:
    block = {"image": IMAGE, "document": PDF}[kind]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "see:"}
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    call = {"id": "t", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text, block]}
    output = {
        "type": "function_call_output",
        "call_id": "t",
        "output": [{"type": "input_text", "text": "see:"}, {"type": "input_image", "image_url": "x"}],
    }
    asked = {"type": "function_call", "call_id": "t", "name": "weather", "arguments": "{}"}
    for path, fields in (
        (
            MESSAGES,
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]},
                ]
            },
        ),
        (CHAT, {"messages": [*HI, called, {"role": "tool", "tool_call_id": "t", "content": [text, url]}]}),
        # As clients send an image that no result of this API can hold.
        (
            CHAT,
            {
                "messages": [
                    *HI,
                    called,
                    {"role": "tool", "tool_call_id": "t", "content": "see:"},
                    {"role": "user", "content": [url]},
                ]
            },
        ),
        (RESPONSES, {"input": [*HI, asked, output]}),
    ):
        (said,) = served(live, path, **fields).headers.get_list("warning")
        assert "in results of tools are left out: this model reads only text" in said
    messages = [*HI, called, {"role": "tool", "tool_call_id": "t", "content": [text, url]}]
    prompt = tokenizer.decode(live.post("/tokenize", messages=messages).json()["tokens"], False)
    assert "see:[image_url: left out, because this model reads only text]" in prompt


def test_what_the_user_gives_beside_text_stays_refused(live: Any) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    for path, content in ((MESSAGES, [IMAGE]), (MESSAGES, [PDF]), (CHAT, [url])):
        error = refused(live, path, messages=[{"role": "user", "content": content}])
        assert repr(content[0]["type"]) in error["message"]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    refused(live, MESSAGES, messages=[*HI, {"role": "user", "content": [result, IMAGE]}])
    refused(live, RESPONSES, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the text"}},
        {"type": "document", "source": {"type": "content", "content": "the text"}},
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "the text"}]},
        },
        {
            "type": "search_result",
            "source": "u",
            "title": "t",
            "content": [{"type": "text", "text": "the text"}],
        },
    ],
)
def test_a_document_of_text_is_its_text(live: Any, block: Any) -> None:
    plain = tokens(live, MESSAGES, messages=[{"role": "user", "content": "the text"}])
    assert tokens(live, MESSAGES, messages=[{"role": "user", "content": [block]}]) == plain
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    answer = served(live, MESSAGES, messages=[*HI, {"role": "user", "content": [result]}])
    assert "warning" not in answer.headers


# ---- tools and items of the service


def test_tools_with_a_type_are_left_out_of_messages(live: Any) -> None:
    own = {"name": "weather", "input_schema": WEATHER["parameters"]}
    bare = tokens(live, MESSAGES, tools=[own])
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        own | {"type": "custom"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        answer = served(live, path, tools=tools)
    assert answer.json()["input_tokens"] == bare
    (said,) = served(live, MESSAGES, tools=tools).headers.get_list("warning")
    assert "web_search_20250305, bash_20250124 are left out" in said


def test_blocks_of_the_service_in_a_history_are_left_out(live: Any) -> None:
    turn = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "found"},
    ]
    answer = served(live, MESSAGES, messages=[*HI, {"role": "assistant", "content": turn}, *HI])
    assert len(answer.headers.get_list("warning")) == 3
    plain = tokens(live, MESSAGES, messages=[*HI, {"role": "assistant", "content": "found"}, *HI])
    assert tokens(live, MESSAGES, messages=[*HI, {"role": "assistant", "content": turn}, *HI]) == plain


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"}, "apply_patch"),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, "local_shell"),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "shell"),
        ({"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}, "apply_patch"),
    ],
)
def test_calls_of_other_types_in_a_history_are_calls(live: Any, item: dict[str, Any], name: str) -> None:
    result: Any = [{"stdout": "a.py", "stderr": ""}] if name == "shell" else "a.py"
    back = {"type": f"{item['type']}_output", "call_id": "c", "output": result}
    arguments = item.get("action") or item.get("operation") or {"input": item.get("input")}
    call = {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}
    text = json.dumps(result) if name == "shell" else result
    as_function = [call, {"type": "function_call_output", "call_id": "c", "output": text}]
    found = served(live, RESPONSES, input=[*HI, item | {"call_id": "c"}, back])
    assert "warning" not in found.headers
    assert found.json()["usage"]["input_tokens"] == tokens(live, RESPONSES, input=[*HI, *as_function])


def test_items_of_the_service_in_a_history_are_left_out(live: Any) -> None:
    items = [{"type": "web_search_call", "id": "w", "status": "completed"}, {"type": "mcp_list_tools"}]
    answer = served(live, RESPONSES, input=[*HI, *items, *HI])
    assert len(answer.headers.get_list("warning")) == 2
    assert answer.json()["usage"]["input_tokens"] == tokens(live, RESPONSES, input=[*HI, *HI])


NAMESPACE = {
    "type": "namespace",
    "name": "mcp__w",
    "description": "d",
    "tools": [{"type": "function", **WEATHER}, {"type": "custom", "name": "c"}],
}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_are_called_and_named_by_it(speak: Any, stream: bool) -> None:
    live = speak(CALL.replace("NAME", "mcp__w__weather"))
    plain = {"type": "function", **WEATHER}
    answer = served(live, RESPONSES, tools=[NAMESPACE, plain], stream=stream)
    (said,) = answer.headers.get_list("warning")
    assert "tools of type custom are left out" in said
    (call,) = events(answer)[-1]["response"]["output"] if stream else answer.json()["output"]
    assert (call["namespace"], call["name"]) == ("mcp__w", "weather")
    assert json.loads(call["arguments"]) == {"city": "Bonn"}
    if stream:
        named = [event["item"] for event in events(answer) if "item" in event]
        assert [(item["namespace"], item["name"]) for item in named] == [("mcp__w", "weather")] * 2
    flat = {"type": "function", **WEATHER, "name": "mcp__w__weather"}
    assert tokens(live, RESPONSES, tools=[NAMESPACE]) == tokens(live, RESPONSES, tools=[flat])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    spelt = {**call, "name": "mcp__w__weather"}
    del spelt["namespace"]
    counts = [tokens(live, RESPONSES, input=[*HI, one, output], tools=[NAMESPACE]) for one in (call, spelt)]
    assert counts[0] == counts[1]
    error = refused(live, RESPONSES, tools=[NAMESPACE, flat])
    assert "two tools have the name 'mcp__w__weather'" in error["message"]


def test_a_tool_of_a_namespace_may_be_chosen(speak: Any) -> None:
    live = speak(engine={"features": ["grammar"]})
    other = {"type": "function", **WEATHER, "name": "other"}
    one: dict[str, Any] = {"type": "function", "name": "weather", "namespace": "mcp__w"}
    served(live, RESPONSES, tools=[NAMESPACE, other], tool_choice=one)
    error = refused(live, RESPONSES, tools=[NAMESPACE], tool_choice={"type": "function", "name": "weather"})
    assert "mcp__w__weather" in error["message"]
    some = {"type": "allowed_tools", "mode": "auto", "tools": [one]}
    assert tokens(live, RESPONSES, tools=[NAMESPACE, other], tool_choice=some) == tokens(
        live, RESPONSES, tools=[NAMESPACE]
    )


# ---- thoughts


THOUGHT = "<think>\nhm 🙂\n</think>\n\nfour"


def test_thoughts_of_messages_are_signed_and_come_back(speak: Any) -> None:
    live = speak(THOUGHT)
    thinking = {"type": "adaptive"}
    whole = served(live, MESSAGES, thinking=thinking).json()["content"]
    assert whole[0]["signature"]
    growth = events(served(live, MESSAGES, thinking=thinking, stream=True))
    kinds = [
        (event["type"], event.get("delta", {}).get("type")) for event in growth if event.get("index") == 0
    ]
    assert kinds[0][0] == "content_block_start"
    assert kinds[-2:] == [("content_block_delta", "signature_delta"), ("content_block_stop", None)]
    assert [kind for _, kind in kinds].count("signature_delta") == 1
    signature = next(
        e["delta"]["signature"] for e in growth if e.get("delta", {}).get("type") == kinds[-2][1]
    )
    assert signature == whole[0]["signature"]
    turn = {"role": "assistant", "content": whole}
    chat = [*HI, {"role": "assistant", "content": "four", "reasoning": "hm 🙂"}, *HI]
    assert tokens(live, MESSAGES, messages=[*HI, turn, *HI], thinking=thinking) == tokens(
        live, CHAT, messages=chat
    )


@pytest.mark.parametrize("stream", [False, True])
def test_encrypted_content_carries_the_thought(speak: Any, stream: bool) -> None:
    live = speak(THOUGHT)
    wanted = {"include": ["reasoning.encrypted_content"], "store": False}
    answer = served(live, RESPONSES, **wanted, stream=stream)
    if stream:
        found = events(answer)
        items = found[-1]["response"]["output"]
        grown = [event["item"] for event in found if event.get("item", {}).get("type") == "reasoning"]
        assert [item["encrypted_content"] for item in grown] == [None, items[0]["encrypted_content"]]
    else:
        items = answer.json()["output"]
    value = items[0]["encrypted_content"]
    only_that = {"type": "reasoning", "encrypted_content": value, "summary": []}
    in_full = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm 🙂"}]}
    counts = [
        tokens(live, RESPONSES, input=[*HI, item, *items[1:]])
        for item in (only_that, in_full, items[0], {"type": "reasoning", "summary": []})
    ]
    assert counts[0] == counts[1] == counts[2] > counts[3]
    assert "encrypted_content" not in served(live, RESPONSES).json()["output"][0]
    damaged = value[:-6] + ("A" if value[-6] != "A" else "B") + value[-5:]
    for bad in (damaged, value[:-4], value[4:], value + "AAAA", "gAAAAABn", "", 5, {"a": 1}, "é" * 9):
        error = refused(live, RESPONSES, input=[*HI, {**only_that, "encrypted_content": bad}])
        assert (error["param"], error["code"]) == ("input", "invalid_encrypted_content")
        assert "input[1].encrypted_content" in error["message"]


@pytest.mark.parametrize("content", [[], "", [{"type": "thinking", "thinking": "hm", "signature": ""}]])
def test_a_last_turn_of_the_assistant_without_text_is_left_out(live: Any, content: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    answer = served(live, MESSAGES, messages=messages)
    assert "has no text" in answer.headers["warning"]
    assert tokens(live, MESSAGES, messages=messages) == tokens(live, MESSAGES)


def test_a_switch_for_thoughts_is_kept_or_warned_of(start: Any, live: Any) -> None:
    on, off = tokens(live, CHAT), tokens(live, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert on < off
    for fields in (
        {"enable_thinking": False},
        {"think": False},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"thinking": {"type": "disabled"}},
    ):
        assert tokens(live, CHAT, **fields) == off, fields
        assert tokens(live, CHAT, **fields, chat_template_kwargs={"enable_thinking": True}) == on, fields
        if "thinking" not in fields:
            assert tokens(live, RESPONSES, **fields) == off, fields
    plain = start({"script": [5, 2]}, {"template": ChatTemplate("{{ messages[0].content }}", {})})
    for path, field, value in (
        *((CHAT, "enable_thinking", value) for value in (True, False)),
        *((path, "think", False) for path in (CHAT, RESPONSES, MESSAGES)),
        (CHAT, "reasoning", {"enabled": False}),
        (MESSAGES, "thinking", {"type": "disabled"}),
    ):
        (said,) = served(plain, path, **{field: value}).headers.get_list("warning")
        assert f"{field}" in said
        assert "is ignored" in said
    assert "warning" not in served(plain, MESSAGES).headers


def test_thoughts_may_be_left_out_of_a_chat(speak: Any) -> None:
    message = served(speak(THOUGHT), CHAT, reasoning={"exclude": True}).json()["choices"][0]["message"]
    assert message["content"] == "four"
    assert "reasoning" not in message


# ---- counters and states


def test_counts_of_a_stream_never_fall(speak: Any) -> None:
    """The engine is slower than the head of the answer, so that the stream begins before anything is known."""
    live = speak(THOUGHT, engine={"step_delay_s": 0.3, "max_running": 1})
    served(live, MESSAGES, max_tokens=1)
    growth = events(served(live, MESSAGES, max_tokens=2, stream=True))
    first = next(e["message"]["usage"] for e in growth if e["type"] == "message_start")
    last = next(e["usage"] for e in growth if e["type"] == "message_delta")
    assert first["cache_read_input_tokens"] > 0
    assert all(first[name] <= last[name] for name in first)
    assert growth[0]["type"] == "message_start"


@pytest.mark.parametrize(
    ("text", "limit", "kinds"),
    [
        (THOUGHT, 6, [("reasoning", "incomplete")]),
        (THOUGHT, 10, [("reasoning", "completed"), ("message", "incomplete")]),
        ("plain text", 2, [("message", "incomplete")]),
        ("plain text", 50, [("message", "completed")]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_item_that_was_cut_says_so(
    speak: Any, tokenizer: Any, text: str, limit: int, kinds: Any, stream: bool
) -> None:
    if limit == 10:
        limit = len(tokenizer.encode_short(text)) - 1
    answer = served(
        speak(text + " and more" * (limit != 50)), RESPONSES, max_output_tokens=limit, stream=stream
    )
    response = events(answer)[-1]["response"] if stream else answer.json()
    assert [(item["type"], item["status"]) for item in response["output"]] == kinds
    assert response["status"] == kinds[-1][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("before_the_end", "statuses"), [(6, ["incomplete"]), (0, ["completed"]), (-9, ["completed"])]
)
def test_a_call_that_was_cut_says_so(
    speak: Any, tokenizer: Any, before_the_end: int, statuses: list[str], stream: bool
) -> None:
    """A call may be whole in an answer that is cut behind it."""
    said = CALL.replace("NAME", "weather")
    limit = len(tokenizer.encode_short(said)) - before_the_end
    tool = {"type": "function", **WEATHER}
    answer = served(speak(said), RESPONSES, tools=[tool], max_output_tokens=limit, stream=stream)
    response = events(answer)[-1]["response"] if stream else answer.json()
    assert response["status"] == ("completed" if before_the_end < 0 else "incomplete")
    items = response["output"]
    assert [(item["type"], item["status"]) for item in items] == [("function_call", one) for one in statuses]
    json.loads(items[0]["arguments"])
    if stream:
        grown = [event["item"] for event in events(answer) if "item" in event]
        assert [item["status"] for item in grown] == ["in_progress", *statuses]


def test_a_call_that_goes_wrong_is_incomplete_in_a_complete_answer(speak: Any) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": oops}}\n</tool_call> so'
    tool = {"type": "function", **WEATHER}
    for stream in (False, True):
        answer = served(speak(said), RESPONSES, tools=[tool], stream=stream)
        response = events(answer)[-1]["response"] if stream else answer.json()
        assert response["status"] == "completed"
        assert [(item["type"], item["status"]) for item in response["output"]] == [
            ("function_call", "incomplete"),
            ("message", "completed"),
        ]


def test_models_have_the_fields_of_both_apis(live: Any) -> None:
    listed = live.http.get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "fake")
    assert (model["type"], model["object"], model["display_name"]) == ("model", "model", "fake")
    assert model["created_at"].endswith("Z")
    assert live.http.get("/v1/models/fake").json() == model


# ---- whole sessions, recorded

RECORDED = json.loads((Path(__file__).parent / "data" / "agents.json").read_text())
"""Requests of agents in the order in which they sent them, their own texts replaced, and what the model said."""


class Replay(FakeEngine):
    """Says one answer after the other, and remembers the prompts."""

    def __init__(self, tokenizer: Tokenizer, answers: list[str]) -> None:
        super().__init__(max_model_len=1 << 17, features=["grammar"])
        self.prompts: list[list[int]] = []
        self._answers = [[*tokenizer.encode_short(text), 2] for text in answers]

    def submit(self, request: Request) -> None:
        self.prompts.append(request.prompt_token_ids)
        super().submit(request)

    def _generate(self, live: Any, outputs: StepOutputs) -> None:
        self.script = self._answers[len(self.prompts) - 1]
        super()._generate(live, outputs)


def cached(path: str, answer: httpx.Response) -> int:
    """What the usage says of the prefix cache."""
    body = answer.json()
    usage = body["usage"]
    if path == MESSAGES:
        return int(usage["cache_read_input_tokens"])
    return int(usage["prompt_tokens_details" if path == CHAT else "input_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("session", RECORDED, ids=lambda session: session["agent"])
def test_a_session_reuses_all_before_the_new_message(start: Any, tokenizer: Any, session: Any) -> None:
    engine = Replay(tokenizer, session["answers"])
    app = {
        "template": ChatTemplate(TEMPLATE, {}),
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
        "model_names": ["speaker"],
    }
    live = start(app=app, driver=ThreadDriver(lambda: engine))
    turn = "<|im_start|>"
    for index, request in enumerate(session["requests"]):
        answer = live.post(session["path"], **request | {"stream": False, "stream_options": None})
        assert answer.status_code == 200, answer.text
        if index == 0:
            continue
        before = tokenizer.decode(engine.prompts[index - 1], False) + session["answers"][index - 1]
        turns = before.split(turn)
        match session["reuse"][index - 1]:
            case "answer":
                shared = before
            case "user":  # thoughts are written only behind the last message of the user
                last = max(place for place, text in enumerate(turns) if text.startswith("user"))
                shared = turn.join(turns[: last + 1])
            case int(count):  # this agent changes its history from there on
                shared = turn.join(turns[: count + 1])
        known = len(tokenizer.encode_short(shared))
        assert cached(session["path"], answer) >= (known - 1) // 16 * 16
        assert tokenizer.decode(engine.prompts[index], False).startswith(shared)


def test_a_new_session_of_claude_code_reuses_its_system_prompt(speak: Any) -> None:
    live = speak(engine={"max_model_len": 1 << 17})
    request = RECORDED[0]["requests"][0] | {"model": "fake", "stream": False, "thinking": None}
    served(live, MESSAGES, **request)
    head = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.f0f; cc_entrypoint=cli;"}
    other = [{"role": "user", "content": "Another question, in another session."}]
    usage = served(
        live, MESSAGES, **request | {"system": [head, *request["system"][1:]], "messages": other}
    ).json()["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * (
        usage["input_tokens"] + usage["cache_read_input_tokens"] - 40
    )
