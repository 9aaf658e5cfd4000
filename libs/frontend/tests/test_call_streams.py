"""Calls as they are written: what is told adds up to the whole call, however the text is cut."""

import json
import random
from typing import Any

import pytest

from openinfer.frontend.chat import TOOL_FORMATS, Arguments, Content, OutputParser, Part, ToolCall

SCHEMAS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "integer"},
            "tags": {"type": "array"},
            "mode": {"type": ["string", "null"]},
        },
    },
    "now": None,
}
ARGUMENTS: dict[str, Any] = {
    "path": 'a "b" \\ c.py',
    "text": "\nline 1\n\n</para> 日本 {[\n",
    "lines": 3,
    "tags": ["x", {"y": "}"}],
    "mode": None,
}
JSON = json.dumps({"name": "write", "arguments": ARGUMENTS}, ensure_ascii=False)
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"
QWEN = (
    "<tool_call>\n<function=write>\n"
    + "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in ARGUMENTS.items()
    )
    + "</function>\n</tool_call>"
)
DSML = "｜DSML｜"
DEEPSEEK = (
    f'<{DSML}tool_calls>\n<{DSML}invoke name="write">\n'
    + "".join(
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{DSML}parameter>\n"
        for name, value in ARGUMENTS.items()
    )
    + f'</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}tool_calls>'
)
GLM = "".join(
    f"<arg_key>{name}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
    for name, value in ARGUMENTS.items()
)
GLM = f"<tool_call>write\n{GLM}</tool_call>"
TEXTS = {"hermes": HERMES, "qwen3_xml": QWEN, "deepseek_v4": DEEPSEEK, "glm45": GLM}


def read(name: str, pieces: list[str], **options: Any) -> list[Part]:
    parser = OutputParser(tools=TOOL_FORMATS[name], schemas=SCHEMAS, streams=True, **options)
    return [part for piece in pieces for part in parser.push(piece)] + parser.flush()


def joined(parts: list[Part]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append((part.name, part.arguments))
        elif isinstance(part, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return calls


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(1, len(text)), rng.randrange(0, 40)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_told_adds_up_to_the_call(name: str) -> None:
    rng = random.Random(name)
    for number in range(200):
        pieces = [*TEXTS[name]] if number == 0 else cuts(TEXTS[name], rng)
        calls = joined(read(name, pieces))
        assert calls[0][0] == "write"
        assert json.loads(calls[0][1]) == ARGUMENTS, pieces
        assert calls[1:] == ([("now", "{}")] if name == "deepseek_v4" else [])
    whole = OutputParser(tools=TOOL_FORMATS[name], schemas=SCHEMAS).push(TEXTS[name])
    assert next(json.loads(part.arguments) for part in whole if isinstance(part, ToolCall)) == ARGUMENTS


@pytest.mark.parametrize("name", TEXTS)
def test_arguments_come_before_the_call_is_over(name: str) -> None:
    half = TEXTS[name].index("line 1") + 6
    parser = OutputParser(tools=TOOL_FORMATS[name], schemas=SCHEMAS, streams=True)
    ((_, arguments),) = joined(parser.push(TEXTS[name][:half]))
    assert arguments.endswith("line 1")


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_that_is_cut_off_ends_as_json(name: str) -> None:
    half = TEXTS[name].index("line 1") + 6
    parts = read(name, [TEXTS[name][:half]])
    assert json.loads(joined(parts)[0][1])["text"].endswith("line 1")
    assert not any(isinstance(part, Content) for part in parts)


def test_what_is_no_call_is_content_as_ever() -> None:
    for text in (
        "<tool_call>\nnonsense\n</tool_call>",
        '<tool_call>\n{"name": "other", "arg',
        "<tool_call>{}",
    ):
        assert (
            read("hermes", [*text]) == [Content(text)]
            or "".join(part.text for part in read("hermes", [*text]) if isinstance(part, Content)) == text
        )
    unknown = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    assert joined(read("hermes", [*unknown])) == [("other", "{}")]  # whole, as it is not on offer


def test_calls_beyond_the_limit_are_dropped() -> None:
    two = f"{HERMES}\n{HERMES}"
    assert len(joined(read("hermes", [*two], max_calls=1))) == 1
    assert len(joined(read("deepseek_v4", [*DEEPSEEK], max_calls=1))) == 1
    assert len(joined(read("hermes", [*two]))) == 2
