"""Block names: chained, salted, and the same everywhere."""

from array import array

import pytest

from openinfer.kvpool import InvalidTokens, hash_blocks


def test_names_are_pinned_for_other_processes_machines_and_releases():
    names = hash_blocks([1, 2, 3, 4, 5], 2, b"tenant")
    assert [name.hex()[:16] for name in names] == ["5f5f4cf136729c3c", "0bdff629b2fd8787"]
    assert [len(name) for name in names] == [32, 32]


def test_a_name_stands_for_everything_before_it():
    base = hash_blocks([1, 2, 3, 4, 5, 6], 2)
    assert hash_blocks([1, 2, 3, 4, 9, 9], 2)[:2] == base[:2]
    assert not set(hash_blocks([9, 2, 3, 4, 5, 6], 2)) & set(base)
    assert not set(hash_blocks([1, 2, 3, 4, 5, 6], 2, b"salt")) & set(base)
    assert not set(hash_blocks([1, 2, 3, 4, 5, 6], 3)) & set(base)


def test_tokens_may_be_any_sequence():
    assert hash_blocks(array("i", range(64)), 16) == hash_blocks(list(range(64)), 16)
    assert hash_blocks(range(7), 8) == []


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "a"])
def test_token_ids_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidTokens, match="integers in"):
        hash_blocks([1, wrong], 2)


@pytest.mark.parametrize("kind", [tuple, bytes, bytearray, lambda ids: array("q", ids)])
def test_any_sequence_of_token_ids_has_the_names_of_the_list(kind):
    ids = list(range(40))
    assert hash_blocks(kind(ids), 16) == hash_blocks(ids, 16)
