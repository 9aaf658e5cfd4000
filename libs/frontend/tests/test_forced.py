"""Forced calls: whatever a model of random logits says under a format's grammar, the format's parser reads as calls
that the tools' schemas allow."""

import contextlib
import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer.frontend.chat import TOOL_FORMATS, Content, OutputParser, Reasoning, ToolCall
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.chat import Chat
from openinfer.frontend.http.text.chat_format import ChatFormat
from openinfer.sampler.grammar import Compiler, Grammar

EOS = 0
PIECES = [
    b"</",
    b"<think>",
    b"\n\n",
    b'"}',
    b"}\n</tool_call>",
    b"</parameter>",
    b"</arg_value>",
    b"tool_call>",
    b'{"',
    b'": ',
]
OPENING = [b"<tool_call>", "<｜DSML｜tool_calls>".encode()]
CLOSING = [b"</think>", b"\n</parameter>", b"</arg_value>", "</｜DSML｜parameter>".encode(), b'"', b"}"]
TOKENS = [b"<eos>", *(bytes([i]) for i in range(256)), *PIECES, *OPENING, *CLOSING]
CLOSES = [EOS, *(TOKENS.index(token) for token in (*OPENING, *CLOSING))]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6, "description": "where"},
        "unit": {"enum": ["C", "F", "</C"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/at"}},
            "required": ["at"],
            "additionalProperties": False,
        },
        "at": {"type": "boolean"},
    },
    "additionalProperties": False,
}
PICK = {
    "type": "object",
    "properties": {"of": {"enum": [1, None, "one"]}, "kind": {"$ref": "#/$defs/kind"}},
    "$defs": {"kind": {"type": ["string", "null"]}},
    "additionalProperties": False,
}
BOOK = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "until": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}], "default": None},
        "code": {"type": "string", "pattern": "^[A-Z]\\d{2}/\\d$", "title": "Code"},
        "seat": {"anyOf": [{"$ref": "#/$defs/seat"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        "room": {
            "anyOf": [
                {"const": "a", "type": "string"},
                {"type": "array", "items": {"const": 1}, "maxItems": 2},
            ]
        },
        "path": {"type": "string", "format": "path", "maxLength": 3},
    },
    "required": ["day", "until", "code", "seat", "room", "path"],
    "additionalProperties": False,
    "$defs": {"seat": {"enum": ["aisle", "window"], "type": "string"}},
}
"""Dates, patterns and options as pydantic writes them."""
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "pick-1": PICK, "book": BOOK, "now": None}
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    for name, schema in {**SCHEMAS, "now": {"type": "object", "maxProperties": 0}}.items()
}
FORMATS = sorted(set(TOOL_FORMATS) - {"qwen3_coder"})


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(TOKENS, [EOS], [EOS])
    yield compiler
    compiler.close()


@functools.cache
def compiled(compiler: Compiler, grammar: Grammar) -> Any:
    return compiler.compile(grammar)


def say(compiler: Compiler, grammar: Grammar, rng: random.Random, most: int = 4000) -> str:
    """What a model says that draws any token that it may, and likes to come to an end."""
    matcher, said = compiled(compiler, grammar).copy(), b""
    for _ in range(most):
        allowed = matcher.allowed()
        closing = [token for token in CLOSES if allowed[token]]
        token = rng.choice(closing if closing and rng.random() < 0.3 else allowed.nonzero()[0].tolist())
        matcher.accept(token)
        if token == EOS:
            return said.decode()
        said += TOKENS[token]
    raise AssertionError(f"no end: {said[-200:]!r}")


def chat(**options: Any) -> Chat:
    tools = [
        {"type": "function", "function": {"name": name} | ({"parameters": schema} if schema else {})}
        for name, schema in SCHEMAS.items()
    ]
    return Chat(messages=[], **{"tools": tools, "tool_choice": "required", **options})


