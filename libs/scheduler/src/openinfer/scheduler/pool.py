"""Pool and Lease: the KV block allocator that the loop asks for blocks. `openinfer.kvpool.Pool` implements both."""

from collections.abc import Sequence
from typing import Protocol


class Lease(Protocol):
    """One sequence's blocks."""

    @property
    def num_cached(self) -> int:
        """Tokens of the prefix that are computed: fewer than those acquired for. Grows when a load ends."""

    @property
    def num_loadable(self) -> int:
        """Tokens after num_cached that load() would bring from elsewhere: host memory, a disk, another process. Read it
        before the first reserve(). 0: there is nothing to load."""

    def load(self, leave: float = 0.0) -> bool:
        """Take blocks for the num_loadable tokens and start to fill them. Until Pool.poll() returns the lease it may
        only be released. leave: as in reserve(). False: no room, nothing changed."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the blocks held."""

    def block_table(self, group: int = 0) -> Sequence[int]:
        """Block ids of a group."""

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]] | None:
        """Grow until num_tokens tokens fit. Returns (group, index of the first new entry, new block ids) for each group
        that grew. None: the pool has too few blocks, and nothing changed.

        Groups without a window grow to kept_tokens, if that is more: a prompt passes through a window chunk by chunk.
        leave: the part of a group's blocks, 0..1, that must stay free."""

    def reach(self, leave: float = 0.0) -> int:
        """The largest num_tokens for which reserve(num_tokens, leave=leave) has room now."""

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """The first num_confirmed tokens are computed. Their whole blocks may become findable. The lease gives back
        blocks that have left a window."""

    def release(self) -> None:
        """Give all blocks back. Blocks of a load come back when the load has ended."""


class Pool(Protocol):
    """Makes leases. The loop uses nothing else of a pool."""

    @property
    def num_groups(self) -> int:
        """Groups 0..num_groups-1, each with a block table."""

    @property
    def num_free(self) -> int:
        """Blocks that the pool could hand out now, cached ones included."""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that one lease can hold when it has the pool to itself, and reserves and commits
        token by token. sys.maxsize: no limit."""

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> Lease:
        """A lease that holds the longest cached prefix of tokens. At least one token is left to compute. hashes: names
        of the first blocks, if the caller has them."""

    def poll(self, wait_s: float | None = 0.0) -> Sequence[Lease]:
        """Leases whose load has ended, each once. A lease that was released meanwhile is among them.

        num_cached has grown by the tokens that came. A load may fail in part or in whole: the missing tokens are
        left to compute. Waits up to wait_s seconds (None: no limit) if no load has ended; returns at once if
        nothing loads. The loop calls it in every turn while something loads."""
