"""SlowLoads: loads of cached blocks from host memory or a disk that take longer than they should."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from openinfer.graph.watch import FLOOR_S, Bound, Watch

FACTOR = 3.0
"""A load is slow above this many times the usual time of a block."""


class _LoadTime(Protocol):
    """A load that has ended; that of openinfer.kvpool.tiers is one. Numbers of blocks: all, those that came from the
    disk or from another engine, and those that did not come."""

    seconds: float
    blocks: int
    from_disk: int
    from_peer: int
    failed: int


@dataclass(slots=True)
class SlowLoads:
    """Compares each load with those before it that came from the same tiers, and had about as many blocks. times: where
    another object puts the loads that have ended; `look` takes them out."""

    watch: Watch
    times: deque[Any]
    _bounds: dict[tuple[bool, bool, int], Bound] = field(default_factory=dict)

    def look(self) -> None:
        """Judge the loads that have ended."""
        while self.times:
            self._ended(self.times.popleft())

    def _ended(self, load: _LoadTime) -> None:
        key = load.from_disk > 0, load.from_peer > 0, load.blocks.bit_length()
        bound = self._bounds.setdefault(key, Bound(FACTOR))
        usual = bound.mean
        late = bound.take(load.seconds) and load.seconds - usual > 10 * FLOOR_S
        if not late and not load.failed:
            return
        tiers = (("the disk", load.from_disk), ("another engine", load.from_peer))
        slow_tiers = [f"{count} of its blocks from {tier}" for tier, count in tiers if count]
        line = f"tier: a load of {load.blocks} blocks took {load.seconds * 1e3:.0f} ms"
        line += f" where {usual * 1e3:.0f} ms are usual" if bound.count > 1 else ""
        line += f", {' and '.join(slow_tiers) or 'all from host memory'}"
        line += f"; {load.failed} did not come and are computed" if load.failed else ""
        self.watch.find("tier", line, seconds=load.seconds, blocks=load.blocks, from_disk=load.from_disk)
