"""PoolStats: counters of a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made. Blocks are summed over groups."""

    allocated: int = 0
    """Blocks handed out."""
    evicted: int = 0
    """Cached blocks dropped to make room."""
    registered: int = 0
    """Blocks that became findable."""
    query_tokens: int = 0
    """Tokens asked for by leases that went on to reserve."""
    hit_tokens: int = 0
    """The part of these tokens that was found in the prefix cache, loaded ones included."""
    loaded_tokens: int = 0
    """Tokens that loads added to the cached prefix of their lease."""
    loaded: int = 0
    """Blocks that a loader brought."""
    failed: int = 0
    """Blocks that a loader was asked for and did not bring."""
