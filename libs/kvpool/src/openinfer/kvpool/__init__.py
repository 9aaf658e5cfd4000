"""A paged KV cache pool: blocks, leases, a prefix index and eviction. Pure logic, no dependency."""

from .errors import (
    EvictionError,
    IntegrityError,
    InvalidBlocks,
    InvalidConfig,
    InvalidEviction,
    InvalidGroup,
    InvalidTiers,
    InvalidTokens,
    LeaseLoading,
    LeaseReleased,
    PeerRefused,
    PoolError,
)
from .events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, PoolStats
from .eviction import Eviction, Lineage, Lru, Priority, S3Fifo
from .group import BlockState, Group
from .hashing import adapter_salt, hash_blocks
from .hold import Hold
from .lease import Lease
from .ledger import Saver
from .loading import Load, Loader, Piece
from .named import make_eviction
from .parts import Copy
from .pool import Pool

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockState",
    "BlockStored",
    "Copy",
    "EventBatch",
    "Eviction",
    "EvictionError",
    "Group",
    "Hold",
    "IntegrityError",
    "InvalidBlocks",
    "InvalidConfig",
    "InvalidEviction",
    "InvalidGroup",
    "InvalidTiers",
    "InvalidTokens",
    "Lease",
    "LeaseLoading",
    "LeaseReleased",
    "Lineage",
    "Load",
    "Loader",
    "Lru",
    "PeerRefused",
    "Piece",
    "Pool",
    "PoolError",
    "PoolStats",
    "Priority",
    "S3Fifo",
    "Saver",
    "adapter_salt",
    "hash_blocks",
    "make_eviction",
]
