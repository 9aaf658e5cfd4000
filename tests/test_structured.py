"""Structured output and forced calls through `openinfer serve`: random weights, clients as people use them."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from module_files import module_at

GOLDENS = Path(__file__).parent / "goldens"
SAMPLER_TESTS = Path(__file__).parents[1] / "libs/sampler/tests/test_grammar.py"
THINK, END_THINK = 398, 399
"""Of the golden checkpoint's tokenizer."""


class Place(pydantic.BaseModel):
    """What the model has to say."""

    city: str = pydantic.Field(max_length=12)
    kind: Literal["town", "village"]
    people: int = pydantic.Field(ge=0, le=10**6)
    tags: list[Literal["old", "new"]] = pydantic.Field(max_length=2)


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
ASK: list[Any] = [{"role": "user", "content": "Name a place."}]
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


def tool(name: str, schema: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("visit", SCHEMA),
    tool("wait", {"type": "object", "properties": {"s": {"type": "integer"}}, "additionalProperties": False}),
]


@pytest.fixture(scope="module")
def url(tiny: Any, start: Callable[..., Any]) -> str:
    return str(start(tiny.path, "--max-num-seqs", "16").url)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "qwen3-tiny", "messages": ASK, "max_tokens": 400, "temperature": 1.0, "seed": 7}
    return client.chat.completions.create(**{**defaults, "extra_body": NO_THOUGHTS, **options})


