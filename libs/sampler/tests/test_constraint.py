"""Grammars as engines use them: made of parts, compiled while others run, masks of several sequences at once."""

import json
import random
import threading
import time

import numpy as np
import pytest

from openinfer.sampler import InvalidGrammar
from openinfer.sampler.budget import Budget
from openinfer.sampler.constraint import Constraint, Masks, PendingGrammars
from openinfer.sampler.grammar import Compiler, Grammar
from openinfer.sampler.lark import Lark

EOS = 0
TOKENS = [b"<eos>", *(bytes([i]) for i in range(256)), b"</think>", b"abc", b'{"']
V = len(TOKENS) + 5


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler(TOKENS, [EOS], [EOS], vocabulary=V)
    yield compiler
    compiler.close()


def fed(compiler, grammar, text):
    """A matcher past the text, a byte a token; None where the text does not fit."""
    matcher = compiler.compile(grammar)
    for byte in text.encode():
        if not matcher.allowed()[1 + byte]:
            return None
        matcher.accept(1 + byte)
    return matcher


def whole(compiler, grammar, text):
    matcher = fed(compiler, grammar, text)
    return matcher is not None and matcher.may_end


# -- Lark: grammars of parts --


@pytest.mark.parametrize("marker", ["</think>", "</p>", "｜end｜", "*/."])
def test_text_until_a_marker_ends_at_the_first(compiler, marker):
    lark = Lark()
    grammar = lark.grammar(f"{lark.until(marker)} {lark.text('!')}")
    assert whole(compiler, grammar, f"so<</{marker[:-1]} \n{marker}!")
    assert whole(compiler, grammar, f"{marker}!")
    assert not whole(compiler, grammar, "so!")
    assert fed(compiler, grammar, f"{marker}so{marker}!") is None


def test_text_until_a_marker_has_a_length_and_an_end(compiler):
    lark = Lark()
    grammar = lark.grammar(lark.until("</p>", before="\n", least=2, most=4))
    texts = ["a\n</p>", "ab\n</p>", "é\n日本\n</p>", "abcde\n</p>", "ab</p>", "a</p>b\n</p>"]
    assert [whole(compiler, grammar, text) for text in texts] == [False, True, True, False, False, False]


def test_text_until_a_marker_may_be_kept_from_another(compiler):
    lark = Lark()
    grammar = lark.grammar(lark.until("</p>", never="</call>"))
    texts = ["a</p>", "a</cal</p>", "a</call</p>", "a</call></p>"]
    assert [whole(compiler, grammar, text) for text in texts] == [True, True, True, False]


COUNTED = ["a", "bc def", "\n", "<", "</", "</p", "<p>", "日", "</cal", "x" * 30]


@pytest.mark.parametrize("seed", range(6))
def test_counted_text_is_any_of_its_lengths_and_nowhere_stuck(compiler, seed):
    rng = random.Random(seed)
    for _ in range(25):
        before, never = rng.choice(["", "\n"]), rng.choice(["", "</call>"])
        least, most = rng.choice([0, 0, 1, 3, 40]), rng.choice([None, 40, 45, 70, 100])
        lark = Lark()
        grammar = lark.grammar(lark.until("</p>", before=before, least=least, most=most, never=never))
        size, text = rng.choice([0, 1, 2, 3, 5, 31, 32, 33, 39, 40, 41, 45, 46, 64, 70, 71, 100, 101]), ""
        while len(text) < size:
            text += rng.choice(COUNTED)
        text = text[:size]
        said = f"{text}{before}</p>"
        fits = least <= size <= (most or size) and said.index("</p>") == size + len(before)
        assert whole(compiler, grammar, said) == (fits and not (never and never in said)), (text, least, most)


@pytest.mark.parametrize("before", ["", "\n"])
@pytest.mark.parametrize("most", [10_000, 100_000, 10**12])
def test_long_bounds_cost_no_states(compiler, before, most):
    lark = Lark()
    matcher = compiler.compile(lark.grammar(lark.until("</p>", before=before, most=most)))
    for byte in ("def f():\n    return '日' < x\n" * 380)[:10_000].encode():
        matcher.accept(1 + byte)
    assert matcher.allowed()[1 + ord("a")] == (most > 10_000)
    for byte in f"{before}</p>".encode():
        matcher.accept(1 + byte)
    assert matcher.may_end


def test_text_without_a_marker(compiler):
    lark = Lark()
    grammar = lark.grammar(lark.without("<t>"))
    assert whole(compiler, grammar, "a < t > <t")
    assert fed(compiler, grammar, "a<t>") is None


