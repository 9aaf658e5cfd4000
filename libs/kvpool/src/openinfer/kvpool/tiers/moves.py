"""Copies and loads of blocks that are under way between the tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..loading import Load, Piece
from .host import Slot
from .mover import Ticket
from .stats import LoadTime


@dataclass(slots=True, eq=False)
class Copies:
    """A batch of copies, and the slots that they use until it has ended."""

    ticket: Ticket
    slots: list[Slot]


@dataclass(slots=True, eq=False)
class Loading:
    """A load under way. begun, deadline: by time.monotonic(). saves: number of the last batch of copies before it. That
    batch must end first, because a step may then write a block that the load could not fill."""

    load: Load
    waiting: list[Piece]
    begun: float
    deadline: float
    saves: int
    from_disk: int = 0
    from_peer: int = 0
    copies: list[Copies] = field(default_factory=list)

    def time(self, now: float) -> LoadTime:
        """The time of a load that has ended."""
        counts = self.from_disk, self.from_peer, len(self.load.failed)
        return LoadTime(now - self.begun, len(self.load.pieces), *counts)
