"""Drafters: the rules of every one, and what a look-up of n-grams proposes."""

import pytest

from openinfer.scheduler import InvalidSetup, NGram
from openinfer.scheduler.testing import DrafterConformance, Mismatch


class TestNGram(DrafterConformance):
    def make_drafter(self):
        return NGram(1, 3)


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


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_impossible_ngrams_are_refused(shortest, longest):
    with pytest.raises(InvalidSetup, match="1 <= shortest <= longest"):
        NGram(shortest, longest)
