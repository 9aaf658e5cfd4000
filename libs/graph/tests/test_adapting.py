"""AdapterQueue: sequences get a place for their adapter in turn, and no adapter waits for ever."""

import random
from typing import Any, cast

import numpy as np
import pytest

from openinfer.graph.runner import AdapterQueue, Sampling
from openinfer.graph.runner.adapting import AdapterSlots
from openinfer.kernels.lora.adapters import Adapter, Adapters, AdapterSizes
from openinfer.sampler import SamplingParams
from openinfer.scheduler import Seq
from openinfer.tensor import Device, Stream


class Memory:
    """Takes the place of Adapters, and keeps what was put where."""

    def __init__(self, places: int) -> None:
        self.sizes = AdapterSizes(places, 16)
        self.there: dict[int, str] = {}
        self.copies = 0

    def put(self, place: int, values: np.ndarray[Any, Any], stream: Stream) -> None:
        self.there[place] = chr(values[0])
        self.copies += 1


def make(places: int, names: str = "abcdef") -> tuple[AdapterQueue, Memory, dict[str, Adapter]]:
    device = Memory(places)
    adapters = {name: Adapter(name, "", np.array([ord(name)]), name.encode()) for name in names}
    return AdapterQueue(cast(Adapters, device), Stream(Device("cpu"))), device, adapters


def seq(number: int, adapter: Adapter | None) -> Seq[Sampling]:
    return Seq(number, [1], 4, owner=Sampling(SamplingParams(), 0, (), adapter=adapter))


def test_a_place_is_filled_once_for_all_of_its_sequences() -> None:
    queue, device, adapters = make(2)
    for number, name in enumerate("abab"):
        queue.wait(seq(number, adapters[name]))
    ready = queue.ready()
    assert [one.owner.place for one in ready] == [1, 2, 1, 2]
    assert device.there == {1: "a", 2: "b"}
    assert device.copies == 2
    assert queue.running == {"a": 2, "b": 2}


def test_the_least_recently_used_adapter_goes() -> None:
    queue, device, adapters = make(2)
    for number, name in enumerate("abac"):
        queue.wait(one := seq(number, adapters[name]))
        assert queue.ready() == [one]
        queue.end(one)
    assert device.there == {1: "a", 2: "c"}
    assert device.copies == 3


def test_an_adapter_that_waits_stops_others_from_keeping_its_place() -> None:
    """Otherwise requests for `a` that overlap would keep `b` out for ever."""
    queue, device, adapters = make(1)
    queue.wait(first := seq(0, adapters["a"]))
    assert queue.ready() == [first]
    queue.wait(other := seq(1, adapters["b"]))
    queue.wait(second := seq(2, adapters["a"]))
    assert queue.ready() == []
    assert (len(queue), queue.waiting["a"], queue.waiting["b"]) == (2, 1, 1)
    queue.end(first)
    assert queue.ready() == [other]
    assert queue.ready() == []
    queue.end(other)
    assert queue.ready() == [second]
    assert device.copies == 3


def test_an_adapter_that_no_longer_waits_claims_nothing() -> None:
    queue, _, adapters = make(1)
    queue.wait(first := seq(0, adapters["a"]))
    queue.ready()
    queue.wait(seq(1, adapters["b"]))
    queue.wait(second := seq(2, adapters["a"]))
    assert queue.ready() == []
    assert queue.drop(1)
    assert not queue.drop(1)
    assert queue.ready() == [second]
    for one in (first, second, second):
        queue.end(one)
    assert queue.running == {"a": 0}


def test_a_sequence_without_an_adapter_ends_too() -> None:
    queue, _, _ = make(1)
    queue.end(seq(0, None))
    with pytest.raises(TypeError, match="has no adapter"):
        queue.wait(seq(1, None))


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(seed: int) -> None:
    """No place is changed while a sequence has it, and the sequence that has waited longest gets its place before long,
    though some adapters never go idle by themselves."""
    rng = random.Random(seed)
    queue, device, adapters = make(rng.randrange(1, 4))
    running: list[Any] = []
    waiting: list[int] = []
    oldest, ends = 0, 0
    for number in range(400):
        while running and (len(running) > 12 or rng.random() < 0.3):
            queue.end(running.pop(rng.randrange(len(running))))
            ends += 1
        name = rng.choice("aaab") if rng.random() < 0.7 else rng.choice("abcdef")
        queue.wait(seq(number, adapters[name]))
        waiting.append(number)
        if rng.random() < 0.1:
            victim = rng.randrange(number + 1)
            assert queue.drop(victim) == (victim in waiting)
            waiting = [one for one in waiting if one != victim]
        for one in queue.ready():
            running.append(one)
            waiting.remove(one.id)
        if waiting and waiting[0] != oldest:
            oldest, ends = waiting[0], 0
        assert ends < 100
        assert all(device.there[one.owner.place] == one.owner.adapter.name for one in running)
    while running or len(queue):
        for one in running:
            queue.end(one)
        running = queue.ready()
        waiting = [one for one in waiting if one not in {ready.id for ready in running}]
    assert not waiting
    assert not any(queue.running.values())
    assert not any(queue.waiting.values())


def test_places_are_numbered_from_one() -> None:
    places = AdapterSlots(2)
    assert [places.take(key) for key in "aba"] == [(1, True), (2, True), (1, False)]
    assert places.take("c") is None
