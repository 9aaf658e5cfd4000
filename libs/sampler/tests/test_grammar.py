"""Grammars: what is accepted and refused; and 200 schemas that a model of random logits has to keep to."""

import gc
import json
import random
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tokenizers

from openinfer.sampler import (
    GrammarFailed,
    InvalidGrammar,
    MissingExtra,
    SamplingParams,
    sample_arrays,
    seed_words,
)
from openinfer.sampler.gpu import Adjustment, sample
from openinfer.sampler.grammar import REFUSED_BYTES, Compiler, Grammar

EOS, PAD = 0, 1


def make_tokens():
    """Two specials, every byte, and pieces of several bytes, across the borders of JSON's own."""
    rng = random.Random(1)
    pieces = {
        '"',
        '":',
        '", "',
        '{"',
        '"}',
        "}]",
        "true",
        "false",
        "null",
        "ab",
        "é",
        "日",
        "\\n",
        "-1",
        "e+",
        ".5",
    }
    while len(pieces) < 600:
        pieces.add("".join(rng.choices('abcdefghij 0123456789",:{}[]é日-', k=rng.randint(2, 6))))
    texts = sorted(pieces - {'"'})
    return [b"<eos>", b"<pad>", *(bytes([i]) for i in range(256)), *(text.encode() for text in texts)]


TOKENS = make_tokens()
VOCABULARY = len(TOKENS) + 37  # as models do, more than there are tokens


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler(TOKENS, [EOS, PAD], [EOS], vocabulary=VOCABULARY)
    yield compiler
    compiler.close()


def byte(text):
    return TOKENS.index(text.encode())


def allowed(matcher):
    return {TOKENS[i].decode("utf-8", "replace") for i in np.flatnonzero(matcher.allowed())}


def feed(matcher, text):
    for one in text.encode():
        matcher.accept(2 + one)


# -- what a grammar says --


def test_a_choice_offers_the_pieces_of_its_strings_and_then_the_end(compiler):
    matcher = compiler.compile(Grammar("choice", json.dumps(['ab"\\', "abé", "b\n"])))
    assert allowed(matcher) == {"a", "ab", "b"}
    feed(matcher, "ab")
    assert not matcher.may_end
    assert {'"', "é"} <= allowed(matcher) <= {'"', "é", "\ufffd"}
    matcher.accept(byte("é"))
    assert matcher.may_end
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]


def test_a_regex_is_of_the_whole_output(compiler):
    matcher = compiler.compile(Grammar("regex", "a+b?"))
    feed(matcher, "aa")
    assert allowed(matcher) == {"a", "b", "ab", "<eos>"}
    matcher.accept(EOS)
    assert matcher.may_end


def test_lark_and_any_json_object(compiler):
    matcher = compiler.compile(Grammar("lark", 'start: "a" pair*\npair: "1" | "2" "3"'))
    feed(matcher, "a2")
    assert allowed(matcher) == {"3"} | {t for t in allowed(matcher) if t.startswith("3")}
    matcher = compiler.compile(Grammar("json_object"))
    assert "{" in allowed(matcher)
    assert "[" not in allowed(matcher)
    feed(matcher, '{"a": [1, {"b": null}]}')
    assert matcher.may_end