def streamed(stream: Any) -> dict[int, dict[str, Any]]:
    """What the chunks add up to, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            one = found.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None}
            )
            one["content"] += choice.delta.content or ""
            one["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(one["calls"]):
                    one["calls"].append([call.function.name, ""])
                one["calls"][call.index][1] += call.function.arguments
            one["reason"] = choice.finish_reason or one["reason"]
    return found


def test_the_clients_own_parsing(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="qwen3-tiny",
        messages=ASK,
        response_format=Place,
        max_tokens=400,
        seed=1,
        extra_body=NO_THOUGHTS,
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Place)
    assert answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(
        model="qwen3-tiny",
        input="Name a place.",
        text_format=Place,
        max_output_tokens=400,
        extra_body=NO_THOUGHTS,
    )
    assert isinstance(response.output_parsed, Place)


def test_n_streams_logprobs_and_the_rest_go_with_it(client: openai.OpenAI) -> None:
    options = {
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": FORMAT,
        "presence_penalty": 0.5,
    }
    whole = chat(client, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    for choice in whole.choices:
        Place.model_validate_json(choice.message.content)
        assert choice.finish_reason == "stop"
        said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content[:-1])
        assert said.decode() == choice.message.content
    parts = streamed(chat(client, stream=True, **options))
    assert [parts[i]["content"] for i in range(3)] == texts
    cut = chat(client, response_format=FORMAT, max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    stopped = chat(client, response_format=FORMAT, stop=['"kind"'])
    assert '"kind"' not in (stopped.choices[0].message.content or '"kind"')
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_it_begins_after_the_thoughts(client: openai.OpenAI, stream: bool) -> None:
    body = {"logit_bias": {str(THINK): 7.0, str(END_THINK): 6.5}}
    answer = chat(client, response_format=FORMAT, stream=stream, extra_body=body, max_tokens=600)
    if stream:
        (one,) = streamed(answer).values()
        thoughts, content = one["reasoning"], one["content"]
    else:
        thoughts, content = answer.choices[0].message.reasoning, answer.choices[0].message.content
    assert thoughts.strip()
    with pytest.raises(ValueError):
        json.loads(thoughts)
    Place.model_validate_json(content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "wait"}}])
def test_calls_are_forced(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = chat(client, tools=TOOLS, tool_choice=choice, n=4, stream=stream, max_tokens=400)
    if stream:
        found = [(one["calls"], one["content"], one["reason"]) for one in streamed(answer).values()]
    else:
        found = [
            (
                [(c.function.name, c.function.arguments) for c in one.message.tool_calls],
                one.message.content,
                one.finish_reason,
            )
            for one in answer.choices
        ]
    assert len(found) == 4
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    for calls, content, reason in found:
        assert calls
        assert reason in ("tool_calls", "length")
        if content:  # the last was cut before its name
            assert reason == "length"
            assert content.lstrip().startswith("<tool_call>")
        whole = calls[:-1] if reason == "length" and stream else calls  # the last may have been cut
        for name, arguments in whole:
            jsonschema.validate(json.loads(arguments), schemas[name])
            assert choice == "required" or name == "wait"


def test_one_call_where_calls_are_not_parallel(client: openai.OpenAI) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=6)
    for choice in answer.choices:
        assert [len(choice.message.tool_calls), choice.finish_reason] == [1, "tool_calls"]


def test_the_loop_of_a_tool(client: openai.OpenAI) -> None:
    first = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [*ASK, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}]
    second = chat(client, messages=messages, tools=TOOLS, tool_choice="none", response_format=FORMAT)
    Place.model_validate_json(second.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_regex": "[a-f]{4}-[0-9]{2}"}, r"[a-f]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "Ümlaut"]}}, "yes|no|Ümlaut"),
        ({"guided_grammar": 'start: "a" b+\nb: "b" | "c"'}, "a[bc]+"),
        ({"guided_grammar": 'root ::= "a" [bc]{2,9}'}, "a[bc]{2,9}"),
        ({"ebnf": 'root ::= "x" | "y"'}, "x|y"),
    ],
    ids=str,
)
def test_the_other_kinds(url: str, fields: Any, fits: str) -> None:
    body = {"prompt": ["Say", "it"], "max_tokens": 200, "temperature": 1, "seed": 3, "n": 2, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert re.fullmatch(fits, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


def test_anthropics_words(url: str) -> None:
    body = {
        "messages": ASK,
        "max_tokens": 400,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=120).json()
    Place.model_validate_json(answer["content"][0]["text"])
    tools = [{"name": "visit", "input_schema": SCHEMA}]
    forced = {
        "messages": ASK,
        "max_tokens": 900,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "visit"},
    }
    answer = httpx.post(
        f"{url}/v1/messages", json={**forced, "thinking": {"type": "disabled"}}, timeout=120
    ).json()
    assert answer["content"][0]["type"] == "tool_use"
    Place.model_validate(answer["content"][0]["input"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keyword", ["not", "dependentRequired"])
def test_a_keyword_that_cannot_be_kept_is_a_400_with_its_name(url: str, keyword: str, stream: bool) -> None:
    value = {"not": {"type": "null"}, "dependentRequired": {"a": ["b"]}}[keyword]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {keyword: value}}}
    for extra in ({"response_format": wanted}, {"tools": [tool("f", {"type": "object", keyword: value})]}):
        choice = {"tool_choice": "required"} if "tools" in extra else {}
        body = {"messages": ASK, "stream": stream, **extra, **choice, **NO_THOUGHTS}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert keyword in error["message"]
        assert (error["param"], error["code"]) == (next(iter(extra)), "invalid_grammar")
        assert error["message"].startswith("json_schema: " if "tools" not in extra else "lark: ")


# -- grammars that cost too much --

AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "a" "a" | "a" "a" "a"'


def post_grammar(url: str, stream: bool = False, max_tokens: int = 2, **wanted: str) -> httpx.Response:
    body = {"prompt": "Say", "max_tokens": max_tokens, "structured_outputs": wanted, "stream": stream}
    return httpx.post(
        f"{url}/v1/completions", json=body | {"temperature": 1, "min_tokens": max_tokens // 2}, timeout=120
    )


@pytest.mark.attack
def test_expressions_that_explode_stall_no_other_request(
    tiny: Any, start: Callable[..., Any], url: str
) -> None:
    """All of them together take the server less than a second each."""
    server = start(tiny.path, "--max-num-seqs", "16")
    before = server.processor_s()
    answers: list[int] = []
    threads = [
        threading.Thread(
            target=lambda i=i: answers.append(
                post_grammar(url, regex=f"(a{{1000}}){{{999 + i}}}").status_code
            )
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    assert post_grammar(url, choice=["x"]).status_code == 200
    for thread in threads:
        thread.join()
    assert server.processor_s() - before < 12
    assert set(answers) <= {200, 400}
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.attack
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_is_a_400(url: str, stream: bool) -> None:
    answer = post_grammar(url, stream, grammar="start: start | start start")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
    assert error["message"] == "lark: no output fits the grammar"


@pytest.mark.attack
def test_a_grammar_that_becomes_too_costly_ends_its_own_request_only(url: str) -> None:
    answer = post_grammar(url, max_tokens=400, grammar=AMBIGUOUS)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
    assert "items; max is 600" in error["message"]
    begun = post_grammar(url, True, max_tokens=400, grammar=AMBIGUOUS)
    assert begun.status_code == 200
    *chunks, last, done = [line for line in begun.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert json.loads(last[6:])["error"]["code"] == "invalid_grammar"
    text = "".join(
        json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks
    )  # a busy server joins chunks
    assert len(text) > 20
    assert httpx.get(f"{url}/health").status_code == 200


# -- schemas of every kind --


FORMATS = jsonschema.FormatChecker(["uuid", "ipv4"])


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """As RFC 3339 has it: with a year 0, which Python's calendar lacks. It is a leap year, as 2000 is."""
    if isinstance(value, str):
        datetime.date.fromisoformat(re.sub("^0000", "2000", value))
    return True


