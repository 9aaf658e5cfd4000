"""Group: one kind of state in equally sized blocks; BlockState: the life of a block."""

import sys
from dataclasses import dataclass
from enum import IntEnum

from .errors import InvalidGroup


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of state, kept in `num_blocks` blocks. Lengths are tokens of the sequence, always.

    By default a block is a page: the state of `block_size` tokens. A sequence keeps all its pages. Pages also hold a
    compressed cache: 16 entries that cover 128 tokens each are a block of 2,048 tokens.

    window: the token at position p needs only the `window` tokens before p. An attention window of W that counts the
    token itself needs W - 1. The lease gives back pages that fall out of the window.

    snapshots: a block is the whole state of a sequence after some token (recurrent, convolution). Each sequence has one
    live block. `Lease.snapshot` keeps copies at multiples of `block_size`.

    Block ids of a group are 0 .. num_blocks-1. Block 0 is padding: dead rows write to it, and the pool never hands it
    out. `block_bytes`: bytes of a block on the device, over all layers; the pool does not use it. Raises InvalidGroup.
    """

    name: str
    block_size: int
    num_blocks: int
    block_bytes: int = 0
    window: int | None = None
    snapshots: bool = False

    def __post_init__(self) -> None:
        complaint = None
        if self.block_size < 1:
            complaint = f"block_size is {self.block_size}, it must be at least 1 token"
        elif self.num_blocks < 2:
            complaint = f"num_blocks is {self.num_blocks}, it must be at least 2 (block 0 is padding)"
        elif self.block_bytes < 0:
            complaint = f"block_bytes is {self.block_bytes}, it cannot be negative"
        elif self.window is not None and self.window < 1:
            complaint = f"window is {self.window}, it must be at least 1 token (or None: all are kept)"
        elif self.window is not None and self.snapshots:
            complaint = f"it has a window of {self.window} and snapshots; a snapshot has no window, drop one"
        if complaint:
            raise InvalidGroup(f"group {self.name!r}: {complaint}")

    def num_needed(self, num_tokens: int) -> int:
        """Number of last blocks that a sequence needs to continue after num_tokens tokens, a multiple of block_size."""
        if self.snapshots:
            return 1
        first = 0 if self.window is None else max(num_tokens - self.window, 0) // self.block_size
        return num_tokens // self.block_size - first

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits into this group when it is alone there. sys.maxsize for snapshots, and for a
        window if the window's pages and the page being written fit."""
        num_blocks = self.num_blocks - 1
        if self.snapshots or (self.window is not None and num_blocks > -(-self.window // self.block_size)):
            return sys.maxsize
        return num_blocks * self.block_size


class BlockState(IntEnum):
    """The life of a block (`Pool.block_state`). The pool evicts only CACHED blocks.

    FREE -> PRIVATE -> SHARED <-> CACHED -> FREE, and PRIVATE -> DUPLICATE -> SHARED or FREE.
    """

    PADDING = 0
    """Block 0."""
    FREE = 1
    """No lease uses the block, and it holds nothing."""
    PRIVATE = 2
    """One lease uses the block. It is not complete, or not confirmed yet."""
    DUPLICATE = 3
    """In use and complete. Another block with the same content is registered."""
    SHARED = 4
    """In use and registered: acquire() finds it."""
    CACHED = 5
    """Not in use and registered: acquire() finds it, and the pool evicts it when it needs blocks."""