def test_whitespace_in_json_is_bounded(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    feed(matcher, "{" + " " * 23)
    assert {" ", '"', "}"} <= allowed(matcher)
    feed(matcher, "\n")
    assert '"' in allowed(matcher)
    assert not {" ", "\n"} & allowed(matcher)


def test_forced_text_is_cut_as_the_tokenizer_cuts_it(byte_tokenizer):
    """Longest-first would take pro, mp, t: a cut that the model has never seen."""
    definition = byte_tokenizer(["<eos>", "<pad>"], ["p r", "pr o", "p t", "m p"])
    bytewise, pieces = [bytes([i]) for i in range(256)], [b"pr", b"pro", b"pt", b"mp"]
    own = tokenizers.Tokenizer.from_str(definition).encode("prompt").ids
    assert own == [259, 2 + ord("m"), 260]
    compiler = Compiler([b"<eos>", b"<pad>", *bytewise, *pieces], [0, 1], [0], tokenizer=definition)
    matcher = compiler.compile(Grammar("choice", '["prompt"]'))
    assert matcher.forced() == own
    for token in own:
        assert np.flatnonzero(matcher.allowed()).tolist() == [token]
        matcher.accept(token)
    compiler.close()


@pytest.mark.parametrize("tokenizer", ["", "{}"])
def test_without_a_tokenizer_no_cut_is_guessed(tokenizer):
    """The model may write forced text in any of its tokens. A tokenizer that cannot be read is none."""
    pieces = [b"name", b"na", b'":', b"caf\xc3\xa9"]
    bytewise = [bytes([i]) for i in range(256)]
    compiler = Compiler([b"<eos>", b"<pad>", *bytewise, *pieces], [0, 1], [0], tokenizer=tokenizer)
    for grammar in (
        Grammar("choice", '["name"]'),
        Grammar("regex", "name"),
        Grammar("lark", 'start: "name"'),
    ):
        matcher = compiler.compile(grammar)
        assert matcher.forced() == []
        assert set(np.flatnonzero(matcher.allowed())) == {2 + ord("n"), 258, 259}
    compiler.close()


def test_matchers_of_one_grammar_are_independent(compiler):
    first, second = (compiler.compile(Grammar("regex", "ab")) for _ in range(2))
    feed(first, "ab")
    assert (first.may_end, second.may_end) == (True, False)
    assert allowed(second) == {"a", "ab"}


def test_a_token_against_the_grammar_fails_the_sequence(compiler):
    matcher = compiler.compile(Grammar("regex", "ab"))
    with pytest.raises(GrammarFailed, match="B"):
        matcher.accept(byte("B"))
    with pytest.raises(GrammarFailed):
        matcher.allowed()


def test_a_mask_of_another_shape_is_refused(compiler):
    matcher = compiler.compile(Grammar("regex", "ab"))
    with pytest.raises(ValueError, match=r"mask is int32\[3\]: it must be contiguous int32\[\d+\]"):
        matcher.fill(np.zeros(3, np.int32))


# -- what is refused --


@pytest.mark.parametrize(
    ("kind", "text", "match"),
    [
        ("yaml", "a", "kind of a grammar is one of json_schema"),
        ("regex", "", "regex is empty"),
        ("regex", "a\0", "none of them NUL"),
        ("regex", "a" * 65_537, "at most 65536 characters"),
        ("json_object", "{}", "takes no text"),
        ("json_schema", "{", "json_schema is not JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"a":' * 64 + "{}" + "}" * 64, "more than 64 levels"),
        ("json_schema", "[" * 30_000, "json_schema is not JSON"),
        ("choice", '["a", ""]', "list of strings"),
        ("choice", "[]", "list of strings"),
    ],
    ids=range(11),
)
def test_malformed_grammars_are_refused_when_made(kind, text, match):
    with pytest.raises(InvalidGrammar, match=match):
        Grammar(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "match"),
    [
        ("regex", "(a", "unclosed group"),
        ("lark", "start: nothing", 'unknown name: "nothing"'),
        ("json_schema", '{"type": "shape"}', "Invalid type: shape"),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "does not fetch"),
        *(
            ("json_schema", json.dumps({keyword: value}), keyword)
            for keyword, value in {
                "not": {"type": "string"},
                "if": {"type": "string"},
                "contains": {"type": "string"},
                "propertyNames": {"not": {"pattern": "a"}},
                "dependentRequired": {"a": ["b"]},
            }.items()
        ),
    ],
)
def test_what_is_not_supported_is_named(compiler, kind, text, match):
    with pytest.raises(InvalidGrammar, match=match):
        compiler.compile(Grammar(kind, text))


def test_the_compilers_options_are_not_the_requests(compiler):
    schema = {"type": "string", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidGrammar, match="not"):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_a_slow_grammar_holds_up_no_other_and_is_not_given_up(monkeypatch):
    slow, release = Grammar("regex", "slow"), threading.Event()
    compile_now = Compiler._compile

    def compile_slowly(self, grammar):
        if grammar == slow:
            release.wait(30)
        return compile_now(self, grammar)

    monkeypatch.setattr(Compiler, "_compile", compile_slowly)
    compiler = Compiler(TOKENS, [EOS, PAD], [EOS], workers=2)
    under_way = compiler.start(slow)
    assert under_way.poll() is None
    assert compiler.compile(Grammar("regex", "fast")) is not None
    assert under_way.poll() is None
    release.set()
    assert "s" in allowed(under_way.wait())
    compiler.close()


def resident_mb():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024


def test_of_what_failed_the_reason_is_kept_within_bytes(byte_tokenizer):
    """An exception would keep its frames, and so the matchers: 30 MB for each of these."""
    compiler = Compiler(TOKENS, [EOS, PAD], [EOS], tokenizer=byte_tokenizer(["<eos>", "<pad>"]))

    def refuse(count):
        for i in range(count):
            with pytest.raises(InvalidGrammar, match="too many expressions"):
                compiler.compile(Grammar("regex", f"(a{{1000}}){{{1000 + count + i}}}"))

    refuse(2)
    before = resident_mb()
    refuse(6)
    assert resident_mb() - before < 100
    compiler.close()


