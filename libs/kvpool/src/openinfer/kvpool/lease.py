"""Lease: the blocks of one sequence."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Self

from .errors import InvalidGroup, InvalidTokens, LeaseLoading, LeaseReleased
from .hashing import Chain
from .loading import BlockLoads
from .matching import Index
from .parts import Copy, Pages, Snapshots


class Lease:
    """The blocks of one sequence. `Pool.acquire` makes it; the caller owns it and must `release()` it.

    It is also a context manager. A lease that is dropped without a release releases itself and warns (ResourceWarning).
    """

    num_cached: int
    """Number of first tokens that are cached, so computed already. Set by acquire and at the end of a load."""
    num_tokens: int
    """Tokens that fit into the blocks of every group; sys.maxsize in a pool without pages."""
    hashes: list[bytes]
    """Names of the first whole blocks of `pool.hash_block_size` tokens, as far as they were needed. Read only."""
    copies: list[Copy]
    """Copies to carry out first; set by the first reserve that grows, if the cached prefix ends in a snapshot."""

    def __init__(
        self, index: Index, loads: BlockLoads, chain: Chain, tokens: Sequence[int], priority: int
    ) -> None:
        self.num_cached = 0
        self.num_tokens = 0
        self.hashes = chain.names
        self.copies = []
        self._index, self._loads = index, loads
        self._parts = index.parts(priority)
        self._chain = chain
        self._num_queried: int | None = len(tokens)  # None: counted, by the first reserve
        self._tokens: Sequence[int] = tokens  # until the first reserve
        self._priority = priority
        self._num_loadable: int | None = None  # not looked up yet
        self._loading = False
        self._num_committed = 0
        self._has_sources = False  # until the first commit that goes further
        self._released = False
        if index.enabled and len(tokens) > 1:
            self._attach(*index.match(tokens, chain, len(tokens) - 1))

    def _attach(self, num_cached: int, tables: Sequence[list[int]], sources: Sequence[int]) -> None:
        self.num_cached = self._num_committed = num_cached
        self._has_sources = any(sources)
        for part, table, source in zip(self._parts, tables, sources, strict=True):
            if isinstance(part, Pages):
                part.attach(table)
            elif source:
                part.attach(num_cached, source)
        self.num_tokens = min([part.num_tokens for part in self._parts])

    @property
    def num_loadable(self) -> int:
        """Tokens after num_cached that load() would bring, 0 after the first reserve. Looked up once, O(blocks)."""
        if self._num_loadable is None:
            end = self._loads.reach(self._tokens, self._chain) if self._num_queried is not None else 0
            self._num_loadable = max(0, end - self.num_cached)
        return self._num_loadable

    def load(self, leave: float = 0.0) -> bool:
        """Start to load num_loadable tokens: allocate their blocks, and keep their cached blocks from eviction.

        Until Pool.poll() returns the lease, the caller may only release it. leave: as in reserve(). False: there is no
        room or nothing to load, and nothing changed. Raises LeaseReleased, LeaseLoading.
        """
        self._check_live()
        if not self.num_loadable:
            return False
        end = self.num_cached + self.num_loadable
        self._loading = self._loads.begin(self, self._tokens, self._chain, end, leave)
        return self._loading

    def landed(self) -> None:
        """The load has ended: look the prefix up again, and start from it."""
        self._loading = False
        if self._released:
            return
        old, self._parts = self._parts, self._index.parts(self._priority)
        before = self.num_cached
        self._attach(*self._index.match(self._tokens, self._chain, len(self._tokens) - 1))
        self._loads.stats.loaded_tokens += max(0, self.num_cached - before)
        for part in old:
            part.release()
        self._num_loadable = 0

    def block_table(self, group: int = 0) -> Sequence[int]:
        """Block ids of a group in the order of the tokens; 0, the padding block, where the window has moved past. In a
        group of snapshots: the one live block. The view is live: copy it to keep it. Raises InvalidGroup."""
        try:
            return self._parts[group].table
        except IndexError:
            raise InvalidGroup(
                f"there is no group {group}; the pool has groups 0..{len(self._parts) - 1}"
            ) from None

    def reserve(
        self, num_tokens: int, kept_tokens: int = 0, leave: float = 0.0
    ) -> list[tuple[int, int, list[int]]] | None:
        """Grow the tables until `num_tokens` tokens in all fit.

        kept_tokens: groups without a window grow until this number fits, if that is more. So the first chunk
        reserves the whole prompt, while windows grow chunk by chunk. leave: the part of a group's blocks, 0..1,
        that must be free afterwards in groups of pages that grow.

        Returns (group, index of the first new entry, new block ids) for each group that grew. None: no room, and
        nothing changed. Raises LeaseReleased, LeaseLoading.
        """
        self._check_live()
        if num_tokens <= self.num_tokens and kept_tokens <= self.num_tokens:
            self._count_query()
            return []
        wanted = []
        for group, part in enumerate(self._parts):
            count = part.missing(num_tokens, kept_tokens)
            if count > 0:
                if count > part.room(leave):
                    return None
                wanted.append((group, part, count))
        grown = [(group, len(part.table), part.grow(count)) for group, part, count in wanted]
        for group, part, _ in wanted:
            if isinstance(part, Snapshots) and part.source:
                self.copies.append(Copy(group, part.source, part.table[0], self.num_cached))
        self.num_tokens = min([part.num_tokens for part in self._parts])
        self._count_query()
        return grown

    def reach(self, leave: float = 0.0) -> int:
        """The largest num_tokens for which reserve(num_tokens, leave=leave) has room now."""
        return min([part.reach(leave) for part in self._parts])

    def _count_query(self) -> None:
        # Count here, not in acquire: a sequence may be looked up many times before there is room for it.
        if self._num_queried is not None:
            self._loads.stats.query_tokens += self._num_queried
            self._loads.stats.hit_tokens += self.num_cached
            self._num_queried, self._tokens = None, ()
            self._num_loadable = 0

    def snapshot(self, boundary: int) -> list[Copy] | None:
        """Room for a snapshot of the state after `boundary` tokens, a multiple of `pool.boundary_size`.

        Returns one copy for each group of snapshots. The caller carries the copies out when the live state has seen
        exactly this number of tokens; the snapshots are findable once commit() has confirmed as many. A second call
        with the same boundary returns the same copies. None: no room; go on without a snapshot. Raises
        LeaseReleased, LeaseLoading; InvalidTokens for other boundaries, or if nothing is reserved yet.
        """
        self._check_live()
        if boundary % self._index.step or not self._num_committed <= boundary <= self.num_tokens:
            raise InvalidTokens(
                f"cannot take a snapshot at {boundary} tokens: give a multiple of {self._index.step} "
                f"from {self._num_committed} (committed) to {self.num_tokens} (reserved)"
            )
        states = [(group, part) for group, part in enumerate(self._parts) if isinstance(part, Snapshots)]
        if not all(part.table for _, part in states):
            raise InvalidTokens("there is no live state yet: reserve more than the cached tokens first")
        if not self._index.enabled or any(not part.has_room(boundary) for _, part in states):
            return None
        return [Copy(group, part.table[0], part.snapshot(boundary), boundary) for group, part in states]

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """Confirm that the first `num_confirmed` of `tokens` are computed.

        Whole blocks of confirmed tokens become findable, and so do snapshots at confirmed boundaries. The lease
        gives back blocks that the next token's window does not reach. If another lease has registered the same
        content, this block stays private as a duplicate; it takes the registration over if the other is released
        first. A lease hashes each block once. Raises LeaseReleased, LeaseLoading, InvalidTokens.
        """
        self._check_live()
        if num_confirmed > len(tokens) or self.num_cached < num_confirmed > self.num_tokens:
            raise InvalidTokens(
                f"cannot commit {num_confirmed} tokens: {len(tokens)} given, "
                f"room reserved for {self.num_tokens}"
            )
        if num_confirmed < self._num_committed:
            return
        self._num_committed = num_confirmed
        if self._has_sources and num_confirmed > self.num_cached:
            self._has_sources = False
            for part in self._parts:
                if isinstance(part, Snapshots):
                    part.drop_source()
        for part in self._parts:
            if num_confirmed >= part.due:
                part.commit(self._chain, tokens, num_confirmed)

    def release(self) -> None:
        """Give all blocks back: registered blocks stay cached, the others are free. Idempotent."""
        if self._released:
            return
        self._released = True
        for part in self._parts:
            part.release()
        self.num_tokens = 0
        self.copies.clear()

    def held(self, group: int) -> Iterator[int]:
        """Blocks in use, for audits."""
        return self._parts[group].held()

    def _check_live(self) -> None:
        if self._released:
            raise LeaseReleased("this lease was released; acquire a new one")
        if self._loading:
            raise LeaseLoading("this lease loads; wait until Pool.poll() names it, or release it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            warnings.warn(
                f"a lease of {self.num_tokens} tokens was never released", ResourceWarning, stacklevel=2
            )
            self.release()
