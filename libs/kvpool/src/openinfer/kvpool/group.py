"""What a pool is made of: groups of equally sized blocks, and the life of a block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .errors import InvalidGroup


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of state, kept in `num_blocks` blocks of `block_size` tokens each.

    Block ids of a group are 0 .. num_blocks-1. Block 0 is the padding block: dead and padding rows write
    there, and it is never handed out. `block_bytes` is what a block takes on the device (all layers); the
    pool only carries it.
    """

    name: str
    block_size: int
    num_blocks: int
    block_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidGroup(
                f"group {self.name!r}: block_size is {self.block_size}, it must be at least 1 token"
            )
        if self.num_blocks < 2:
            raise InvalidGroup(
                f"group {self.name!r}: num_blocks is {self.num_blocks}, it must be at least 2 "
                "(block 0 is padding)"
            )
        if self.block_bytes < 0:
            raise InvalidGroup(
                f"group {self.name!r}: block_bytes is {self.block_bytes}, it cannot be negative"
            )


class BlockState(IntEnum):
    """The life of a block. A lease moves it along; only CACHED blocks are ever evicted.

    FREE -> PRIVATE -> SHARED <-> CACHED -> FREE, and PRIVATE -> DUPLICATE -> SHARED or FREE.
    """

    PADDING = 0
    """Block 0."""
    FREE = 1
    """Nobody's; holds nothing."""
    PRIVATE = 2
    """In one lease; not complete, or not confirmed yet."""
    DUPLICATE = 3
    """In one lease, complete; a block with the same content is registered already."""
    SHARED = 4
    """In one lease or more, registered: acquire() finds it."""
    CACHED = 5
    """In no lease, registered: acquire() finds it, and it is evicted when blocks are needed."""
