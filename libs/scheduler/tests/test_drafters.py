"""Drafters: the rules of every one, and what a look-up of n-grams proposes."""

import random
import re
import tracemalloc

import pytest

from openinfer.scheduler import GuardedDrafters, InvalidSetup, NGram, Suffixes, suffixes
from openinfer.scheduler.testing import DrafterConformance, Mismatch


class TestNGram(DrafterConformance):
    def make_drafter(self):
        return NGram(1, 3)


class TestSuffixes(DrafterConformance):
    def make_drafter(self):
        return Suffixes(6, 2.0, 0.3)


class TestSuffixesOfAWindow(DrafterConformance):
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(suffixes, "WINDOW", 16)

    def make_drafter(self):
        return Suffixes()


class Forgetful(NGram):
    """Proposes by how often it was asked."""

    calls = 0

    def propose(self, tokens, count):
        self.calls += 1
        return [self.calls % 7] * count


def test_the_rules_notice_a_drafter_that_breaks_one():
    suite = DrafterConformance()
    suite.make_drafter = Forgetful
    with pytest.raises(Mismatch, match="a new one"):
        suite.test_equal_sequences_get_equal_proposals()
    suite.num_tokens = 2
    with pytest.raises(Mismatch, match="was asked for"):
        suite.test_proposals_are_short_and_in_the_vocabulary()


@pytest.mark.parametrize(
    ("tokens", "count", "proposed"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # a proposal past the end repeats itself
        ([5, 1, 2, 6, 8, 1, 2, 7, 5, 1, 2], 1, [6]),  # three tokens match there, two at the later place
        ([1, 2, 6, 1, 2, 7, 1, 2], 1, [7]),  # equal matches: the latest
        ([1, 2, 3, 4], 3, []),
        ([9, 9, 9], 2, [9, 9]),
        ([9], 2, []),
        ([], 2, []),
    ],
)
def test_an_ngram_proposes_what_followed_its_longest_latest_match(tokens, count, proposed):
    assert list(NGram(2, 5).propose(tokens, count)) == proposed


def test_a_long_prompt_takes_few_bytes():
    """Every sequence has an index of its own, and most n-grams occur once."""
    tokens = random.Random(1).sample(range(150_000), 8192)
    tracemalloc.start()
    try:
        drafter = NGram()
        drafter.propose(tokens, 3)
        assert tracemalloc.get_traced_memory()[0] < 256 * len(tokens)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_impossible_ngrams_are_refused(shortest, longest):
    with pytest.raises(InvalidSetup, match="1 <= shortest <= longest"):
        NGram(shortest, longest)


@pytest.mark.parametrize(
    ("tokens", "count", "proposed"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4]),  # two tokens matched: two drafts
        ([5, 1, 2, 6, 8, 1, 2, 7, 5, 1, 2], 1, [6]),  # three tokens match there, two at the later place
        ([1, 2, 6, 9, 1, 2, 6, 9, 1, 2, 7, 9, 3, 1, 2], 2, [6, 9]),  # most of the places say so
        ([1, 2, 3, 4], 3, []),
        ([9, 9, 9], 2, [9, 9]),
        ([9], 2, []),
        ([], 2, []),
    ],
)
def test_suffixes_propose_what_followed_their_longest_matches(tokens, count, proposed):
    assert list(Suffixes().propose(tokens, count)) == proposed


def test_a_vote_without_a_winner_ends_the_proposal():
    tokens = [1, 2, 3, 5, 1, 2, 4, 5, 1, 2, 6, 5, 1, 2, 3, 7, 8, 1, 2]
    assert list(Suffixes(2, 4.0, 0.6).propose(tokens, 4)) == []
    assert list(Suffixes(2, 4.0, 0.5).propose(tokens, 4)) == [3]
    assert len(Suffixes(2, 4.0, 0.1).propose(tokens, 4)) == 4


def longest_match(tokens, depth):
    """The length of the longest suffix that occurred before, by looking everywhere."""
    for length in range(min(depth, len(tokens) - 1), 1, -1):
        if any(tokens[at - length : at] == tokens[-length:] for at in range(length, len(tokens))):
            return length
    return 0


def test_the_longest_match_is_found():
    rng = random.Random(5)
    for _ in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randint(3, 60))]
        drafter = Suffixes(12)
        drafter.propose(tokens, 4)
        assert drafter._matches(tokens)[1] == longest_match(tokens, 12)


def test_a_match_does_not_reach_before_the_window(monkeypatch):
    """So proposals are the same whether a sequence was seen to grow or not: a drafter that saw it grow has forgotten
    what was before."""
    tokens = [*range(100, 115), 1, 2, 3, 50, 9, 2, 3, 60, 70, 1, 2, 3]
    assert list(Suffixes().propose(tokens, 1)) == [50]  # after 1, 2, 3
    monkeypatch.setattr(suffixes, "WINDOW", 8)  # from token 16 on: without that 1
    grown = Suffixes()
    for end in range(3, len(tokens)):
        grown.propose(tokens[:end], 1)
    for drafter in (Suffixes(), grown):
        assert list(drafter.propose(tokens, 1)) == [60]  # the latest of two matches of two tokens


def test_suffixes_hold_no_more_than_two_windows(monkeypatch):
    monkeypatch.setattr(suffixes, "WINDOW", 64)
    drafter, tokens = Suffixes(), list[int]()
    for at in range(1000):
        tokens.append(at % 11)
        drafter.propose(tokens, 4)
        assert len(drafter._places._earlier) <= 128
        assert len(drafter._places._latest) <= 128
    assert list(drafter.propose(tokens, 4)) == [(1000 + n) % 11 for n in range(4)]


@pytest.mark.parametrize("setup", [(1,), (4, 0), (4, 1, 1.5)])
def test_impossible_suffixes_are_refused(setup):
    with pytest.raises(InvalidSetup, match="give a depth"):
        Suffixes(*setup)


class Faulty:
    """Proposes what a test says."""

    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, tokens, count):
        if isinstance(self.proposal, Exception):
            raise self.proposal
        return self.proposal


@pytest.mark.parametrize(
    ("proposal", "complaint"),
    [
        ([3, 100], r"it proposed \[3, 100\]; token ids are 0 to 99"),
        ([-1], "it proposed"),
        ([1, 2, 3, 4], "4 tokens where at most 3"),
        ([1.5], "it failed"),
        (None, "it failed"),
        (ValueError("no"), "it failed"),
    ],
)
def test_a_faulty_drafter_is_turned_off_with_one_line(caplog, proposal, complaint):
    made = [Faulty([5, 6]), Faulty(proposal)]
    guard = GuardedDrafters(iter(made).__next__, 100)
    good, bad = guard(), guard()
    assert list(good.propose([1], 3)) == [5, 6]
    assert list(bad.propose([1], 3)) == []
    assert list(bad.propose([1], 3)) == list(good.propose([1], 3)) == list(guard().propose([1], 3)) == []
    (line,) = caplog.records
    assert re.search(complaint, line.getMessage())


def test_a_drafter_that_cannot_be_made_is_turned_off(caplog):
    guard = GuardedDrafters(lambda: 1 / 0, 100)
    assert [list(guard().propose([1], 3)) for _ in range(2)] == [[], []]
    assert "cannot be made" in caplog.text
    assert len(caplog.records) == 1
