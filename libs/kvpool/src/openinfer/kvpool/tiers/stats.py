"""TierStats: what became of blocks outside the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
