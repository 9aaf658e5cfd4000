"""Reading what models write: the same parts however the text is cut; what is malformed or cut off stays text."""

import itertools
import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer.frontend.chat import (
    TOOL_FORMATS,
    Content,
    OutputParser,
    Part,
    Reasoning,
    ToolCall,
    default_formats,
)

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": ["number", "null"]},
            "wet": {"type": "boolean"},
            "where": {"anyOf": [{"type": "object"}, {"type": "array"}]},
            "any": {},
        },
    }
}
D = "｜DSML｜"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
DSML = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n<{D}parameter name="city" string="true">Köln</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">2</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'
)
V3, V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    f'{a}{{"city": "Köln", "days": 2}}{b}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    for a, b in (("function<｜tool▁sep｜>weather\n```json\n", "\n```"), ("weather<｜tool▁sep｜>", ""))
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
GLM45 = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
CALLS = {
    "glm45": GLM45,
    "glm47": GLM45.replace("\n", ""),
    "hermes": HERMES,
    "qwen3_xml": XML,
    "deepseek_v4": DSML,
    "deepseek_v32": DSML.replace("tool_calls", "function_calls"),
    "deepseek_v3": V3,
    "deepseek_v31": V31,
    "kimi_k2": KIMI,
}
EXPECTED = ToolCall("weather", '{"city": "Köln", "days": 2}')
EXPECTED_VALUES = {"city": "Köln", "days": "2"}
FORMATS = sorted(CALLS)


def read(pieces: Iterable[str], name: str | None, **options: object) -> list[Part]:
    """All parts, neighbours of a kind joined, without the ids of calls."""
    tools = None if name is None else TOOL_FORMATS[name]
    parser = OutputParser(reasoning=True, tools=tools, schemas=SCHEMAS, **options)  # type: ignore[arg-type]
    raw = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    assert not any(part == Content("") or part == Reasoning("") for part in raw)
    joined: list[Part] = []
    for kind, group in itertools.groupby(raw, type):
        parts = list(group)
        if kind is ToolCall:
            joined += [part._replace(id="") for part in parts]  # type: ignore[union-attr, call-arg]
        else:
            joined.append(kind("".join(part.text for part in parts)))  # type: ignore[union-attr, call-arg]
    return joined


def split(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


FRAGMENTS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            "\n\n",
            " ",
            "a",
            "Köln ",
            "<",
            "</",
            "🙂",
        ),
        *(HERMES, XML, DSML, HERMES[:-3], XML[:-9], DSML[:-20], HERMES[10:], XML.replace("</function>", "")),
        *('{"name": "x", "arguments": ', '{"name": 3}', "<function=f>", "</function>", "<parameter=p>"),
        *(
            "</parameter>",
            f"<{D}tool_calls>",
            f"</{D}tool_calls>",
            f'<{D}invoke name="f">',
            f"</{D}invoke>",
            D,
        ),
    ]
)


@st.composite
def broken_calls(draw: st.DrawFn) -> str:
    """A call of any format with something cut out, put in, or doubled."""
    text = draw(st.sampled_from(sorted(CALLS.values())))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        kept = text[:start] + draw(FRAGMENTS | st.text(max_size=3) | st.just(text[start:end] * 2))
        text = kept + text[end:]
    return text


TEXTS = st.lists(FRAGMENTS | broken_calls() | st.text(max_size=5), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 10**6), max_size=12)


def check_any_split(text: str, cuts: list[int], name: str | None, inside: bool) -> None:
    whole = read([text], name, in_reasoning=inside)
    assert read(split(text, cuts), name, in_reasoning=inside) == whole
    assert read(text, name, in_reasoning=inside) == whole


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS, CUTS, st.sampled_from([*FORMATS, None]), st.booleans())
def test_any_split_reads_as_the_whole(text: str, cuts: list[int], name: str | None, inside: bool) -> None:
    check_any_split(text, cuts, name, inside)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, derandomize=True)
@given(TEXTS, CUTS, st.sampled_from([*FORMATS, None]), st.booleans())
def test_any_split_reads_as_the_whole_at_length(
    text: str, cuts: list[int], name: str | None, inside: bool
) -> None:
    check_any_split(text, cuts, name, inside)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from(FORMATS))
def test_nothing_but_markers_and_space_around_them_is_lost(text: str, name: str) -> None:
    parts = read([text], name)
    if not any(isinstance(part, ToolCall) for part in parts):
        said = "".join(part.text for part in parts if not isinstance(part, ToolCall))
        assert strip(said) == strip(text)


