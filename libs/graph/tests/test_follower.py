"""What a leader tells followers, and what these do."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from openinfer.graph.rows import Delta
from openinfer.graph.runner import Leader, Ring, RingReader, Writer, follow_leader
from openinfer.tensor import Device, Stream

FORWARD, SAMPLE, UPLOAD = ("forward", 8), ("sample", 8), ("upload",)
KEYS = [UPLOAD, FORWARD, SAMPLE]


class Graphs(dict[Any, None]):
    def __init__(self, done: list[Any]) -> None:
        super().__init__(dict.fromkeys(KEYS))
        self.launch = done.append


@pytest.mark.parametrize("following", [(), (FORWARD, SAMPLE)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_segments_behind_deltas_come_once_with_the_last(count, following):
    sent: list[tuple[Any, ...]] = []
    leader = Leader(cast(Writer, SimpleNamespace(send=lambda *message: sent.append(message))))
    leader.begin(KEYS)
    numbers = [len(following), *(KEYS.index(key) for key in following)]
    deltas = [Delta(np.array([n]), np.array([n], np.int32), last=n == count - 1) for n in range(count)]
    assert list(leader.tell(iter(deltas), following)) == deltas
    assert [message[0] for message in sent[:-1]] == [[0]] * max(count - 1, 0)
    assert [message[0] for message in sent[-1:]] == ([numbers] if count or following else [])


def test_followers_do_what_the_leader_says_in_its_order():
    file, bell, done = os.memfd_create("steps"), os.eventfd(0), []
    leader = Leader(Writer(Ring(file, 1), [bell], lost=lambda: False))
    leader.begin(KEYS)

    def send(delta: Delta, stream: Stream) -> None:
        done.append((delta.places.tolist(), delta.values.tolist()))

    first = Delta(np.array([5, 70000]), np.array([-1, 2], np.int32), last=False)
    leader.launch((), first)
    leader.launch((FORWARD, SAMPLE), Delta(np.array([9]), np.array([1 << 30], np.int32)))
    leader.launch((FORWARD,))
    leader.command("adapter", 3)
    leader.launch((SAMPLE,))
    leader.end()
    rows = SimpleNamespace(send=send)
    runner: Any = SimpleNamespace(
        graphs=Graphs(done),
        stream=Stream(Device("cpu")),
        model=SimpleNamespace(batch=SimpleNamespace(rows=rows)),
    )
    reader = RingReader(Ring(file, 1), 0, bell, spin_s=0)
    follow_leader(runner, reader, {"adapter": lambda place: done.append(("adapter", place))})
    assert done == [
        ([5, 70000], [-1, 2]), UPLOAD,
        ([9], [1 << 30]), UPLOAD, FORWARD, SAMPLE,
        FORWARD, ("adapter", 3), SAMPLE,
    ]  # fmt: skip
    os.close(file)
    os.close(bell)
