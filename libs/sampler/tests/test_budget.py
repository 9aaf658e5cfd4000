"""Budgets of thoughts: the closing token is forced when they are spent, under every kind of grammar."""

import numpy as np
import pytest

from openinfer.sampler import InvalidGrammar
from openinfer.sampler.budget import Budget
from openinfer.sampler.constraint import Constraint, Masks
from openinfer.sampler.grammar import Compiler, Grammar
from openinfer.sampler.lark import Lark

EOS, OPEN, CLOSE = 0, 257, 258
TOKENS = [b"<eos>", *(bytes([i]) for i in range(256)), b"<think>", b"</think>"]
V = len(TOKENS) + 40


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler(TOKENS, [EOS], [EOS], vocabulary=V)
    yield compiler
    compiler.close()


def ids(text):
    return [1 + byte for byte in text.encode()]


def forced_after(compiler, grammar, tokens):
    """How many of the tokens are drawn until the closing one is forced; None if it never is."""
    one, masks = Constraint(compiler.compile(grammar), (), V), Masks(1, V)
    for count, token in enumerate(tokens):
        ((mask,), _) = masks.fill([one])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=V, bitorder="little")).tolist()
        if allowed == [CLOSE]:
            return count
        assert token in allowed, (count, token)
        one.accept(token)
    assert one.problem == ""
    return None


def thoughts_then_digits():
    lark = Lark()
    return lark.grammar(f"{lark.until('</think>')} /[0-9]+/")


@pytest.mark.parametrize("kind", ["any", "lark"])
@pytest.mark.parametrize(("budget", "expected"), [(5, 4), (1, 0), (0, 0), (9, None)])
def test_a_thought_of_the_prompt_is_closed_when_it_has_spent_its_budget(compiler, kind, budget, expected):
    grammar = Grammar("any") if kind == "any" else thoughts_then_digits()
    grammar = Grammar(grammar.kind, grammar.text, budget=Budget(budget, CLOSE))
    assert forced_after(compiler, grammar, ids("abcdefgh")) == expected


def test_what_was_forced_is_followed_by_what_the_grammar_wants(compiler):
    grammar = thoughts_then_digits()
    matcher = compiler.compile(Grammar("lark", grammar.text, budget=Budget(3, CLOSE)))
    for token in (*ids("ab"), CLOSE):
        assert matcher.allowed()[token]
        matcher.accept(token)
    assert np.flatnonzero(matcher.allowed()).tolist() == ids("0123456789")
    assert not matcher.forces


def test_a_thought_that_ended_by_itself_or_never_began_spends_nothing(compiler):
    begun = Grammar("any", budget=Budget(4, CLOSE))
    assert forced_after(compiler, begun, [*ids("a"), CLOSE, *ids("abcdefgh")]) is None
    own = Grammar("any", budget=Budget(4, CLOSE, OPEN))
    assert forced_after(compiler, own, ids("abcdefgh")) is None
    assert forced_after(compiler, own, [*ids("a"), OPEN, *ids("abcdefgh")]) is None  # quoted, not begun
    assert forced_after(compiler, own, [OPEN, *ids("abcdefgh")]) == 3
    assert forced_after(compiler, own, [*ids("\n"), OPEN, *ids("abcdefgh")]) == 3


@pytest.mark.parametrize("kind", ["any", "lark"])
def test_a_character_is_never_cut(compiler, kind):
    grammar = Grammar("any") if kind == "any" else thoughts_then_digits()
    grammar = Grammar(grammar.kind, grammar.text, budget=Budget(3, CLOSE))
    assert forced_after(compiler, grammar, ids("a日bc")) == 4


def test_bytes_that_are_no_text_do_not_go_on_for_ever(compiler):
    lead = 1 + 0xE6
    assert forced_after(compiler, Grammar("any", budget=Budget(3, CLOSE)), [lead] * 9) == 5


def test_the_closing_token_needs_no_leave_of_allowed_ids(compiler):
    one = Constraint(compiler.compile(Grammar("any", budget=Budget(1, CLOSE))), (ids("a")[0],), V)
    ((mask,), _) = Masks(1, V).fill([one])
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [CLOSE]
    one.accept(CLOSE)
    ((mask,), _) = Masks(1, V).fill([one])
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == ids("a")


def test_sequences_with_one_grammar_have_budgets_of_their_own(compiler):
    first, second = (compiler.compile(Grammar("any", budget=Budget(count, CLOSE))) for count in (2, 50))
    for matcher in (first, second):
        matcher.accept(ids("a")[0])
    assert np.flatnonzero(first.allowed()).tolist() == [CLOSE]
    assert second.allowed().all()


def test_bad_budgets_are_refused():
    for bad in ((-1, CLOSE), (5, -1), (5, CLOSE, -1)):
        with pytest.raises(InvalidGrammar, match="below 0"):
            Budget(*bad)
    with pytest.raises(InvalidGrammar, match="takes no text"):
        Grammar("any", "x")