def strip(text: str) -> str:
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_of_a_whole_answer(name: str, step: int) -> None:
    text = f"<think>\nhm\n</think>\n\nI look.\n\n{CALLS[name]}"
    expected = [Reasoning("hm"), Content("I look."), EXPECTED]
    for first in range(len(text)):
        for second in range(first, min(first + 40, len(text)), step):
            assert read([text[:first], text[first:second], text[second:]], name) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_call_ends_as_json_and_loses_no_word(name: str) -> None:
    text = CALLS[name]
    begun = text.index("weather") + len("weather")
    for end in range(len(TOOL_FORMATS[name].opening), len(text)):
        parts = read([text[:end]], name)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if not calls:
            assert parts == [Content(text[:end])]
            continue
        assert end > begun
        assert all(
            EXPECTED_VALUES[key].startswith(str(value).rstrip("\n<"))
            for key, value in json.loads(calls[0].arguments).items()
        )
        said = "".join(part.text for part in parts if isinstance(part, Content))
        for word in ("Köln", "2"):
            assert (word in text[:end]) == (word in calls[0].arguments + said)


@pytest.mark.parametrize(
    ("pushes", "parts"),
    [
        (["Hello", " world", " "], [[Content("Hello")], [Content(" world")], []]),
        (["\n", "x"], [[], [Content("\nx")]]),
        (["<th", "ink>", "a", "\n", "b"], [[], [], [Reasoning("a")], [], [Reasoning("\nb")]]),
        (["<think>a</thi", "nk>b"], [[Reasoning("a")], [Content("b")]]),
        (["<think>a</think>b"], [[Reasoning("a"), Content("b")]]),
        (["<thx"], [[Content("<thx")]]),
        (["b <", "x"], [[Content("b")], [Content(" <x")]]),
        (["b <to", "ol_call>", "{"], [[Content("b")], [], []]),
        ([HERMES, HERMES[:-14], "}"], [[EXPECTED], [], [EXPECTED]]),
        (["<tool_call>x</tool_call>"], [[Content("<tool_call>"), Content("x</tool_call>")]]),
    ],
)
def test_what_is_certain_is_said_at_once(pushes: list[str], parts: list[list[Part]]) -> None:
    parser = OutputParser(reasoning=True, tools=TOOL_FORMATS["hermes"], schemas=SCHEMAS)
    assert [parser.push(piece) for piece in pushes] == parts


@pytest.mark.parametrize("name", FORMATS)
def test_space_at_the_end_is_kept_unless_a_call_has_just_ended(name: str) -> None:
    assert read([" \n"], name) == [Content(" \n")]
    assert read(["b \n"], name) == [Content("b \n")]
    assert read([f"{CALLS[name]} and \n"], name) == [EXPECTED, Content(" and \n")]
    assert read([f"{CALLS[name]} \n"], name) == [EXPECTED]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_without_schemas(name: str) -> None:
    (call,) = OutputParser(tools=TOOL_FORMATS[name]).push(CALLS[name])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments)["city"] == "Köln"


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_and_text_between(name: str) -> None:
    call = CALLS[name]
    assert read([f"{call}\n{call}\n"], name) == [EXPECTED, EXPECTED]
    assert read([f"{call} and {call}"], name) == [EXPECTED, Content(" and"), EXPECTED]
    assert read([f"{call}\n{call}"], name, max_calls=1) == [EXPECTED]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "deepseek_v4", "kimi_k2"])
def test_several_calls_in_one_block(name: str) -> None:
    form = TOOL_FORMATS[name]
    body = CALLS[name].removeprefix(form.opening).removesuffix(form.closing)
    assert read([f"{form.opening}{body}{body}{form.closing}"], name) == [EXPECTED, EXPECTED]
    assert read([*f"{form.opening}{body}{body}{form.closing}"], name) == [EXPECTED, EXPECTED]