def made_schema(index: int) -> dict[str, Any]:
    """The sampler's seeded schemas."""
    return dict(module_at(SAMPLER_TESTS).schema_of(index))


async def valid_outputs(url: str, tokenizer_bias: dict[str, float], indices: range) -> int:
    """Generate under each schema, several at once and free ones beside them; how many were valid."""
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def one(index: int) -> bool:
            schema = made_schema(index)
            body: dict[str, Any] = {"prompt": f"{index}:", "seed": index, "temperature": 1}
            if index % 4 == 3:
                await http.post("/v1/completions", json={**body, "max_tokens": 20})
            body |= {"max_tokens": 3000, "logit_bias": tokenizer_bias, "guided_json": schema}
            answer = (await http.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop", (index, schema, choice["text"][-200:])
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(
                json.loads(choice["text"])
            )
            return True

        return sum(await asyncio.gather(*map(one, indices)))


@pytest.mark.parametrize(
    "indices", [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)], ids=str
)
def test_schemas_of_every_kind_give_valid_json(url: str, indices: range) -> None:
    tokens = {text: httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"] for text in '"}]'}
    bias = {str(ids[0]): 5.0 for ids in tokens.values()} | {"0": 5.0, "2": 5.0}
    assert asyncio.run(valid_outputs(url, bias, indices)) == len(indices)


def test_nothing_is_left_behind(tiny: Any, start: Callable[..., Any], url: str) -> None:
    """After all of the above: nothing runs, no block is held."""
    server = start(tiny.path, "--max-num-seqs", "16")
    assert server.url == url
    gauges = server.settled()
    assert len(gauges) == 3
    assert not any(gauges.values())


def test_the_hybrids_calls_are_in_its_own_format(start: Callable[..., Any]) -> None:
    """Qwen3.5 writes arguments one by one, as bare text."""
    url = start(GOLDENS / "qwen3_5-tiny", "--max-num-seqs", "8").url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        raw = client.chat.completions.parse(
            model="qwen3_5-tiny", messages=ASK, response_format=Place, max_tokens=400, extra_body=NO_THOUGHTS
        )
        assert isinstance(raw.choices[0].message.parsed, Place)
        options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 4}
        answer = chat(client, model="qwen3_5-tiny", **options)
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
