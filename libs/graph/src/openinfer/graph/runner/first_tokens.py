"""FirstTokens: how long requests wait for their first token, beside what requests like them waited for."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from openinfer.graph.watch import FLOOR_S, Bound, Watch
from openinfer.scheduler import Event, Finished, Scheduled, Stats, Tokens

KEPT = 1024
FACTOR = 3.0
"""A first token is late above this many times the usual wait."""


@dataclass(slots=True)
class FirstTokens:
    """Reads the events of a step loop. Waits are compared by the powers of two of prompt tokens, and of older requests
    whose first token came meanwhile. `Seq.arrival` must be a time of `clock`."""

    watch: Watch
    clock: Callable[[], float] = time.monotonic
    _bounds: dict[tuple[int, int], Bound] = field(default_factory=dict)
    _begun: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By request that waits for its first token: when it got a row, preemptions so far."""
    _came: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Times of the last first tokens, and the arrivals of their requests."""

    def events(self, events: Sequence[Event[Any, Any]], stats: Stats) -> None:
        """The events of one turn of the loop, and its numbers after it."""
        self.watch.note(waiting=stats.waiting, running=stats.running, preemptions=stats.preemptions)
        for event in events:
            if isinstance(event, Tokens):
                if self._begun:
                    self._tokens(event, stats)
            elif isinstance(event, Scheduled):
                self._begun[event.seq.id] = self.clock(), stats.preemptions
            elif isinstance(event, Finished):
                self._begun.pop(event.seq.id, None)

    def _tokens(self, event: Tokens[Any, Any], stats: Stats) -> None:
        for row in reversed(event.rows):
            if row.start is None:  # decode rows stand first
                break
            if row.emits and row.seq not in event.dead and row.seq.id in self._begun:
                self._first(row.seq, stats)

    def _first(self, seq: Any, stats: Stats) -> None:
        now, (begun, preemptions) = self.clock(), self._begun.pop(seq.id)
        meanwhile = takewhile(lambda one: one[0] > seq.arrival, reversed(self._came))
        others = sum(arrival <= seq.arrival for _, arrival in meanwhile)
        self._came.append((now, seq.arrival))
        key = seq.prompt_len.bit_length(), others.bit_length()
        bound = self._bounds.setdefault(key, Bound(FACTOR))
        took, usual = now - seq.arrival, bound.mean
        if bound.take(took) and took - usual > 10 * FLOOR_S:
            queued, more = begun - seq.arrival, stats.preemptions - preemptions
            what = f"the first token of request {seq.id} took {took * 1e3:.0f} ms"
            alike = (
                f"{usual * 1e3:.0f} ms are usual for {seq.prompt_len} tokens after {others} older requests"
            )
            where = f"{queued * 1e3:.0f} ms of it without a row, then {more} preemptions"
            self.watch.find(
                "first token", f"{what} where {alike}: {where}", prompt_tokens=seq.prompt_len, ttft_s=took
            )
