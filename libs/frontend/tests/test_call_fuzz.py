"""Calls that went wrong, in every format: something is deleted, doubled, cut off, put in or quoted.

Whatever came of it: arguments are JSON objects, streamed is what is not streamed, however the text is cut, and no word
that the model wrote is lost.
"""

import json
import random
import re
from typing import Any

import pytest

from openinfer.frontend.chat import TOOL_FORMATS, Arguments, Content, OutputParser, Part, Reasoning, ToolCall
from openinfer.frontend.chat.formats import JsonFormat, PythonFormat, TagFormat

SCHEMAS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
            "free": {},
        },
    },
    "run": {"type": "object", "properties": {"command": {"type": "string"}, "quiet": {"type": "boolean"}}},
    "now": None,
}
OTHERS = {"elsewhere": {"type": "object", "properties": {"text": {"type": "string"}}}}
NAMES = sorted(TOOL_FORMATS)


class Writer:
    """Random text in one format, of words that occur once."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.form, self.rng, self.words = TOOL_FORMATS[name], rng, 0

    def word(self) -> str:
        self.words += 1
        return f"w{self.words}w"

    def prose(self) -> str:
        ends = ("", " ", "\n", ": ", "\n\n", " <", " {", '"', " </", "`")
        return "".join(self.word() + self.rng.choice(ends) for _ in range(self.rng.randrange(3)))

    def value(self, schema: dict[str, Any]) -> object:
        match schema.get("type"):
            case "integer":
                return self.rng.choice([0, 7, -3, 5.0])
            case "boolean":
                return self.rng.random() < 0.5
            case "array":
                return [self.word() for _ in range(self.rng.randrange(3))]
            case "object":
                return {self.word(): self.rng.choice([None, True, 1.5, self.word()])}
        return (
            self.rng.choice(["", "\n", " "])
            + self.prose()
            + self.rng.choice(["", self.quote(), "\n"])
            + self.prose()
        )

    def quote(self) -> str:
        form = self.form
        marks = [form.opening, form.closing, "</think>", "<think>", '{"name": "write"', "\\u00e9", "日本"]
        if isinstance(form, JsonFormat) and form.end_call:
            marks += [form.start, form.call.partition("}")[2], form.end_call]
        if isinstance(form, TagFormat):
            marks += [
                form.end_parameter,
                form.end_call,
                form.call.replace("{name}", "write"),
                f"\n{form.end_parameter}\n",
            ]
            marks += [
                form.parameter.replace("{name}", "path").replace("{text}", "true"),
                f"\n{form.end_call}",
            ]
        return self.rng.choice(marks)

    def call(self) -> str:
        form, rng = self.form, self.rng
        name = rng.choice(["write", "write", "run", "now", "elsewhere"])
        properties = ({**SCHEMAS, **OTHERS}[name] or {}).get("properties", {})
        chosen = [key for key in properties if rng.random() < 0.7]
        values = {key: self.value(properties[key]) for key in chosen}
        if isinstance(form, JsonFormat):
            head = form.call.replace(
                "{id}", rng.choice(["functions.{name}:7", "{name}:0", "functions.{name}"])
            )
            head = head.replace("{name}", json.dumps(name) if form.wrapped else name)
            end = form.end_call or "}" * form.wrapped
            body = f"{head}{json.dumps(values, ensure_ascii=rng.random() < 0.5)}{end}"
            return f"{form.opening}{form.line}{'[' * form.listed}{body}{']' * form.listed}{form.line}{form.closing}"
        if isinstance(form, PythonFormat):
            texts = [f"{key}={rng.choice([json.dumps, repr])(value)}" for key, value in values.items()]
            return f"{rng.choice(['', form.opening])}[{name}({', '.join(texts)})]"
        written = ""
        for key, value in values.items():
            text = value if isinstance(value, str) else rng.choice([json.dumps(value), str(value)])
            flag = "true" if isinstance(value, str) else "false"
            tag = form.parameter.replace("{name}", key).replace("{text}", flag)
            written += f"{tag}{form.pad}{text}{form.pad}{form.end_parameter}\n"
        call = form.call.replace("{name}", name)
        return f"{form.opening}\n{call}\n{written}{form.end_call}\n{form.closing}"

    def answer(self) -> str:
        pieces = [self.prose(), self.call(), self.rng.choice(["", "\n", self.prose()])]
        if self.rng.random() < 0.4:
            pieces += [self.call(), self.prose()]
        if self.rng.random() < 0.4:
            at = self.rng.randrange(len(pieces))
            pieces[at:at] = [self.rng.choice(["</think>", "\n</think>\n\n", "<think>"])]
        return "".join(pieces)

    def mutated(self, text: str) -> str:
        rng = self.rng
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            start = rng.randrange(len(text) + 1)
            end = min(len(text), start + rng.choice([1, 2, 5, 12, 30]))
            marks = [found.span() for found in re.finditer(r"</?[^<>]{2,60}>|[{}\"\[\],:]", text)]
            if marks and rng.random() < 0.6:
                start, end = rng.choice(marks)
            match rng.randrange(5):
                case 0:
                    text = text[:start] + text[end:]
                case 1:
                    text = text[:end] + text[start:end] + text[end:]
                case 2:
                    text = text[:end]
                case 3:
                    text = text[:start] + self.quote() + text[start:]
                case _:
                    text = text[:start] + self.call()[: rng.randrange(80)] + text[start:]
        return text


def joined(parts: list[Part]) -> list[tuple[str, ...]]:
    """The parts with neighbours of a kind as one, and calls whole."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        kind = type(part).__name__
        if isinstance(part, ToolCall):
            found.append((kind, part.name, part.arguments))
        elif isinstance(part, Arguments):
            kind, name, arguments = found.pop()
            assert kind == "ToolCall"
            found.append((kind, name, arguments + part.text))
        elif found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + part.text)
        else:
            found.append((kind, part.text))
    return found


def read(name: str, pieces: list[str], streams: bool, inside: bool) -> list[tuple[str, ...]]:
    form = TOOL_FORMATS[name]
    parser = OutputParser(tools=form, schemas=SCHEMAS, reasoning=True, in_reasoning=inside, streams=streams)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    assert not any(part.text == "" for part in parts if isinstance(part, Content | Reasoning))
    assert streams or not any(isinstance(part, Arguments) for part in parts)
    return joined(parts)


def check(number: int) -> None:
    rng = random.Random(number)
    name = rng.choice(NAMES)
    writer = Writer(name, rng)
    text, inside = writer.mutated(writer.answer()), rng.random() < 0.3
    whole = read(name, [text], False, inside)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for ways in ([*text], pieces, [text]):
        assert read(name, ways, True, inside) == whole, (name, text)
    assert read(name, pieces, False, inside) == whole, (name, text)
    for part in whole:
        if part[0] == "ToolCall":
            assert isinstance(json.loads(part[2]), dict), (name, text, part)
    said = "\n".join("\n".join(part[1:]) for part in whole)
    for word in re.findall(r"w\d+w", text):
        assert word in said, (name, word, text, whole)


@pytest.mark.parametrize("first", range(0, 800, 200))
def test_calls_that_went_wrong_are_read_alike_and_whole(first: int) -> None:
    for number in range(first, first + 200):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200_000, 10_000))
def test_many_calls_that_went_wrong_are_read_alike_and_whole(first: int) -> None:
    for number in range(first, first + 10_000):
        check(number)