def test_a_schema_in_a_grammar_keeps_its_references_and_rules(compiler):
    lark = Lark()
    schema = {
        "$defs": {"n": {"type": "integer"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
    }
    start = lark.text('q"\\\n')
    grammar = lark.grammar(f"{start} {lark.json({**schema, 'additionalProperties': False})}+")
    assert whole(compiler, grammar, 'q"\\\n{"a": 1}{}')
    assert fed(compiler, grammar, 'q"\\\n{"a": "') is None
    assert fed(compiler, grammar, 'q"\\\n{"b') is None
    bad = Lark()
    with pytest.raises(InvalidGrammar, match=r'Unimplemented keys: \["not"\]$'):
        compiler.compile(bad.grammar(bad.json({"type": "object", "not": {}})))
    with pytest.raises(InvalidGrammar, match="nested more than 64"):
        lark.json(json.loads('{"a":' * 64 + "{}" + "}" * 64))


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "integer"}'), "12", "a"),
        (Grammar("json_object"), "{}", "[]"),
        (Grammar("regex", "a/+"), "a//", "b"),
        (Grammar("choice", '["start: x", "b"]'), "start: x", "c"),
        (Grammar("lark", 'start: r0 "b"\nr0: "a"+'), "aab", "c"),
        (Grammar("gbnf", 'root ::= "a" [b-d]+'), "abd", "c"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_any_grammar_can_follow_thoughts(compiler, content, good, bad):
    lark = Lark()
    thoughts = lark.rule(f"{lark.text('<think>')} {lark.until('</think>')} /\\n{{0,2}}/")
    grammar = lark.grammar(f"{thoughts}? {lark.content(content)}")
    for before in ("", "<think></think>", "<think>hm\n<think></think>\n\n"):
        assert whole(compiler, grammar, before + good), before
        assert fed(compiler, grammar, before + bad) is None, before
    with pytest.raises(ValueError, match="one content"):
        lark.content(Grammar("regex", "another"))


def test_contents_are_of_lark_grammars_and_alone():
    one = Grammar("regex", "a")
    with pytest.raises(InvalidGrammar, match="only a grammar of parts"):
        Grammar("regex", "b", one)
    with pytest.raises(InvalidGrammar, match="only a grammar of parts"):
        Grammar("parts", "start: @content", Grammar("parts", "start: @content", one))
    with pytest.raises(InvalidGrammar, match="brace"):
        Grammar("lark", ' {"grammars": []}')


@pytest.mark.parametrize("text", ['root ::= "a', "root ::= nothing", "root = a", "((((" * 4000])
def test_broken_gbnf_is_refused(compiler, text):
    with pytest.raises(InvalidGrammar):
        compiler.compile(Grammar("gbnf", text))


# -- running sequences --


def bits(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=V, bitorder="little")).tolist()


def test_masks_of_many_are_those_of_each(compiler):
    grammars = [Grammar("regex", "[a-c]+"), Grammar("json_object"), Grammar("choice", '["x", "yy"]')]
    masks = Masks(40, V)
    for count in (1, 3, 5, 40):
        matchers = [compiler.compile(grammars[i % 3]) for i in range(count)]
        filled, complete = masks.fill([Constraint(matcher, (), V) for matcher in matchers])
        assert [bits(mask) for mask in filled] == [np.flatnonzero(m.allowed()).tolist() for m in matchers]
        assert complete == [False] * count


def test_allowed_ids_and_the_end(compiler):
    masks, a, b = Masks(2, V), 1 + ord("a"), 1 + ord("b")
    one = Constraint(compiler.compile(Grammar("regex", "[ab]c?")), (a, EOS, 1 + ord("z")), V)
    filled, complete = masks.fill([one])
    assert (bits(filled[0]), complete) == ([a], [False])
    one.accept(a)
    filled, complete = masks.fill([one])
    assert (bits(filled[0]), complete, one.problem) == (
        [EOS],
        [False],
        "",
    )  # c is not allowed, but it would fit
    two = Constraint(compiler.compile(Grammar("regex", "b")), (b, EOS), V)
    two.accept(b)
    filled, complete = masks.fill([two, one])
    assert ([bits(mask) for mask in filled], complete) == ([[EOS], [EOS]], [True, False])


@pytest.mark.parametrize("beside", [False, True])
def test_a_dead_end_or_a_wrong_token_leaves_nothing_and_says_why(compiler, beside):
    masks = Masks(3, V)
    dead = Constraint(compiler.compile(Grammar("regex", "ab")), (1 + ord("z"),), V)
    wrong = Constraint(compiler.compile(Grammar("regex", "ab")), (), V)
    wrong.accept(1 + ord("b"))
    sound = [Constraint(compiler.compile(Grammar("regex", "ab")), (), V)] * beside
    for one, reason in ((dead, "no token"), (wrong, "satisfy the grammar")):
        filled, _ = masks.fill([*sound, one])
        assert bits(filled[-1]) == []
        assert reason in one.problem
        assert not sound or bits(filled[0]) == [1 + ord("a"), TOKENS.index(b"abc")][:1]


# -- grammars that cost too much --

BOMB = "(a{1000}){1000}"
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "a" "a" | "a" "a" "a" |'


def cpu_s(work):
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", BOMB), "too many expressions"),
        (Grammar("regex", "xyz" + BOMB), "too many expressions"),
        (Grammar("lark", f'start: "xyz" BIG\nBIG: /{BOMB}/'), "too many expressions"),
        (Grammar("lark", "start: start | start start"), "no output fits"),
        (Grammar("lark", "start: " + " | ".join(f'"{i}"' for i in range(700))), "max is 600"),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Grammar) else "",
)
def test_what_fails_at_the_first_mask_is_refused_like_what_does_not_compile(
    byte_tokenizer, monkeypatch, grammar, reason
):
    words = [bytes([i, j]) * 2 for i in range(97, 123) for j in range(97, 123)]
    compiler = Compiler([*TOKENS, *words], [EOS], [EOS], tokenizer=byte_tokenizer(["<eos>"]))

    def refused():
        with pytest.raises(InvalidGrammar, match=reason):
            compiler.compile(grammar)

    assert cpu_s(refused) < 1.0
    monkeypatch.setattr(compiler, "_compiled", None)  # what was refused is not compiled again
    refused()
    compiler.close()


