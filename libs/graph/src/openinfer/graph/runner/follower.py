"""Steps on several ranks: the leader says what it launches, and followers launch the same.

A follower has no scheduler and decides nothing. It holds the same segments under the same numbers. Changes of the
batch come as the packed deltas that the leader sends to its own device.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from openinfer.graph.rows import Delta
from openinfer.graph.runner.ring import RingReader, Writer
from openinfer.graph.runner.segments import UPLOAD

if TYPE_CHECKING:
    from openinfer.graph.runner.runner import Runner

_END, _COMMAND = -1, -2


class Leader:
    """Tells the followers what the Runner of rank 0 does."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._numbers: dict[Hashable, int] = {}
        self._messages: dict[tuple[Hashable, ...], list[int]] = {}
        """The first words of a message of these segments: how many there are, and their numbers."""

    def begin(self, keys: Iterable[Hashable]) -> None:
        """Before the first launch. keys: of the segments, in the order of all ranks."""
        self._numbers = {key: number for number, key in enumerate(keys)}

    def launch(self, keys: tuple[Hashable, ...], delta: Delta | None = None) -> None:
        """The followers upload the delta, scatter it, and launch these segments."""
        numbers = self._messages.get(keys)
        if numbers is None:
            numbers = self._messages[keys] = [len(keys), *(self._numbers[key] for key in keys)]
        if delta is None:
            self._writer.send(numbers)
        else:
            self._writer.send(numbers, delta.places, delta.values)

    def tell(self, deltas: Iterator[Delta], following: tuple[Hashable, ...]) -> Iterator[Delta]:
        """The same deltas, of which the followers get each, and the segments behind the last."""
        told = False
        for delta in deltas:
            self.launch(following if delta.last else (), delta)
            told = True
            yield delta
        if following and not told:
            self.launch(following)

    def command(self, name: str, *args: Any) -> None:
        """The followers carry out one of their commands, after the launches so far. args: as JSON has them."""
        text = json.dumps([name, *args]).encode()
        self._writer.send((_COMMAND,), np.frombuffer(text + b" " * (-len(text) % 4), np.int32))

    def end(self) -> None:
        """The followers leave their loops."""
        self._writer.send((_END,))


class LoneLeader:
    """The Leader of a rank that is the only one."""

    def begin(self, keys: Iterable[Hashable]) -> None:
        """See Leader."""

    def launch(self, keys: tuple[Hashable, ...]) -> None:
        """See Leader."""

    def tell(self, deltas: Iterator[Delta], following: tuple[Hashable, ...]) -> Iterator[Delta]:
        return deltas


def follow_leader(
    runner: "Runner", reader: RingReader, commands: Mapping[str, Callable[..., object]]
) -> None:
    """Do what the leader says, until it says that it ends. The runner must be recorded. commands: by their names."""
    keys, rows = list(runner.graphs.keys()), runner.model.batch.rows
    while True:
        number, words = reader.take()
        if number >= 0:
            half = (len(words) - number) // 2
            if half:
                rows.send(Delta(words[number : number + half], words[number + half :]), runner.stream)
                runner.graphs.launch(UPLOAD)
            for one in words[:number].tolist():
                runner.graphs.launch(keys[one])
        elif number == _COMMAND:
            name, *args = json.loads(words.tobytes())
            commands[name](*args)
        else:
            return
