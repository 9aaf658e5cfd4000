"""/v1/responses with the official client: items, their growth, and the turns that go back."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TEXT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def speak(start: Any, tokenizer: Any) -> Iterator[Any]:
    """speak(text): an OpenAI client of a server whose model always says text."""

    clients: list[openai.OpenAI] = []

    def make(text: str, **app: Any) -> openai.OpenAI:
        script = [*tokenizer._core.encode(text, add_special_tokens=False).ids, 2]
        live = start({"script": script}, {"tool_parser": "hermes", "reasoning_parser": "qwen3"} | app)
        clients.append(openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def kinds(response: Any) -> list[tuple[str, str]]:
    found = []
    for item in response.output:
        if item.type == "function_call":
            assert item.call_id.startswith("call_")
            found.append((item.type, item.arguments))
        else:
            found.append((item.type, item.content[0].text))
    return found


EXPECTED = [("reasoning", "hm"), ("message", "I look."), ("function_call", '{"city": "Bonn"}')]


def test_items_whole_and_streamed(speak: Any) -> None:
    client = speak(TEXT)
    request: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [TOOL], "max_output_tokens": 300}
    whole = client.responses.create(**request)
    assert (whole.status, whole.object, whole.store) == ("completed", "response", False)
    assert kinds(whole) == EXPECTED
    assert whole.output_text == "I look."
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens == 6  # with the markers
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert kinds(events[-1].response) == EXPECTED
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].response.usage.output_tokens_details == whole.usage.output_tokens_details
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [kind for kind, _ in EXPECTED]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in done]
    for name, text in (("output_text", "I look."), ("reasoning_text", "hm")):
        deltas = [event.delta for event in events if event.type == f"response.{name}.delta"]
        assert "".join(deltas) == text
        assert [event.text for event in events if event.type == f"response.{name}.done"] == [text]
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"city": "Bonn"}


def test_the_clients_own_accumulation(speak: Any) -> None:
    with speak("plain text").responses.stream(model="fake", input="hi") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "plain text"


def test_a_cut_answer_is_incomplete(speak: Any) -> None:
    client = speak("plain text")
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="fake", input="hi", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"


def test_turns_go_back(speak: Any) -> None:
    client = speak(TEXT)
    first = client.responses.create(model="fake", input="hi", tools=[TOOL])
    back = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"},
    ]
    second = client.responses.create(model="fake", input=back, instructions="Be brief.", tools=[TOOL])
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.instructions == "Be brief."


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", "not supported"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"input": "x", "background": True}, "background", "not supported"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text", "not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "none"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools", r"tools\[0\].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools", r"tools\[0\]: Expected"),
        (
            {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "'web_search'",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "store: false"),
        ({"input": "x", "tools": [TOOL], "tool_choice": "required"}, "tool_choice", "no grammars"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": [1]}]}, "messages", "JSON object"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input", "'compaction'"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools", "name"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]},
            "tools",
            r"tools\[0\].tools\[0\].type",
        ),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools", "two tools have the name 'weather'"),
    ],
)
def test_refusals_name_the_field(speak: Any, fields: Any, param: str, word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        speak("x").post("/responses", body={"model": "fake", **fields}, cast_to=object)
    assert caught.value.param == param


def test_an_engine_that_dies_ends_the_stream_with_a_failure(start: Any) -> None:
    live = start({"fail_at_step": 5, "step_delay_s": 0.01})
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        *_, last = client.responses.create(model="fake", input="hi", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert "step failed" in last.response.error.message
    assert [item.status for item in last.response.output] == ["incomplete"]


def test_tools_of_the_service_are_left_out_with_a_warning(speak: Any) -> None:
    client = speak("ok")
    tools: list[Any] = [{"type": "web_search"}, TOOL, {"type": "custom", "name": "c"}, {"type": "shell"}]
    bare = client.responses.create(model="fake", input="hi", tools=[TOOL], max_output_tokens=5)
    raw = client.responses.with_raw_response.create(
        model="fake", input="hi", tools=tools, max_output_tokens=5
    )
    assert "tools of type web_search, custom, shell are left out" in "".join(raw.headers.get_list("warning"))
    answer = raw.parse()
    assert answer.usage.input_tokens == bare.usage.input_tokens
    assert [tool.type for tool in answer.tools][:2] == ["web_search", "function"]
    assert answer.usage.input_tokens_details.cache_write_tokens == 0


def test_items_may_be_named_for_a_while_unless_the_client_stores_nothing(speak: Any) -> None:
    client = speak(TEXT)
    request: dict[str, Any] = {"model": "fake", "tools": [TOOL], "max_output_tokens": 300}
    ask: dict[str, Any] = {"role": "user", "content": "hi"}
    for stream in (False, True):
        answer = client.responses.create(**request, input=[ask], stream=stream)
        first = [*answer][-1].response if stream else answer
        call = next(item for item in first.output if item.type == "function_call")
        result: dict[str, Any] = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        sent = [item.model_dump(exclude_none=True) for item in first.output]
        short, long = (
            client.responses.create(**request, input=[ask, *items, result]).usage.input_tokens
            for items in (named, sent)
        )
        assert short == long
    private = client.responses.create(**request, input=[ask], store=False)
    with pytest.raises(openai.BadRequestError, match="store: false"):
        client.responses.create(**request, input=[{"type": "item_reference", "id": private.output[0].id}])


def test_the_oldest_items_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from openinfer.frontend.http.openai import responses_body as kept

    monkeypatch.setattr(kept, "MAX_ITEMS", 2)
    items = kept.KeptItems()
    items.keep({"id": name} for name in "abc")
    assert items.find("c", "input[0]") == {"id": "c"}
    with pytest.raises(kept.APIError, match="'a'"):
        items.find("a", "input[0]")
    monkeypatch.setattr(kept, "MAX_BYTES", 20)
    items.keep([{"id": "d", "text": "x" * 30}])
    with pytest.raises(kept.APIError):
        items.find("c", "input[0]")


def test_thoughts_are_their_own_summary_if_one_is_asked_for(speak: Any) -> None:
    client = speak(TEXT)
    request: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [TOOL], "max_output_tokens": 300}
    whole = client.responses.create(**request, reasoning={"summary": "auto"})
    assert [part.text for part in whole.output[0].summary] == ["hm"]
    events = list(client.responses.create(**request, reasoning={"summary": "auto"}, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "hm"
    kinds_of_summary = [
        event.type.removeprefix("response.reasoning_summary_") for event in events if "summary" in event.type
    ]
    assert kinds_of_summary[0] == "part.added"
    assert kinds_of_summary[-2:] == ["text.done", "part.done"]
    assert client.responses.create(**request).output[0].summary == []
    back: list[Any] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a long thought"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    assert client.responses.create(model="fake", input=back, max_output_tokens=3).status == "incomplete"


def test_some_of_the_tools_may_be_offered(speak: Any) -> None:
    client = speak("ok")
    other = {**TOOL, "name": "other"}
    counts = [
        client.responses.create(model="fake", input="hi", max_output_tokens=5, **options).usage.input_tokens
        for options in (
            {"tools": [TOOL]},
            {
                "tools": [TOOL, other],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather"}],
                },
            },
        )
    ]
    assert counts[0] == counts[1]