def read(form: ChatFormat, asked: Chat, prompt: str, text: str) -> list[Any]:
    """The parts, however the text is cut."""
    new_parser = form.parser(asked, prompt, False)
    assert new_parser is not None
    parser: OutputParser = new_parser()
    return [*parser.push(text[: len(text) // 2]), *parser.push(text[len(text) // 2 :]), *parser.flush()]


def check(call: ToolCall) -> None:
    VALIDATORS[call.name].validate(json.loads(call.arguments))
    if call.name == "book":
        assert json.loads(call.arguments)["code"].isascii()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_forced_is_read_as_calls(compiler: Compiler, name: str) -> None:
    form, rng = ChatFormat(tools=TOOL_FORMATS[name], reasoning=True), random.Random(name)
    called, most = set(), 0
    for turn, prompt in enumerate(["<user>", "<think>\n", "<think>\n\n</think>\n\n"] * 8):
        asked = chat(tool_choice="tool pick-1" if turn % 5 == 0 else "required", parallel_calls=turn % 4 > 0)
        grammar = form.grammar(asked, prompt, None)
        assert grammar is not None
        text = say(compiler, grammar, rng)
        parts = read(form, asked, prompt, text)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert calls, text
        assert not any(isinstance(part, Content) for part in parts), text
        for call in calls:
            check(call)
        called.update(call.name for call in calls)
        most = max(most, len(calls))
        if turn % 5 == 0:
            assert {call.name for call in calls} == {"pick-1"}
        if turn % 4 == 0:
            assert len(calls) == 1
        assert prompt != "<think>\n\n</think>\n\n" or not any(isinstance(part, Reasoning) for part in parts)
    assert called == set(SCHEMAS)
    assert most > 1


def calls_said(compiler: Compiler, form: ChatFormat, rng: random.Random, parallel: bool) -> list[int]:
    """How many calls there are in some texts of a model that may decide; each of them is checked."""
    asked = chat(tool_choice="auto", strict=["weather"], parallel_calls=parallel)
    grammar = form.grammar(asked, "", None)
    assert grammar is not None
    counts = []
    for _ in range(25):
        text = say(compiler, grammar, rng)
        parts = read(form, asked, "", text)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        for call in calls:
            check(call)
        assert form.tools is not None
        spoken = "".join(part.text for part in parts if isinstance(part, Content))
        assert form.tools.opening not in spoken, text
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "deepseek_v4"])
def test_strict_tools_hold_calls_that_the_model_decides_on(compiler: Compiler, name: str) -> None:
    form, rng = ChatFormat(tools=TOOL_FORMATS[name]), random.Random(name)
    asked = chat(tool_choice="auto", strict=["weather"])
    grammar = form.grammar(asked, "", None)
    assert grammar is not None
    matcher = compiler.compile(grammar)
    assert matcher.may_end
    opening = TOOL_FORMATS[name].opening
    free = f"Well < then {opening[:-1]}; "
    for byte in (free + opening).encode():
        assert matcher.allowed()[1 + byte]
        matcher.accept(1 + byte)
    assert not matcher.may_end
    assert matcher.allowed().sum() <= 2
    plain = form.grammar(chat(tool_choice="auto"), "", None)
    assert plain is None
    counts = {parallel: calls_said(compiler, form, rng, parallel) for parallel in (False, True)}
    assert max(counts[False]) == 1
    assert max(counts[True]) > 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_for_the_content_leaves_calls_possible(compiler: Compiler, name: str) -> None:
    form, rng = ChatFormat(tools=TOOL_FORMATS[name], reasoning=True), random.Random(name)
    content = Grammar(
        "json_schema",
        '{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": false}',
    )
    asked = chat(tool_choice="auto")
    kinds = set()
    for _ in range(20):
        grammar = form.grammar(asked, "", content)
        assert grammar is not None
        parts = read(form, asked, "", say(compiler, grammar, rng))
        kinds.update(type(part) for part in parts)
        for part in parts:
            if isinstance(part, ToolCall):
                check(part)
        text = "".join(part.text for part in parts if isinstance(part, Content))
        assert not text or json.loads(text) in ({}, {"a": None})
    assert kinds == {Reasoning, Content, ToolCall}


def test_content_alone_is_itself_unless_there_are_thoughts_first(compiler: Compiler) -> None:
    content, asked = Grammar("regex", "[ab]{2}"), Chat(messages=[])
    assert ChatFormat().grammar(asked, "", content) is content
    assert ChatFormat().grammar(asked, "", None) is None
    thinking = ChatFormat(reasoning=True)
    assert thinking.grammar(asked, "", None) is None
    assert thinking.grammar(asked, "<think></think>\n", content) is content
    inside = thinking.grammar(asked, "<think>\n", content)
    assert inside is not None
    text = say(compiler, inside, random.Random(1))
    answer = text.partition("</think>")[2]
    assert set(answer.lstrip("\n")) <= {"a", "b"}


@pytest.mark.parametrize(
    ("name", "parameter", "reason"),
    [
        (
            "hermes",
            {"type": "string", "pattern": "^(?!a)b$"},
            "tool 'f': pattern .* looks around with '\\(\\?!'",
        ),
        ("qwen3_xml", {"type": "string", "pattern": "(?=a)b"}, "tool 'f': pattern .* looks around"),
        ("deepseek_v4", {"type": "string", "pattern": "(?:^a)"}, "tool 'f': pattern .* within"),
        ("qwen3_xml", {"type": "string", "minimum": 3}, "'minimum' of a text cannot be kept"),
        ("qwen3_xml", {"$ref": "#/$defs/nowhere"}, "'\\$ref' of a text"),
        ("deepseek_v4", {"allOf": [{"type": "string"}]}, "'allOf' of a text"),
        ("qwen3_xml", True, "cannot be written"),
    ],
    ids=str,
)
def test_what_a_format_cannot_promise_is_named(name: str, parameter: Any, reason: str) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"p": parameter}}}
    asked = Chat(messages=[], tools=[{"type": "function", "function": tool}], tool_choice="required")
    with pytest.raises(APIError, match=reason) as caught:
        ChatFormat(tools=TOOL_FORMATS[name]).grammar(asked, "", None)
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "of type object, not 'array'"),
        ({"properties": {}, "minProperties": 1}, "'minProperties' of the parameters"),
        ({"properties": {}, "required": ["x"]}, "required parameter 'x'"),
        ({"properties": {'a"': {}}}, "cannot be written"),
        ({"properties": 3}, "must be an object"),
        ({"properties": {}, "required": "x"}, "a list"),
        ({"properties": {"p": {"enum": 3}}}, "list of values"),
        ({"properties": {"p": {"const": "a</parameter>"}}}, "which end it"),
        ({"properties": {"p": {"type": "string", "minLength": "3"}}}, "are no lengths"),
        ({"properties": {"p": {"type": "string", "minLength": 3, "maxLength": 2}}}, "are no lengths"),
    ],
    ids=str,
)
def test_what_parameters_cannot_be_is_named(parameters: Any, reason: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked = Chat(messages=[], tools=tools, tool_choice="required")
    with pytest.raises(APIError, match=reason):
        ChatFormat(tools=TOOL_FORMATS["qwen3_xml"]).grammar(asked, "", None)


KEYWORDS = [
    "type", "properties", "required", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "minLength", "maxLength",
    "additionalProperties", "description", "pattern", "items", "a", "b",
]  # fmt: skip
ANYTHING = st.recursive(
    st.sampled_from(
        [None, True, 0, -1, 2, 1.5, "", "a", "string", "null", "object", "#/$defs/a", "#/properties/b"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=4),
    st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=4)),
    st.sampled_from(FORMATS),
)
def test_no_schema_breaks_the_server(schema: Any, properties: Any, name: str) -> None:
    """It is forced, or refused."""
    for parameters in (schema, {"type": "object", "properties": properties, "$defs": properties}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        asked = Chat(messages=[], tools=[tool], tool_choice="required")
        with contextlib.suppress(APIError):
            assert ChatFormat(tools=TOOL_FORMATS[name]).grammar(asked, "", None) is not None
        for text in (
            "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
            '{"name": "f", "arguments": {}}',
        ):
            parser = OutputParser(tools=TOOL_FORMATS[name], schemas={"f": parameters})
            parser.push(f"{TOOL_FORMATS[name].opening}\n{text}")
            parser.flush()