@pytest.mark.parametrize(
    "body",
    [
        *(
            "",
            "{",
            "[1]",
            "3",
            '{"name": 3, "arguments": {}}',
            '{"name": "", "arguments": {}}',
            '{"arguments": {}}',
        ),
        *('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"a": NaN}}', "[" * 100_000),
        *('{"name": "f", "arguments": "{"}', '{"name": "f", "arguments": {"a": "\\ud800"}}', "{'name': 'f'}"),
        *("<function=f>", "<function=></function>", "<parameter=a>1</parameter>"),
        *(
            "<function=f><parameter=a>1</function>",
            f"<{D}invoke name=f></{D}invoke>",
            f'<{D}invoke name="f">',
        ),
        f'<{D}invoke name="f"><{D}parameter name="a" string="maybe">1</{D}parameter></{D}invoke>',
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_malformed_is_text(name: str, body: str) -> None:
    form = TOOL_FORMATS[name]
    text = f"x {form.opening}{body}{form.closing} y"
    assert read([text], name) == [Content(text)]


OPEN, CLOSE = TOOL_FORMATS["kimi_k2"].opening, TOOL_FORMATS["kimi_k2"].closing


def kimi(head: str, arguments: str = '{"days": 1}', end: str = "<|tool_call_end|>") -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}{end}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{OPEN}{kimi('functions.weather:3')}{CLOSE}", ["functions.weather:3"]),
        (f"a{OPEN}\n{kimi(' weather:12 ', ' {} ')}\n{CLOSE}", [Content("a"), "functions.weather:12"]),  # no prefix
        (f"{OPEN}{kimi('functions.weather')}{CLOSE}", [""]),  # nor a number
        (f"{OPEN}{kimi('functions.weather:0') * 3}{CLOSE}", ["functions.weather:0", "", ""]),
        (
            f"{OPEN}{kimi('functions.weather:0')}{CLOSE}b{OPEN}{kimi('functions.other:1')}{CLOSE}c",
            ["functions.weather:0", Content("b"), "functions.other:1", Content("c")],
        ),
        (f"<think>a{OPEN}{kimi('functions.weather:0')}{CLOSE}b</think>c",
         [Reasoning("a"), "functions.weather:0", Reasoning("b"), Content("c")]),
        (f"{OPEN}{kimi('functions.weather:0', end='')}{CLOSE}a", ["functions.weather:0", Content("a")]),
        (f"{OPEN}{kimi('functions.weather:0')}", ["functions.weather:0"]),
        (f"{kimi('functions.weather:0')}{CLOSE}", ["functions.weather:0"]),
        *((text, [Content(text)]) for text in (
            f"{OPEN}{kimi('functions.other:0', '[1]')}{CLOSE}", f"{OPEN}{kimi('functions.weather:0', '3')}{CLOSE}",
        )),
        (f"<think>{OPEN}{kimi('functions.other:0')}", [Reasoning(f"{OPEN}{kimi('functions.other:0')}")]),
    ],
)  # fmt: skip
def test_calls_that_models_name_by_ids(text: str, found: list[object]) -> None:
    for pieces in ([text], [*text]):
        parser = OutputParser(reasoning=True, tools=TOOL_FORMATS["kimi_k2"], schemas=SCHEMAS)
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
        calls = [part.id if isinstance(part, ToolCall) else part for part in parts]
        joined: list[object] = []
        for kind, group in itertools.groupby(calls, type):
            same = list(group)
            joined += same if kind is str else [kind("".join(part.text for part in same))]  # type: ignore[union-attr]
        assert joined == found


def test_arguments_written_as_a_string_of_json() -> None:
    text = '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>'
    assert read([text], "hermes") == [ToolCall("weather", '{"days": 1}')]
    assert read(['<tool_call>{"name": "weather"}</tool_call>'], "hermes") == [ToolCall("weather", "{}")]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "7", "7"),
        ("city", "\n x \n", "\n x \n"),
        ("days", " 7 ", 7),
        ("days", "seven", "seven"),
        ("days", "7.5", "7.5"),
        ("scale", "1.5", 1.5),
        ("scale", "2", 2),
        ("scale", "null", None),
        ("wet", "True", True),
        ("wet", "perhaps", "perhaps"),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "[1, 2]", [1, 2]),
        ("where", "3", "3"),
        ("any", "3", "3"),
        ("unknown", "<b>3</b>", "<b>3</b>"),
    ],
)
def test_xml_values_have_the_type_of_the_schema(key: str, written: str, value: object) -> None:
    text = f"<tool_call><function=weather><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    (call,) = read([text], "qwen3_xml")
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>a</think>b", False, [Reasoning("a"), Content("b")]),
        ("\n<think>\na\n</think>\n\nb\n", False, [Reasoning("a"), Content("b\n")]),
        ("a</think>\n\nb", True, [Reasoning("a"), Content("b")]),
        ("<think>a", False, [Reasoning("a")]),
        ("a\n</thi", True, [Reasoning("a\n</thi")]),
        ("b <think>c</think>", False, [Content("b <think>c</think>")]),
        ("<think>\n\n</think>\n\nb", False, [Content("b")]),
        ("<thin", False, [Content("<thin")]),
        ("", False, []),
    ],
)
def test_reasoning(text: str, inside: bool, parts: list[Part]) -> None:
    assert read([text], None, in_reasoning=inside) == parts


def test_without_formats_text_passes_untouched() -> None:
    parser = OutputParser()
    assert parser.push("<think>" + HERMES) == [Content("<think>" + HERMES)]
    assert parser.flush() == []


