"""Pool and Lease: where a sequence's blocks come from. `openinfer.kvpool.Pool` is one such pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Lease(Protocol):
    """One sequence's blocks."""

    @property
    def num_cached(self) -> int:
        """Tokens found computed, < the tokens acquired for. Pool.poll() may raise it, after load()."""

    @property
    def num_loadable(self) -> int:
        """Tokens after num_cached that load() would bring from elsewhere: memory of the host, a disk, another process.
        0: none. Asked before the first reserve()."""

    def load(self, leave: float = 0.0) -> bool:
        """Take blocks for the num_loadable tokens, and begin to fill them. Pool.poll() names the lease when that has
        ended; until then it may only be released. leave: as in reserve(). False: no room, and nothing changed."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the blocks held."""

    def block_table(self, group: int = 0) -> Sequence[int]:
        """Block ids of a group."""

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]] | None:
        """Grow to num_tokens in all: (group, first new index, new ids) by group; None if dry: nothing changed.
        Groups that keep all of a sequence grow to kept_tokens, if that is more: windows need not have room for a
        prompt that only passes through them. leave: the part of a group's blocks, 0..1, that has to stay free."""

    def reach(self, leave: float = 0.0) -> int:
        """The most num_tokens for which reserve(num_tokens, leave=leave) has room now."""

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """The first num_confirmed of tokens are computed for certain. Blocks that a window has left behind are given
        back."""

    def release(self) -> None:
        """Give everything back. What is being loaded comes back when the load has ended."""


class Pool(Protocol):
    """Where leases come from. openinfer.kvpool.Pool is one; the loop knows only this much."""

    @property
    def num_groups(self) -> int:
        """Groups 0..num_groups-1, each with a block table."""

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now."""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that a lease can hold when it is alone, reserved token by token with commits between.
        sys.maxsize: no end."""

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> Lease:
        """A lease holding what is cached of tokens, at least one token short of all. `hashes` may name fewer
        blocks than tokens have."""

    def poll(self, wait_s: float | None = 0.0) -> Sequence[Lease]:
        """Leases whose load has ended, each once; also those that were released meanwhile, whose blocks are back now.
        num_cached says what is there: a load that failed, in whole or in part, is no error, and its tokens are left to
        compute. Waits up to wait_s seconds (None: no limit) for the end of a load if none has ended, and not at all
        if nothing loads. Called in every turn while something loads."""
