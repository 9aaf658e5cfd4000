"""Copies and loads of blocks that are under way between the tiers."""

from collections import deque
from dataclasses import dataclass, field

from ..loading import Load, Piece
from .host import Slot
from .mover import Ticket, TierCopy
from .told import LoadTime

PIECES, FIRST_PIECES = 256, 64
"""Copies that are begun in a turn of a load, and in its first turn, which evicts too. To begin more would hold up the
next step."""
LEAVING_BYTES = 128 << 20
"""Bytes on their way out for a load at most. A block that the next step overwrites leaves behind them."""

BACKLOG_BYTES = 1 << 30
"""Bytes that wait for the disk at most, so that an engine ends soon."""

Save = tuple[TierCopy, Slot]
"""A block on its way to a record."""


@dataclass(slots=True, eq=False)
class Copies:
    """A batch of copies, and the slots that they use until it has ended."""

    ticket: Ticket
    slots: list[Slot]


@dataclass(slots=True, eq=False)
class Loading:
    """A load under way. begun, deadline: by time.monotonic(). saves: number of the last batch of copies that made room
    for it. That batch must end first, because a step may then write a block that the load could not fill. swaps: what
    is to be copied out of its blocks first, by block. expected: records that it uses, by piece."""

    load: Load
    waiting: deque[Piece]
    begun: float
    deadline: float
    saves: int
    swaps: dict[tuple[int, int], Save]
    expected: dict[tuple[int, bytes], Slot]
    reading: dict[tuple[int, bytes], Piece] = field(default_factory=dict)
    """Pieces whose records are on their way to host memory."""
    from_disk: int = 0
    from_peer: int = 0
    copies: deque[Copies] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        """Whether its pieces have come, or have failed to."""
        return not (self.waiting or self.reading or self.copies or self.swaps)

    def was_read(self, slot: Slot) -> bool:
        """A read has ended. Returns whether it was for this load, whose piece is then looked at next."""
        piece = self.reading.pop((slot.group, slot.name), None)
        if piece is not None:
            self.waiting.appendleft(piece)
        return piece is not None

    def stop_reading(self) -> None:
        """Look at the pieces whose records do not come."""
        self.waiting += self.reading.values()
        self.reading.clear()

    def time(self, now: float) -> LoadTime:
        """The time of a load that has ended."""
        counts = self.from_disk, self.from_peer, len(self.load.failed)
        return LoadTime(now - self.begun, len(self.load.pieces), *counts)