def test_a_long_call_is_read_in_linear_time() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' + "x" * 400_000 + '"}}</tool_call>'
    (call,) = read(split(text, range(0, len(text), 3)), "hermes")
    assert isinstance(call, ToolCall)
    assert len(call.arguments) > 400_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "\n" * 60_000),
        ("hermes", "{\n" * 20_000),
        ("hermes", '<tool_call>{"name": "weather"' * 3000),
        ("qwen3_xml", "<function=weather>" * 5000),
        ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\n" + "</parameter>\n" * 6000),
        ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=where>\n" + "1, " * 40_000),
        ("mistral", "[TOOL_CALLS][" * 5000),
    ],
    ids=range(7),
)
def test_no_text_takes_more_than_a_look_at_each_piece(name: str, text: str) -> None:
    """What is held back is not searched again with each piece: 100,000 line breaks took 50 s."""
    began = time.thread_time()
    read(split(text, range(0, len(text), 3)), name)
    assert time.thread_time() - began < 20


def test_defaults_by_model_type() -> None:
    assert default_formats("qwen3") == ("hermes", "qwen3")
    assert default_formats("qwen3_5_text") == ("qwen3_xml", "qwen3")
    assert default_formats("deepseek_v4") == ("deepseek_v4", "deepseek_v4")
    assert default_formats("deepseek_v32") == ("deepseek_v32", "deepseek_v4")
    exp = "{{ tool['function']['name'] + '<｜tool▁sep｜>' }}</think>"
    assert default_formats("deepseek_v32", (exp,)) == ("deepseek_v31", "qwen3")
    assert default_formats("llama") == (None, None)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if tools %}<tool_call>{% endif %}", ("hermes", None)),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}<think></think>", ("qwen3_xml", "qwen3")),
        ("{% if tools %}[TOOL_CALLS] [{{ c }}]{% endif %}", ("mistral", None)),
        (
            "{{ tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}</think>",
            ("deepseek_v3", "qwen3"),
        ),
        ("{{ tool['function']['name'] + '<｜tool▁sep｜>' }}</think>", ("deepseek_v31", "qwen3")),
        ("{% if tools %}<|im_system|>tool_declare<|im_middle|>{% endif %}", ("kimi_k2", None)),
        ("{% if tools %}[TOOL_CALLS]{{ n }}[ARGS]{{ a }}{% endif %}", ("mistral_args", None)),
        ('{% if tools %}{"name": "{{ n }}", "parameters": {{ a }}}{% endif %}', ("llama3_json", None)),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", ("pythonic", None)),
        ("{% if tools %}<tool_call>{{ n }}<arg_key>{{ k }}</arg_key>{% endif %}", ("glm47", None)),
        (
            "{% if tools %}<tool_call>{{ n }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{% endif %}",
            ("glm45", None),
        ),
        ("{{ messages }}", (None, None)),
    ],
)
def test_formats_are_found_in_templates(template: str, found: tuple[str | None, str | None]) -> None:
    assert default_formats("llama", (template, None)) == found
    assert default_formats("qwen3", (template,)) == (
        found[0] if found[0] == "qwen3_xml" else "hermes",
        "qwen3",
    )
    assert default_formats("deepseek_v4", (template,)) == ("deepseek_v4", "deepseek_v4")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"days": 2}}', [{"days": 2}]),
        ("llama3_json", '{"name": "weather", "parameters": {"days": 2.0}}', [{"days": 2}]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {"days": 1}}',
            [{}, {"days": 1}],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "[{]"}, "id": "a1"}, {"name": "weather"}]',
            [{"city": "[{]"}, {}],
        ),
        ("mistral", '[TOOL_CALLS][{"name": "other", "arguments": {"a": 1}}]', [{"a": 1}]),
        (
            "mistral_args",
            '[TOOL_CALLS]weather[ARGS]{"days": 2}[TOOL_CALLS]weather[ARGS]{}',
            [{"days": 2}, {}],
        ),
        (
            "pythonic",
            "[weather(city='a, (b\\'', days=2.0, wet=True), weather()]",
            [{"city": "a, (b'", "days": 2, "wet": True}, {}],
        ),
        (
            "pythonic",
            '[weather(any={"x": [null, 1]}, wet=false, ),]',
            [{"any": {"x": [None, 1]}, "wet": False}],
        ),
        ("pythonic", "<|python_start|>[other.tool(a=-1)]", [{"a": -1}]),
    ],
)
def test_formats_of_other_models(name: str, text: str, calls: list[object]) -> None:
    assert read([text], name) == read(text, name)
    assert [json.loads(part.arguments) for part in read([text], name) if isinstance(part, ToolCall)] == calls
    assert all(isinstance(part, ToolCall) for part in read([text], name))


def test_what_is_no_list_of_calls_stays_text() -> None:
    for text in ("[1] a source", "x = [weather(days=1)]", "[weather(1)]", "[other(a=1)]", "[weather(days=one)]", "[]",
                 "[weather(days=1", "[weather(days=1) or more]", "[weather(city='a)]",
                 "[weather(days=1, days=2)]"):  # fmt: skip
        assert read([text], "pythonic") == read(text, "pythonic") == [Content(text)]
