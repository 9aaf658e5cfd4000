"""/v1/messages and its token count, as Anthropic's clients read them; and the tokenizer's endpoints."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
TEXT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
ASK: dict[str, Any] = {"model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def speak(start: Any, tokenizer: Any) -> Any:
    """speak(text): a server whose model always says text."""

    def make(text: str, **app: Any) -> Any:
        script = [*tokenizer._core.encode(text, add_special_tokens=False).ids, 2]
        return start({"script": script}, {"tool_parser": "hermes", "reasoning_parser": "qwen3"} | app)

    return make


def events(text: str) -> Iterator[dict[str, Any]]:
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def bare(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in ("id", "signature")}


EXPECTED = [
    {"type": "thinking", "thinking": "hm"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Bonn"}},
]


def test_blocks_whole_and_streamed(speak: Any) -> None:
    live = speak(TEXT)
    whole = live.post("/v1/messages", **ASK, tools=[TOOL]).json()
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
    assert [bare(block) for block in whole["content"]] == EXPECTED
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    first, *middle, delta, last = events(live.post("/v1/messages", **ASK, tools=[TOOL], stream=True).text)
    assert first["type"] == "message_start"
    assert first["message"]["content"] == []
    assert (delta["type"], last["type"]) == ("message_delta", "message_stop")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in middle:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append(bare(event["content_block"]))
        elif event["type"] == "content_block_delta":
            grown = event["delta"]
            match grown["type"]:
                case "text_delta":
                    blocks[-1]["text"] += grown["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += grown["thinking"]
                case "input_json_delta":
                    arguments += grown["partial_json"]
    blocks[-1]["input"] = json.loads(arguments)
    assert blocks == EXPECTED


def test_why_it_ended(speak: Any) -> None:
    live = speak("four it is")
    assert live.post("/v1/messages", **ASK).json()["stop_reason"] == "end_turn"
    assert live.post("/v1/messages", **{**ASK, "max_tokens": 2}).json()["stop_reason"] == "max_tokens"
    for bad in (["a"] * 33, [""], ["a" * 1025]):
        refused = live.post("/v1/messages", **ASK, stop_sequences=bad)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("stop_sequences")
    stopped = live.post("/v1/messages", **ASK, stop_sequences=[" it"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " it")
    assert stopped["content"][0]["text"] == "four"


def test_usage_counts_the_cache_apart_and_the_count_agrees(speak: Any) -> None:
    live = speak("four it is")
    counted = live.post("/v1/messages/count_tokens", **ASK).json()["input_tokens"]
    usage = live.post("/v1/messages", **ASK).json()["usage"]
    assert usage["input_tokens"] == counted
    again = live.post("/v1/messages", **ASK).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == counted


def test_the_count_checks_what_it_does_not_use(speak: Any) -> None:
    refused = speak("x").post("/v1/messages/count_tokens", **{**ASK, "max_tokens": 0})
    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"]


def test_turns_go_back(speak: Any) -> None:
    live = speak(TEXT)
    first = live.post("/v1/messages", **ASK, tools=[TOOL]).json()
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "sunny"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    body = {**ASK, "messages": messages, "system": [{"type": "text", "text": "Be brief."}]}
    second = live.post("/v1/messages", **body)
    assert second.status_code == 200
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_thinking_can_be_switched_off(speak: Any) -> None:
    live = speak("ok")
    counts = [
        live.post("/v1/messages/count_tokens", **ASK, **extra).json()["input_tokens"]
        for extra in (
            {},
            {"output_config": {"effort": "high"}},
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "adaptive"}},
            {"enable_thinking": True},
        )
    ]
    assert counts[0] == counts[1] == counts[2] > counts[3] == counts[4]
    thinks = speak(
        "ok", template_options={"enable_thinking": True}
    )  # the server's word where a request has none
    assert thinks.post("/v1/messages/count_tokens", **ASK).json()["input_tokens"] == counts[3]


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"max_tokens": None}, 400, "max_tokens is missing"),
        ({"messages": "x"}, 400, "messages"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "'image'"),
        ({"model": "other"}, 404, "'other' does not exist"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, 400, "no grammars"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, 400, "no grammars"),
        ({"tools": [{"name": "web"}]}, 400, "tools[0]: Object missing required field input_schema"),
        ({"tools": [{"type": "web_search_1"}], "tool_choice": {"type": "any"}}, 400, "asks for a call"),
        ({"mcp_servers": [{}]}, 400, "mcp_servers"),
        ({"output_config": {"format": {"schema": {}}}}, 400, "type"),
    ],
)
def test_refusals_are_anthropics(speak: Any, fields: dict[str, Any], status: int, word: str) -> None:
    refused = speak("x").post("/v1/messages", **{**ASK, **fields})
    assert refused.status_code == status
    assert refused.json()["type"] == "error"
    assert word in refused.json()["error"]["message"]


def test_an_engine_that_dies_is_an_error_event(start: Any) -> None:
    live = start({"fail_at_step": 5, "step_delay_s": 0.01})
    *_, last = events(live.post("/v1/messages", **ASK, stream=True).text)
    assert last["type"] == "error"
    assert "step failed" in last["error"]["message"]


def test_tokenize_and_back(start: Any, tokenizer: Any) -> None:
    live = start()
    text = "Köln 🙂 2+2"
    answer = live.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    plain = live.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert live.post("/detokenize", tokens=plain).json() == {"prompt": text}
    chat = live.post("/tokenize", messages=ASK["messages"]).json()
    used = live.post("/v1/chat/completions", messages=ASK["messages"], max_tokens=1).json()["usage"]
    assert chat["count"] == used["prompt_tokens"]
    assert live.post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [3]}),
        ("/detokenize", {"tokens": [5000]}),
        ("/detokenize", {}),
    ],
)
def test_tokenize_refusals(start: Any, path: str, body: dict[str, Any]) -> None:
    assert start().post(path, **body).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_tokenizers_model_is_checked(start: Any, path: str) -> None:
    refused = start().post(path, model="other", prompt="x", tokens=[5])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_one_model(start: Any) -> None:
    live = start(app={"model_names": ["org/name"]})
    assert live.http.get("/v1/models/org/name").json()["max_model_len"] == 4096
    assert live.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