def test_a_sequence_that_costs_too_much_ends_and_the_others_go_on(compiler):
    masks = Masks(5, V)
    bad = [Constraint(compiler.compile(Grammar("lark", AMBIGUOUS)), (), V) for _ in range(4)]
    good = Constraint(compiler.compile(Grammar("regex", "[ab]{1,300}")), (), V)

    def run():
        for _ in range(250):
            filled, _ = masks.fill([*bad, good])
            assert filled[-1].any()
            for one in [*bad, good]:
                one.accept(1 + ord("a"))

    # Without a limit each of the four takes 11 s.
    assert cpu_s(run) < 5
    assert all("items; max is 600" in one.problem for one in bad)
    assert not good.problem


def test_grammars_in_use_are_within_the_limits(compiler):
    strings = {f"k{i}": {"type": "string", "pattern": rf"^[A-Z][\w ]{{1,{i + 20}}}$"} for i in range(60)}
    for grammar in (
        Grammar.of_schema({"type": "object", "properties": strings}),
        Grammar.of_schema({"enum": [f"value number {i} of many" for i in range(1900)]}),
        Grammar("regex", r"\w{1,500} \p{L}{3,20}( \w+){0,50}"),
        Grammar("regex", r"(.|\n){1,4000}"),
        Grammar("regex", r"[\w.+-]+@[\w-]+\.[\w.-]+"),
    ):
        assert compiler.compile(grammar).allowed().any()


def test_a_matcher_that_panics_takes_nothing_along(compiler, monkeypatch):
    masks = Masks(2, V)
    broken, sound = (Constraint(compiler.compile(Grammar("regex", "ab")), (), V) for _ in range(2))

    def panic(mask):
        raise BaseException("a panic")

    monkeypatch.setattr(broken._matcher, "fill", panic)
    filled, _ = masks.fill([broken, sound])
    assert (bits(filled[0]), broken.problem) == ([], "the grammar's matcher fails: a panic")
    assert bits(filled[1])


# -- waiting for a grammar --


def test_requests_wait_for_their_grammars(compiler):
    pending = PendingGrammars(compiler)
    pending.start(1, "one", Grammar("regex", "pending[0-9]{3,40}"))
    pending.start(2, "two", Grammar("json_schema", '{"not": {}}'))
    pending.start(3, "three", Grammar("regex", "never"))
    assert len(pending) == 3
    assert pending.drop(3)
    assert not pending.drop(3)
    found, until = [], time.monotonic() + 5
    while pending and time.monotonic() < until:
        found += pending.ready(0.5)
    assert [(ready.id, ready.item) for ready in sorted(found)] == [(1, "one"), (2, "two")]
    matchers = {ready.id: ready.matcher for ready in found}
    assert matchers[2] is None
    assert matchers[1].allowed()[1 + ord("p")]
    assert {ready.problem for ready in found} == {"", 'json_schema: Unimplemented keys: ["not"]'}