def test_reasons_are_remembered_up_to_a_number_of_bytes():
    compiler = Compiler(TOKENS, [EOS, PAD], [EOS])
    for i in range(40):
        with pytest.raises(InvalidGrammar):
            compiler.compile(Grammar("regex", f"({'a' * 30_000}{i}"))
    assert 1 < len(compiler._refused) < 10
    assert compiler._refused_bytes <= REFUSED_BYTES
    compiler.close()


def test_long_outputs_of_some_leave_the_limits_of_others_alone():
    compiler = Compiler(TOKENS, [EOS, PAD], [EOS])
    grammar = Grammar("regex", "d[a-z0]{0,9000}|s[a-z1]{0,9000}|a[a-z2]{0,9000}|e[a-z]{0,30000}")
    for first in "dsae":
        matcher = compiler.compile(grammar)
        feed(matcher, first)
        for _ in range(8000):
            matcher.allowed()
            matcher.accept(2 + ord("b"))
        assert matcher.allowed()[2 + ord("b")]
    compiler.close()


def test_what_divides_too_far_is_refused(compiler):
    """The remainders of a division are states of the expression: a million of them took 6 s and 300 MB."""
    for schema in ({"multipleOf": 1_000_003}, {"allOf": [{"multipleOf": n} for n in (9973, 9967)]}):
        with pytest.raises(InvalidGrammar, match="multipleOf"):
            Grammar.of_schema({"type": "integer", **schema})
    assert compiler.compile(Grammar.of_schema({"type": "number", "multipleOf": 0.01})).allowed().any()


def test_without_the_extra_the_command_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install 'openinfer-sampler\[grammar\]'"):
        Compiler(TOKENS, [EOS], [EOS])


# -- generation --

STRINGS = [
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "enum": ["red", 'gr"een', "bl\\ue", "é"]},
]
NUMBERS = [
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 20},
    {"type": "integer", "exclusiveMinimum": 100},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1.5},
    {"type": "integer", "multipleOf": 3},
]
OTHERS = [{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "x"]}}, {"enum": [1, None, "a", [2]]}]


