"""The ring that carries a leader's messages to followers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from openinfer.graph.runner import Ring, RingReader, Writer
from openinfer.kernels import RankLost


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("steps")
    yield made
    os.close(made)


def bells(count: int) -> list[int]:
    return [os.eventfd(0) for _ in range(count)]


@pytest.mark.parametrize("spin_s", [0.0, 0.01])
def test_every_reader_gets_all_messages_in_order(file, spin_s):
    """Through a ring that they fill many times, with readers that sleep between messages."""
    rings, doors = [Ring(file, 2, capacity=300) for _ in range(3)], bells(2)
    rng = np.random.default_rng(3)
    sent = [(n, rng.integers(0, 1000, rng.integers(0, 120), np.int32)) for n in range(2000)]
    taken: list[list[tuple[int, list[int]]]] = [[], []]

    def read(index: int) -> None:
        reader = RingReader(rings[1 + index], index, doors[index], spin_s=spin_s)
        for _ in sent:
            number, words = reader.take()
            taken[index].append((number, words.tolist()))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    writer = Writer(rings[0], doors, lost=lambda: False)
    for number, words in sent:
        writer.send((number,), words)
    for thread in threads:
        thread.join(30)
    assert taken == [[(number, words.tolist()) for number, words in sent]] * 2


def test_a_reader_that_takes_nothing_is_named(file):
    ring = Ring(file, 2, capacity=64)
    first = RingReader(ring, 0, bells(1)[0], spin_s=0)
    writer = Writer(ring, [], lost=lambda: False, timeout_s=0.05)
    for _ in range(3):
        writer.send((7,), np.zeros(18, np.int32))
        first.take()
    with pytest.raises(RankLost, match=r"follower 1 takes no messages; .* \(limit 0\.05 s\)"):
        writer.send((7,), np.zeros(18, np.int32))
    with pytest.raises(ValueError, match="a message of 102 words; a ring of 64 takes half as many"):
        writer.send((7,), np.zeros(100, np.int32))


def test_a_lost_rank_ends_the_wait(file):
    writer = Writer(Ring(file, 1, capacity=64), [], lost=lambda: True)
    for _ in range(2):
        writer.send((1,), np.zeros(30, np.int32))
    with pytest.raises(RankLost, match="follower 0 takes no messages"):
        writer.send((1,), np.zeros(30, np.int32))


def test_words_are_there_before_the_head_says_so(file, monkeypatch):
    """For processors that do not keep the order of writes: a fence stands between them, at both ends."""
    ring, other, seen = Ring(file, 1, capacity=64), Ring(file, 1, capacity=64), []

    def late() -> None:
        """What is written before a fence at one end is seen behind the fence at the other."""
        seen.append((other._lines[0], other._lines[other._tail(0)], other._memory[:5].tolist()))

    monkeypatch.setattr("openinfer.graph.runner.ring.memory_fence", late)
    Writer(ring, [], lost=lambda: False).send((7,), np.array([1, 2, 3], np.int32))
    assert seen == [(0, 0, [5, 7, 1, 2, 3])]
    assert ring._lines[0] == 5
    ring._memory[4] = 0  # the reader sees the head, and the last word comes only now

    def arrive() -> None:
        late()
        other._memory[4] = 3

    monkeypatch.setattr("openinfer.graph.runner.ring.memory_fence", arrive)
    number, words = RingReader(ring, 0, bells(1)[0], spin_s=0).take()
    assert (number, words.tolist()) == (7, [1, 2, 3])
    assert [tail for _, tail, _ in seen[1:]] == [0, 0]  # the copy is made before the writer may overwrite it
    assert ring._lines[ring._tail(0)] == 5
