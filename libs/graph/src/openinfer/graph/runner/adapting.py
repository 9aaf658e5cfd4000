"""AdapterQueue: sequences with an adapter (LoRA) wait here until their adapter has a place on the device."""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from openinfer.graph.runner.sampling import Sampling
from openinfer.kernels.lora.adapters import Adapter, Adapters
from openinfer.scheduler import Seq
from openinfer.tensor import Stream

Array = np.ndarray[Any, Any]


class AdapterSlots:
    """Which of `count` places, numbered from 1, has which key. Pure logic.

    A key that gets a place evicts the least recently used key that is not pinned. If all are pinned, it claims the
    place that was used least recently: keys there get no new pins, so that the place becomes free.
    """

    def __init__(self, count: int) -> None:
        self._keys: dict[Hashable, int] = {}
        self._pins = dict.fromkeys(range(1, count + 1), 0)
        self._used = dict.fromkeys(self._pins, 0)
        self._now = 0
        self._claims: dict[int, Hashable] = {}

    def take(self, key: Hashable) -> tuple[int, bool] | None:
        """Pin the key's place: (place, whether its content must be brought). None: the key has to wait."""
        place = self._keys.get(key)
        if place is not None:
            return None if place in self._claims else (self._pin(place), False)
        free = [p for p, pins in self._pins.items() if not pins and p not in self._claims]
        if not free:
            unclaimed = [p for p in self._pins if p not in self._claims]
            if unclaimed and key not in self._claims.values():
                self._claims[min(unclaimed, key=self._used.__getitem__)] = key
            return None
        place = min(free, key=self._used.__getitem__)
        self._keys = {k: p for k, p in self._keys.items() if p != place}
        self._keys[key] = place
        return self._pin(place), True

    def release(self, place: int) -> None:
        """Take one pin away."""
        self._pins[place] -= 1

    def forget_claims(self) -> None:
        """Before the keys that wait are asked about again, in their order."""
        self._claims = {}

    def _pin(self, place: int) -> int:
        self._now += 1
        self._used[place] = self._now
        self._pins[place] += 1
        return place


class AdapterQueue:
    """The adapters of sequences, from `wait` to `end`. A place is filled on `stream`, after the steps that are there
    and before those that follow. Sequences get places in the order of their arrival, as far as places allow.

    tell: called with place and values before a place is filled, for the followers to do the same.
    """

    def __init__(
        self, adapters: Adapters, stream: Stream, tell: Callable[[int, Array], None] | None = None
    ) -> None:
        self._adapters, self._stream, self._tell = adapters, stream, tell
        self._places = AdapterSlots(adapters.sizes.places)
        self._waiting: deque[Seq[Sampling]] = deque()
        self._changed = False
        self.running: Counter[str] = Counter()
        """Sequences with a place, by the name of their adapter."""
        self.waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, seq: Seq[Sampling]) -> None:
        """A sequence whose owner has an adapter."""
        self._waiting.append(seq)
        self.waiting[_adapter(seq).name] += 1
        self._changed = True

    def ready(self) -> list[Seq[Any]]:
        """The sequences that get their place now; `owner.place` has its number."""
        if not self._changed:
            return []
        self._changed = False
        self._places.forget_claims()
        ready, rest = [], deque[Seq[Sampling]]()
        for seq in self._waiting:
            adapter = _adapter(seq)
            taken = self._places.take(adapter)
            if taken is None:
                rest.append(seq)
                continue
            seq.owner.place, fresh = taken
            if fresh:
                if self._tell is not None:
                    self._tell(seq.owner.place, adapter.values)
                self._adapters.put(seq.owner.place, adapter.values, self._stream)
            self.waiting[adapter.name] -= 1
            self.running[adapter.name] += 1
            ready.append(seq)
        self._waiting = rest
        return ready

    def drop(self, seq_id: int) -> bool:
        """Forget a sequence that waits; False if none has this id."""
        for seq in self._waiting:
            if seq.id == seq_id:
                self._waiting.remove(seq)
                self.waiting[_adapter(seq).name] -= 1
                self._changed = True
                return True
        return False

    def end(self, seq: Seq[Sampling]) -> None:
        """A sequence has ended; nothing of one without an adapter."""
        if seq.owner.place:
            self.running[_adapter(seq).name] -= 1
            self._places.release(seq.owner.place)
            seq.owner.place = 0
            self._changed = True


def _adapter(seq: Seq[Sampling]) -> Adapter:
    if seq.owner.adapter is None:
        raise TypeError(f"sequence {seq.id} has no adapter")
    return seq.owner.adapter
