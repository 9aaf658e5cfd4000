"""Steps on several ranks: the leader says what it launches, and followers launch the same.

A follower has no scheduler and decides nothing. It holds the same segments under the same numbers. Changes of the
batch come as the packed deltas that the leader sends to its own device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from openinfer.graph.rows import Delta
from openinfer.graph.runner.ring import Reader, Writer

if TYPE_CHECKING:
    from openinfer.graph.runner.runner import Runner

_DELTA, _END, _COMMAND = -1, -2, -3


class Leader:
    """Tells the followers what the Runner of rank 0 does. `keys`: of the segments, in the order of all ranks."""

    def __init__(self, writer: Writer, keys: Iterable[Hashable]) -> None:
        self._writer = writer
        self._numbers = {key: number for number, key in enumerate(keys)}

    def send(self, delta: Delta) -> None:
        """The followers apply this delta."""
        self._writer.send(_DELTA, delta.places, delta.values)

    def launch(self, key: Hashable) -> None:
        """The followers launch this segment."""
        self._writer.send(self._numbers[key])

    def command(self, name: str, *args: Any) -> None:
        """The followers carry out one of their commands, after the launches so far. args: as JSON has them."""
        text = json.dumps([name, *args]).encode()
        self._writer.send(_COMMAND, np.frombuffer(text + b" " * (-len(text) % 4), np.int32))

    def end(self) -> None:
        """The followers leave their loops."""
        self._writer.send(_END)


def follow(runner: Runner, reader: Reader, commands: Mapping[str, Callable[..., object]]) -> None:
    """Do what the leader says, until it says that it ends. The runner must be recorded. commands: by their names."""
    keys, rows = list(runner.graphs.keys()), runner.model.batch.rows
    while True:
        number, words = reader.take()
        if number >= 0:
            runner.graphs.launch(keys[number])
        elif number == _DELTA:
            half = len(words) // 2
            rows.send(Delta(words[:half], words[half:]), runner.stream)
        elif number == _COMMAND:
            name, *args = json.loads(words.tobytes())
            commands[name](*args)
        else:
            return