def random_schema(rng, depth):
    """A schema that ends: strings and lists have an upper bound, objects no other keys unless counted."""
    kinds = ["string", "number", "other"] + ["object", "array", "tuple", "any", "map", "nullable"] * (
        depth > 0
    )
    match rng.choice(kinds):
        case "string":
            return rng.choice(STRINGS)
        case "number":
            return rng.choice(NUMBERS)
        case "other":
            return rng.choice(OTHERS)
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 3)}
        case "tuple":
            first = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        case "any":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
        case "map":
            return {
                "type": "object",
                "patternProperties": {"^k[0-9]$": random_schema(rng, 0)},
                "additionalProperties": False,
                "maxProperties": 2,
            }
        case "nullable":
            return {"type": [rng.choice(["integer", "boolean"]), "null"]}
    names = rng.sample(["a", "name", "two words", "é", 'q"', "x_1"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def schema_of(index):
    rng = random.Random(index)
    schema = random_schema(rng, 3)
    if index % 5 == 0:  # through a reference, one that comes back to itself
        tree = {
            "type": "object",
            "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema = {"$defs": {"node": tree}, "$ref": "#/$defs/node"}
    return schema


def generate(matcher, seed, most=3000):
    """The text of a model of random logits that likes to close what is open; None if it does not end."""
    rng = np.random.default_rng(seed)
    likes = np.zeros(VOCABULARY, np.float32)
    for text, bias in {'"': 4, "}": 3, "]": 3, "null": 3, "<eos>": 5}.items():
        likes[byte(text)] = bias
    columns = [np.array([value], np.float32) for value in (1.0, 0, 1.0, 0)]
    columns[1] = columns[1].astype(np.int32)
    words, none = np.array([seed_words(seed)], np.uint32), np.array([-1], np.int32)
    output = b""
    for position in range(most):
        logits = (rng.standard_normal(VOCABULARY, np.float32) + likes)[None]
        at = np.array([position], np.int32)
        drawn = sample_arrays(logits, *columns, words, at, none, forbid=~matcher.allowed()[None])
        token = int(drawn.token_ids[0])
        matcher.accept(token)
        if token == EOS:
            return output.decode()
        output += TOKENS[token]
    return None


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_output_is_valid_for_200_schemas(compiler, first):
    for index in range(first, first + 25):
        schema = schema_of(index)
        jsonschema.Draft202012Validator.check_schema(schema)
        text = generate(compiler.compile(Grammar("json_schema", json.dumps(schema))), index)
        assert text is not None, schema
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(text))


def test_the_schemas_are_of_varied_features():
    text = json.dumps([schema_of(i) for i in range(200)])
    for keyword in (
        *(
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "maxProperties",
            "$ref",
            "anyOf",
        ),
        *(
            "enum",
            "const",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "pattern",
        ),
        *("format", "minimum", "maximum", "exclusiveMinimum", "multipleOf"),
    ):
        assert f'"{keyword}"' in text, keyword


def test_the_ops_take_a_mask_as_allowed_tokens(compiler, run_cpu, run_interpreter, step):
    matcher = compiler.compile(Grammar("regex", "[a-e]+"))
    logits = np.random.default_rng(0).standard_normal((4, VOCABULARY)).astype(np.float32)
    rows = [None, (SamplingParams(logit_bias=((5, 1.0),)), [1], []), None, None]
    args = step(logits, adjustments=rows, temperatures=[0, 1, 1, 1], top_ps=[1, 1, 0.5, 1])
    for slot in args["slots"][:3]:
        args["adjusts"][slot] |= Adjustment.ALLOWED
        matcher.fill(args["allowed_masks"][slot])
    want, got = run_cpu(sample, **args)["tokens"], run_interpreter(sample, **args)["tokens"]
    assert got.tolist() == want.tolist()
    assert matcher.allowed()[got[:3]].all()
    free = run_cpu(sample, **args | {"adjusts": np.zeros_like(args["adjusts"])})["tokens"]
    assert not matcher.allowed()[free[:3]].all()


# -- long strings --

TREE = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 300},
        "b": {"type": ["string", "null"], "maxLength": 1000},
        "c": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 3},
        "d": {"type": "integer"},
    },
    "required": ["a", "d"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "text": {"anyOf": [{"type": "string", "maxLength": 600}, {"type": "null"}]},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["text"],
        }
    },
}
LEAF = {"text": "日" * 600, "kids": [{"text": None, "other": [1]}]}


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x" * 300, "d": 3},
        {"a": "x" * 299, "d": 3},
        {"a": 'é"\\\n' * 300, "b": None, "d": 3},
        {"a": "x" * 300, "b": "y" * 1000, "c": [LEAF], "d": 3},
        {"a": "x" * 300, "b": "y" * 1001, "d": 3},
        {"a": "x" * 300, "c": [], "d": 3},
        {"a": "x" * 300, "c": [LEAF] * 3, "d": 3},
        {"a": "x" * 300, "c": [LEAF] * 4, "d": 3},
        {"a": "x" * 300, "c": [{"text": "q" * 601}], "d": 3},
        {"a": "x" * 300, "d": 3, "e": 1},
        {"d": 3},
    ],
    ids=range(11),
)
@pytest.mark.parametrize("indent", [None, 1])
def test_schemas_with_long_strings_take_what_jsonschema_takes(compiler, value, indent):
    matcher = compiler.compile(Grammar.of_schema(TREE))
    try:
        feed(matcher, json.dumps(value, ensure_ascii=False, indent=indent))
        taken = matcher.may_end
    except GrammarFailed:
        taken = False
    assert taken == jsonschema.Draft202012Validator(TREE).is_valid(value)


@pytest.mark.parametrize("most", [257, 4096, 100_000])
def test_a_long_string_of_an_answer_meets_no_limit_but_its_own(compiler, most):
    schema = {"type": "object", "properties": {"prompt": {"type": "string", "maxLength": most}}}
    matcher = compiler.compile(Grammar.of_schema({**schema, "required": ["prompt"]}))
    feed(matcher, '{"prompt": "')
    for at in range(most):
        feed(matcher, "日")
        if at % 97 == 0:
            matcher.allowed()
    assert {byte('"')} < set(np.flatnonzero(matcher.allowed()))
    assert "a" not in allowed(matcher)
    feed(matcher, '"}')
    assert matcher.may_end


def test_text_of_any_model_under_long_bounds_is_valid(compiler):
    for index in range(12):
        text = generate(compiler.compile(Grammar.of_schema(TREE)), index, 6000)
        if text is not None:
            jsonschema.Draft202012Validator(TREE).validate(json.loads(text))
