"""The fields that ask for a certain output, as the engine gets them; and the tokens' bytes that it gets before."""

import asyncio
import json
import os
import signal
from typing import Any

import msgspec
import pytest

from openinfer.frontend import EngineSpec, Request
from openinfer.frontend.contract import Command, TokenTable
from openinfer.frontend.http import ChatTemplate, Tokenizer
from openinfer.frontend.http.body import CommonBody
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.restart import RestartingClient
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.thread_driver import ThreadDriver
from openinfer.sampler import SamplingParams
from openinfer.sampler.form import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
ANY = Grammar("json_object")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Recorder(FakeEngine):
    """Keeps what it is asked and what it is told."""

    def __init__(self) -> None:
        super().__init__(features=["grammar"])
        self.asked: list[Request] = []
        self.told: list[Command] = []

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        super().submit(request)

    def control(self, command: Command) -> None:
        self.told.append(command)
        super().control(command)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def client(start: Any, recorder: Recorder) -> Any:
    return start(
        app={"template": ChatTemplate(TEMPLATE, {}), "tool_parser": "hermes", "reasoning_parser": "qwen3"},
        driver=ThreadDriver(lambda: recorder, close_timeout_s=0.5),
    )


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PLAIN = {"prompt": "x", "max_tokens": 2}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": FORMAT}, JSON),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"guided_json_object": True}, ANY),
        ({"guided_json_object": False}, None),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        (
            {"structured_outputs": {"grammar": 'start: "a"', "disable_fallback": True}},
            Grammar("lark", 'start: "a"'),
        ),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {}}, None),
        ({"json_schema": json.dumps(SCHEMA)}, JSON),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"response_format": FORMAT, "guided_json": SCHEMA}, JSON),
    ],
    ids=str,
)
def test_every_name_of_it_reaches_the_engine(
    client: Any, recorder: Recorder, fields: Any, grammar: Any
) -> None:
    for path, body in (
        ("/v1/completions", {**PLAIN, "n": 2}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ):
        recorder.asked.clear()
        answer = client.post(path, **body, **fields)
        assert answer.status_code == 200, answer.text
        assert len(recorder.asked) == body.get("n", 1)
        for request in recorder.asked:
            if path == "/v1/completions" or grammar is None:
                assert request.grammar == grammar
            else:  # the model may think first
                assert request.grammar is not None
                assert request.grammar.content == grammar
    known = CommonBody.__struct_fields__
    assert set(fields) <= set(known)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        ),
        ("/v1/messages", {**CHAT, "output_format": {"type": "json_schema", "schema": SCHEMA}}),
        ("/v1/messages", {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
def test_the_other_apis_ask_in_their_own_words(
    client: Any, recorder: Recorder, path: str, fields: Any
) -> None:
    recorder.asked.clear()
    limit = {"max_output_tokens": 2} if path == "/v1/responses" else {}
    answer = client.post(path, **fields, **limit)
    assert answer.status_code == 200, answer.text
    (request,) = recorder.asked
    assert request.grammar is not None
    assert request.grammar.content == JSON
    if path == "/v1/responses":
        assert answer.json()["text"]["format"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format",
            "schema",
        ),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": {"a": 1}, "structured_outputs": {"regex": "x"}}, "structured_outputs", "give one"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs", "NUL"),
        ({"structured_outputs": {"structural_tag": {}, "regex": "a"}}, None, ""),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"regex": "a" * 70_000}, "regex", "65536"),
    ],
    ids=str,
)
def test_refusals_name_the_field(client: Any, fields: Any, param: str | None, word: str) -> None:
    answer = client.post("/v1/completions", **PLAIN, **fields)
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param or error["param"].startswith(param)
    assert word in error["message"]


