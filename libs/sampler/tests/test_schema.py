"""Schemas as SDKs write them: what is kept, what is an annotation, what is refused by name."""

import datetime
import json
import re

import pytest

from openinfer.sampler import InvalidGrammar
from openinfer.sampler.grammar import Compiler, Grammar
from openinfer.sampler.schema import FORMATS, ascii_pattern, prepared, whole_pattern, wishes

EOS = 0
TOKENS = [b"<eos>", *(bytes([i]) for i in range(256))]


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler(TOKENS, [EOS], [EOS])
    yield compiler
    compiler.close()


def fits(compiler, schema, value):
    matcher = compiler.compile(Grammar.of_schema(schema))
    for byte in (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode():
        if not matcher.allowed()[1 + byte]:
            return False
        matcher.accept(1 + byte)
    return matcher.may_end


def text(value):
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": r"^\d{2}$"}, ["12"], ["١٢", "1"]),
        ({"pattern": r"^\w\s\w$"}, ["a b", "_ 9"], ["ä b", "a\u00a0b", "a\u2003b"]),
        ({"pattern": r"^[\d\-]\S\D$"}, ["-ab", "1\u00a0٣"], ["٣ab", "- b", "1a1"]),
        ({"format": "path"}, ["x", "/etc"], []),
        ({"format": ["date"]}, ["x"], []),
        ({"format": "date"}, ["2026-11-22"], ["2026-13-01", "soon"]),
        ({"format": "password", "maxLength": 2}, ["ab"], ["abc"]),
    ],
    ids=str,
)
def test_texts(compiler, schema, good, bad):
    schema = {"type": "string", **schema}
    assert all(fits(compiler, schema, text(one)) for one in good)
    assert not any(fits(compiler, schema, text(one)) for one in bad)


@pytest.mark.parametrize(
    ("names", "others", "good", "bad"),
    [
        ({"type": "string"}, {"type": "integer"}, [{}, {"a": 1, "ä": 2}], [{"a": "x"}]),
        (True, True, [{"a": "x"}], []),
        ({"pattern": r"^\d+$"}, {"type": "integer"}, [{"12": 1}], [{"a": 1}, {"12": "x"}, {"١": 1}]),
        ({"enum": ["a.b", "c"]}, {"type": "integer"}, [{"a.b": 1}, {"c": 2}], [{"axb": 1}, {"d": 1}]),
        ({"$ref": "#/$defs/name"}, {"type": "integer"}, [{"c": 2}], [{"d": 1}]),
        ({"const": "c", "title": "C"}, {"type": "integer"}, [{"c": 2}], [{"d": 1}]),
        ({"minLength": 2, "maxLength": 3}, {"type": "integer"}, [{"ab": 2}], [{"d": 1}, {"defg": 1}]),
        ({"format": "date"}, {"type": "integer"}, [{"2026-11-22": 1}], []),
    ],
    ids=str,
)
def test_property_names(compiler, names, others, good, bad):
    schema = {"type": "object", "propertyNames": names, "additionalProperties": others}
    schema["$defs"] = {"name": {"enum": ["c"], "type": "string"}}
    assert all(fits(compiler, schema, one) for one in good)
    assert not any(fits(compiler, schema, one) for one in bad)


def test_lists_without_repetition(compiler):
    few = {"type": "array", "items": {"enum": [1, "b", None]}, "uniqueItems": True, "minItems": 1}
    for good in ([1], ["b", 1], [None, 1, "b"]):
        assert fits(compiler, few, good)
    for bad in ([], [1, 1], [1, "b", None, 1], [2]):
        assert not fits(compiler, few, bad)
    inner = {"type": "object", "properties": {"x": few}, "required": ["x"], "additionalProperties": False}
    assert fits(compiler, inner, {"x": [1, "b"]})
    assert not fits(compiler, inner, {"x": [1, 1]})
    assert [*wishes(inner)] == []
    many = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert fits(compiler, many, [1, 2])
    assert [*wishes({"anyOf": [many, {"type": "null"}]})] == ["uniqueItems"]
    with pytest.raises(InvalidGrammar, match="there are 3 values"):
        Grammar.of_schema({**few, "minItems": 4})


def test_wishes_are_told_wherever_they_are():
    named = {"type": "object", "propertyNames": {"format": "date"}}
    schema = {"$defs": {"a": named}, "properties": {"uniqueItems": {"type": "array", "items": named}}}
    assert [*wishes(schema)] == ["format of propertyNames"] * 2
    assert [*wishes({"properties": {"uniqueItems": {"const": True}}})] == []


@pytest.mark.parametrize("pattern", ["^(?=a)b$", "(?!a)b", "(?<=a)b", "(?<!a)b", r"\bfoo", r"a\B"])
def test_look_around_is_refused(pattern):
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {}}},
        {"anyOf": [{"type": "array", "items": {"pattern": pattern}}]},
    ):
        with pytest.raises(InvalidGrammar, match="looks around"):
            Grammar.of_schema(schema)


def test_what_merely_looks_like_it_is_not():
    for pattern in (r"^\(?=$", "[(?=]", r"[\b]", "(?:a)", "(?P<n>a)", "(?i)a"):
        assert ascii_pattern(pattern) == pattern


def test_values_are_no_schemas():
    schema = {"enum": [{"format": "path", "pattern": "(?=a)"}], "default": {"uniqueItems": True}}
    assert prepared(schema) == schema
    assert prepared({"properties": {"format": {"type": "string"}}}) == {
        "properties": {"format": {"type": "string"}}
    }


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("ab", ["ab", "xabx"], ["a"]),
        ("^a|b$", ["ax", "xb"], ["xa"]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        ("^(a|b)$", ["a", "b"], ["ab"]),
        ("[|^$]$", ["x|"], ["x"]),
        (r"\$$", ["x$"], ["x"]),
        (r"^a/[/\d]$", ["a//", "a/1"], ["a/x"]),
    ],
)
def test_whole_patterns(pattern, good, bad):
    expression = re.compile(whole_pattern(pattern).replace("(?s:", "(?s:").replace(r"\x2F", "/"))
    assert all(expression.fullmatch(one) for one in good)
    assert not any(expression.fullmatch(one) for one in bad)
    assert "/" not in whole_pattern(pattern)


def test_anchors_within_are_refused():
    for pattern in ("(?:^a)", "a^b", "(a$)"):
        with pytest.raises(InvalidGrammar, match="within"):
            whole_pattern(pattern)


def test_formats_say_what_they_should():
    now = datetime.datetime(2026, 11, 22, 13, 5, tzinfo=datetime.UTC)
    samples = {
        "date": [now.date().isoformat()],
        "date-time": [now.isoformat(), "2026-11-22T13:05:00.25Z"],
        "time": [now.timetz().isoformat(), "23:59:59Z"],
        "duration": ["P1D", "PT5M", "P2W", "P1Y2M3DT4H"],
        "email": ["a.b@c.de"],
        "hostname": ["a-b.example"],
        "ipv4": ["127.0.0.1", "255.255.255.255"],
        "ipv6": ["0:0:0:0:0:0:0:1"],
        "uri": ["http://127.0.0.1:8000/x?y=1#z"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    }
    assert samples.keys() == FORMATS.keys()
    for name, good in samples.items():
        assert all(re.fullmatch(FORMATS[name], one) for one in good), name
        assert not re.fullmatch(FORMATS[name], "no, really"), name