@pytest.mark.parametrize("fault", [RuntimeError("odd"), BaseException("a panic")], ids=str)
def test_a_compiler_that_breaks_refuses_the_grammar(monkeypatch, fault):
    def fail(self, grammar):
        raise fault

    monkeypatch.setattr(Compiler, "_alone", fail)
    broken = Compiler(TOKENS, [EOS], [EOS])
    with pytest.raises(InvalidGrammar, match=f"the compiler fails: {fault}"):
        broken.compile(Grammar("regex", "a"))
    broken.close()


def test_half_a_character_is_no_choice(compiler):
    with pytest.raises(InvalidGrammar, match="choice"):
        compiler.compile(Grammar("choice", '["\\ud800"]'))


def test_waiting_does_not_block(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(Compiler, "_compile", lambda self, grammar: "refused" if release.wait(30) else None)
    slow = Compiler(TOKENS, [EOS], [EOS])
    pending = PendingGrammars(slow)
    pending.start(7, None, Grammar("regex", "a"))
    assert pending.ready(0.0) == []
    release.set()
    (one,) = pending.ready(30.0)
    assert one.problem == "refused"
    pending.close()


# -- drafts --

AHEAD = [
    (Grammar("regex", "[a-c]{2,5}x"), "abcx"),
    (Grammar("regex", "ab(c|d)?"), "abd"),
    (Grammar("json_object"), '{"a": [1, 2]}'),
    (Grammar("choice", '["yes", "yesterday"]'), "yesterday"),
]


@pytest.mark.parametrize(("grammar", "text"), AHEAD)
def test_masks_after_drafts_are_those_of_tokens_that_were_drawn(compiler, grammar, text):
    """At every place of a text, with right and wrong drafts; and looking ahead changes no later mask."""
    rng, tokens = np.random.default_rng(3), [1 + byte for byte in text.encode()]
    masks, one = Masks(1, V, 3), Constraint(compiler.compile(grammar), (), V)
    cut = made = 0
    for at in range(len(tokens) + 1):
        (filled, _) = masks.fill([one])
        assert (filled[0] == mask_after(compiler, grammar, tokens[:at])).all()
        drafts = [token if rng.random() < 0.8 else 1 + ord("~") for token in tokens[at : at + 3]]
        ahead, checked = masks.look_ahead(one, filled[0], drafts)
        before = filled[0]
        for place, (draft, other) in enumerate(zip(drafts, checked, strict=True)):
            if draft != other:
                assert draft in bits(before)
                assert other not in bits(before)  # so the draft is not drawn, and no mask is needed
                cut += 1
                break
            if draft not in bits(before):
                break
            assert (ahead[place] == mask_after(compiler, grammar, tokens[: at + place + 1])).all()
            before, made = ahead[place], made + 1
        if at < len(tokens):
            one.accept(tokens[at])
    assert made
    assert cut  # the text is complete after its last token


def mask_after(compiler, grammar, tokens):
    mask, one = np.zeros(-(-V // 32), np.int32), Constraint(compiler.compile(grammar), (), V)
    for token in tokens:
        one.accept(token)
    one.fill(mask)
    return mask


def test_a_slow_sequence_looks_no_further(compiler):
    one, masks = Constraint(compiler.compile(Grammar("regex", "[a-c]+")), (), V), Masks(1, V, 2)
    (filled, _) = masks.fill([one])
    one.slow = True
    _, checked = masks.look_ahead(one, filled[0], [1 + ord("a"), 1 + ord("b")])
    assert checked[0] not in bits(filled[0])


def test_a_copy_of_a_spent_budget_goes_its_own_way(compiler):
    closing = TOKENS.index(b"</think>")
    grammar = Grammar("any", budget=Budget(3, closing))
    one, masks = Constraint(compiler.compile(grammar), (), V), Masks(1, V, 2)
    one.accept(1 + ord("a"))
    (filled, _) = masks.fill([one])
    ahead, checked = masks.look_ahead(one, filled[0], [1 + ord("b"), closing])
    assert checked == [1 + ord("b"), closing]
    assert bits(ahead[0]) == [closing]
    (filled, _) = masks.fill([one])
    assert len(bits(filled[0])) > 1
