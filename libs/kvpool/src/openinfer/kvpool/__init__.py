"""A paged KV cache pool: blocks, leases, a prefix index and eviction. Pure logic, no dependency."""

from .errors import IntegrityError, InvalidGroup, InvalidTokens, LeaseReleased, PoolError
from .group import BlockState, Group
from .hashing import hash_blocks
from .lease import Lease
from .pool import Pool, PoolStats

__all__ = [
    "BlockState",
    "Group",
    "IntegrityError",
    "InvalidGroup",
    "InvalidTokens",
    "Lease",
    "LeaseReleased",
    "Pool",
    "PoolError",
    "PoolStats",
    "hash_blocks",
]
