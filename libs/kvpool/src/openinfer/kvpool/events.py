"""What a pool tells: its counters, and events for prefix-aware routers (which blocks became findable or were evicted).

Field names are those that inference engines publish and routers read. The events are plain dataclasses: the publisher
chooses the transport, for example msgpack over ZeroMQ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .hashing import split_salt


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became findable, each the child of the one before it."""

    block_hashes: list[bytes]
    """Names, as hash_blocks gives them (every block_size / hash_block_size-th)."""
    parent_block_hash: bytes | None
    """Name of the block before the first. None for a first block and for snapshots."""
    token_ids: list[int]
    """Tokens of these blocks. Empty for a snapshot."""
    block_size: int
    lora_id: int | None = None
    """Always None: adapters have names."""
    medium: str | None = "GPU"
    """The place of the blocks: GPU, CPU or DISK."""
    lora_name: str | None = None
    """The adapter (LoRA) of the sequence, as adapter_salt names it."""
    group_idx: int = 0
    salt: bytes = b""
    """The salt of the sequence without its adapter's part. Others do not find these blocks."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks were evicted."""

    block_hashes: list[bytes]
    medium: str | None = "GPU"
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The pool dropped all cached blocks of all groups."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events since the last batch, in order."""

    ts: float
    """Seconds since the epoch, when the batch was taken."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = field(default_factory=list)
    data_parallel_rank: int | None = None


class EventLog:
    """Events of one pool that were not taken yet."""

    def __init__(self) -> None:
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(
        self,
        group: int,
        parent: bytes | None,
        names: list[bytes],
        tokens: Sequence[int],
        block_size: int,
        salt: bytes = b"",
    ) -> None:
        """A run of blocks became findable."""
        own, adapter = split_salt(salt)
        self._events.append(
            BlockStored(names, parent, list(tokens), block_size, lora_name=adapter, group_idx=group, salt=own)
        )

    def removed(self, group: int, names: list[bytes]) -> None:
        """Blocks were evicted. Joins the event before, if that is an eviction of the same group."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group and last.medium == "GPU":
            last.block_hashes.extend(names)
        else:
            self._events.append(BlockRemoved(names, group_idx=group))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        taken, self._events = self._events, []
        return taken


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