def tool(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **options}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [tool("f")]}, None),
        ({"tools": [tool("f")], "tool_choice": "none"}, None),
        ({"tools": [tool("f", strict=False)]}, None),
        ({"tools": [tool("f", strict=True)]}, '\\"f\\"'),
        ({"tools": [tool("f"), tool("g")], "tool_choice": "required"}, '\\"g\\"'),
        (
            {"tools": [tool("f"), tool("g")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            '\\"g\\"',
        ),
    ],
)
def test_calls_are_forced(client: Any, recorder: Recorder, fields: Any, said: str | None) -> None:
    recorder.asked.clear()
    assert client.post("/v1/chat/completions", **CHAT, **fields).status_code == 200
    (request,) = recorder.asked
    assert (request.grammar is None) == (said is None)
    if said is not None and request.grammar is not None:
        assert said in request.grammar.text
        named = isinstance(fields.get("tool_choice"), dict)
        assert ('\\"f\\"' in request.grammar.text) != named


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tool_choice": "required"}, "the tools given are none"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "'g'; the tools",
        ),
        ({"tools": [tool("f", parameters={"type": "array"})], "tool_choice": "required"}, "of type object"),
    ],
)
def test_calls_that_cannot_be_forced(client: Any, fields: Any, word: str) -> None:
    answer = client.post("/v1/chat/completions", **CHAT, **fields)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_a_server_without_a_tokenizer_refuses(start: Any) -> None:
    live = start({"features": ["grammar"]}, {"tokenizer": None, "template": None})
    answer = live.post("/v1/completions", prompt=[5], max_tokens=2, guided_regex="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
    assert "tokenizer" in answer.json()["error"]["message"]


def test_without_grammars_strict_is_a_wish_and_the_rest_is_refused(start: Any) -> None:
    live = start({}, {"tool_parser": "hermes", "template": ChatTemplate(TEMPLATE, {})})
    assert live.post("/v1/chat/completions", **CHAT, tools=[tool("f", strict=True)]).status_code == 200
    refused = live.post("/v1/messages", **CHAT, output_format={"type": "json_schema", "schema": SCHEMA})
    assert refused.status_code == 400
    assert "output_format is not supported: this engine has no grammars" in refused.json()["error"]["message"]


# -- the table --


def test_the_engine_is_sent_what_tokens_stand_for(
    client: Any, recorder: Recorder, tokenizer: Tokenizer
) -> None:
    (table,) = recorder.told
    assert isinstance(table, TokenTable)
    for text in ("Hello", " wörld", "日", '{"'):
        assert b"".join(table.tokens[i] for i in tokenizer.encode_short(text)) == text.encode()
    ends = tokenizer.encode_short("<|im_end|>")
    assert set(ends) <= set(table.special_ids)
    everything = tokenizer.token_table("<|im_end|>")
    assert everything is not None
    assert set(table.special_ids) - set(everything.special_ids) == set(ends)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=Command)
    assert wired == table


def test_a_new_engine_is_sent_it_too() -> None:
    async def generate(client: RestartingClient) -> str:
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = Request(
            id=client.new_id(),
            prompt_token_ids=[10],
            sampling=SamplingParams(),
            max_tokens=2,
            arrival=0.0,
            grammar=ANY,
        )
        client.submit(request, lambda delta: delta.terminal and ended.set_result(delta.terminal))
        return str(getattr(await ended, "reason", "failed"))

    async def main() -> None:
        drivers: list[ProcessDriver] = []

        def make() -> ProcessDriver:
            spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {"features": ["grammar"]})
            drivers.append(ProcessDriver(spec, close_timeout_s=0.2))
            return drivers[-1]

        client = RestartingClient(make)
        await client.start()
        try:
            assert await generate(client) == "grammars need a TokenTable"
            await client.control(TokenTable([b"a"], []))
            assert await generate(client) == "length"
            os.kill(drivers[-1].pid, signal.SIGKILL)
            while len(drivers) < 2 or not client.health().ok:
                await asyncio.sleep(0.02)
            assert await generate(client) == "length"
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))
