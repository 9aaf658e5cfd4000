"""What tiers tell: events for routers, counters of blocks, and how long loads took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..events import BlockRemoved, BlockStored
from ..group import Group


@dataclass(slots=True)
class TierStats:
    """Counters of blocks since the start."""

    saved: int = 0
    """Blocks that left the pool for host memory."""
    dropped: int = 0
    """Blocks that left the pool and were not saved, because all host memory was in use."""
    from_host: int = 0
    """Blocks copied from host memory into the pool, those that the disk brought there included."""
    from_disk: int = 0
    """Blocks read from the disk."""
    to_disk: int = 0
    """Blocks written to the disk."""
    not_written: int = 0
    """Blocks that were not written, because the disk was full, broken or too slow."""
    from_peer: int = 0
    """Blocks that peers sent."""
    failed: int = 0
    """Blocks that a load did not bring: gone, damaged or too late. Their tokens were computed."""


class LoadTime(NamedTuple):
    """A load that has ended."""

    seconds: float
    """From its begin to its end."""
    blocks: int
    from_disk: int
    """Blocks that were read from the disk."""
    from_peer: int
    """Blocks that another engine sent."""
    failed: int
    """Blocks that did not come, and are computed."""


Medium = Literal["CPU", "DISK"]


class Told:
    """Blocks that became findable in a tier, or are no longer. keep: False keeps no event."""

    def __init__(self, groups: Sequence[Group], *, keep: bool) -> None:
        self._groups, self._keep = groups, keep
        self._events: list[BlockStored | BlockRemoved] = []

    def stored(self, group: int, names: Sequence[bytes], medium: Medium) -> None:
        """Blocks of a group are in the tier."""
        if self._keep and names:
            size = self._groups[group].block_size
            self._events.append(BlockStored([*names], None, [], size, medium=medium, group_idx=group))

    def removed(self, gone: list[tuple[int, bytes]], medium: Medium) -> None:
        """These blocks, each a group and a name, are no longer in the tier. Clears the list."""
        if self._keep:
            self._events += [BlockRemoved([name], medium=medium, group_idx=group) for group, name in gone]
        gone.clear()

    def take(self) -> list[BlockStored | BlockRemoved]:
        taken, self._events = self._events, []
        return taken
