"""Pool: lends blocks to sequences, finds cached prefixes, and evicts cached blocks."""

import time
import weakref
from collections.abc import Sequence

from .errors import IntegrityError, InvalidGroup
from .events import EventBatch, EventLog, PoolStats
from .eviction import POLICIES, Factory
from .group import BlockState, Group
from .hold import Hold, with_ancestors
from .lease import Lease
from .ledger import Ledger, Saver
from .loading import BlockLoads, Loader
from .matching import Index
from .places import BlockPlaces


class Pool:
    """Blocks of one or several groups, handed out through leases, shared by prefix.

    A sequence holds one `Lease`. Its table has one entry for each block of each group, in the order of its tokens. The
    pool names complete and committed blocks by content, and another sequence with the same prefix starts from them. A
    named block without users stays cached until the pool needs its room. The pool is not thread-safe.

    groups: at least one, names unique. prefix_cache=False turns sharing off: nothing is hashed or kept. eviction:
    "lru", "lineage", "priority", "s3fifo", or a function that makes an `Eviction` for a group. events: keep events for
    `take_events`, which the caller must call then. loader: brings blocks that the pool does not have (`Lease.load`,
    `poll`). saver: takes blocks that it evicts; `tiers.Tiers` is both. Raises InvalidGroup.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        prefix_cache: bool = True,
        eviction: str | Factory = "lru",
        events: bool = False,
        loader: Loader | None = None,
        saver: Saver | None = None,
    ) -> None:
        _check(groups, eviction)
        self.groups = tuple(groups)
        self.prefix_cache = prefix_cache
        self.stats = PoolStats()
        make = POLICIES[eviction] if isinstance(eviction, str) else eviction
        self._events = EventLog() if events else None
        self._places = BlockPlaces()
        self._ledgers = [
            Ledger(group, index, make(group), self.stats, self._events, saver)
            for index, group in enumerate(groups)
        ]
        self._saver = saver
        self._index = Index(self._ledgers, enabled=prefix_cache)
        self.hash_block_size, self.boundary_size = self._index.unit, self._index.step
        self._loads = BlockLoads(self._index, loader, self.stats)
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # for check_integrity
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()  # for check_integrity

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.groups)

    @property
    def num_total(self) -> int:
        """Blocks that can be handed out, over all groups (padding blocks excluded)."""
        return sum(group.num_blocks - 1 for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks that the pool could hand out now, over all groups: free and cached blocks."""
        return sum(ledger.num_free for ledger in self._ledgers)

    def num_used(self, group: int = 0) -> int:
        """Blocks of a group that leases, holds and loads use. Cached blocks without a user do not count."""
        return self._ledgers[group].num_in_use

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that one lease can hold when it has the pool to itself. The sequence must reserve
        and commit in small chunks, so that windows move on. sys.maxsize: no limit."""
        return min(group.capacity_tokens for group in self.groups)

    @property
    def used_tokens(self) -> int:
        """Tokens that leases and holds occupy: the used part of the fullest group of pages, times `capacity_tokens`.

        In a pool of one group without a window this is used blocks times block size. Groups of snapshots do not
        count: a snapshot occupies the same room whatever the length of its sequence. O(groups).
        """
        part, capacity = 0.0, self.capacity_tokens
        for ledger in self._ledgers:
            if not ledger.group.snapshots:
                part = max(part, ledger.num_in_use / (ledger.group.num_blocks - 1))
        return min(round(part * capacity), capacity)

    def acquire(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        hashes: Sequence[bytes] | None = None,
        *,
        priority: int = 0,
    ) -> Lease:
        """A lease for a sequence that begins with `tokens`, holding the longest cached prefix.

        The prefix ends where *every* group has its part: all pages, the pages of the window, or a snapshot of that
        boundary. At least one token is left to compute, because its logits are needed. The call takes only cached
        blocks, so it never lacks room. hashes: hash_blocks(tokens, pool.hash_block_size, salt) or its first names,
        if the caller has them. priority: for eviction after the release. The caller owns the lease. Raises
        InvalidTokens if there are more hashes than whole blocks.
        """
        chain = self._index.chain(tokens, salt, hashes)
        lease = Lease(self._index, self._loads, chain, tokens, priority)
        self._leases.add(lease)
        return lease

    def poll(self, wait_s: float | None = 0.0) -> list[Lease]:
        """Leases whose load has ended, each once. A lease that was released meanwhile is among them.

        num_cached has grown by the tokens that came; the others are left to compute. Waits up to wait_s seconds
        (None: no limit) if no load has ended; returns at once if nothing loads.
        """
        return self._loads.poll(wait_s)

    def hold(self, blocks: Sequence[int], group: int = 0) -> Hold:
        """Keep complete blocks of a group, and their ancestors, unchanged until the hold is released.

        A copy to another tier needs this, because it reads the blocks without a lease. Raises InvalidBlocks.
        """
        ledger = self._ledgers[group]
        return self._keep(Hold([(ledger, with_ancestors(ledger, blocks))]))

    def pin(self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None) -> Hold:
        """Keep the longest cached prefix of `tokens` in whole blocks until the hold is released."""
        chain = self._index.chain(tokens, salt, hashes)
        if not self.prefix_cache:
            return self._keep(Hold([]))
        end, tables, sources = self._index.match(tokens, chain, len(tokens))
        found = zip(tables, sources, strict=True)
        blocks = [[block for block in (*table, source) if block] for table, source in found]
        return self._keep(Hold(list(zip(self._ledgers, blocks, strict=True)), end))

    def missing(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> list[list[bytes]]:
        """By group, the names of the blocks of `tokens` that are not cached and that a load could bring. O(blocks)."""
        return self._index.missing(tokens, self._index.chain(tokens, salt, hashes))

    def _keep(self, hold: Hold) -> Hold:
        self._holds.add(hold)
        return hold

    def take_events(self, data_parallel_rank: int | None = None) -> EventBatch | None:
        """The events since the last call: blocks that became findable or were evicted, those of the saver after the
        pool's. None: no event. A block of the saver whose tokens are not known has no event before it was loaded."""
        if self._events is None:
            return None
        found = self._events.take()
        if self._saver is not None:
            found = self._places.completed([*found, *self._saver.take_events()])
        return EventBatch(time.time(), found, data_parallel_rank) if found else None

    def cached(self, group: int = 0) -> list[tuple[bytes, int]]:
        """Name and block of all cached blocks of a group, a parent before its children. O(blocks)."""
        return self._ledgers[group].cached()

    def block_state(self, block: int, group: int = 0) -> BlockState:
        """The state of a block."""
        return self._ledgers[group].state(block)

    @property
    def idle(self) -> bool:
        """Whether no block is in use. Cached blocks are not."""
        return not any(ledger.num_in_use for ledger in self._ledgers)

    def evict(self, count: int) -> int:
        """Evict up to `count` cached blocks of each group, which the saver takes. Returns how many were evicted."""
        return sum(ledger.evict(count) for ledger in self._ledgers)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks, the saver's too, as for new weights. False: some are in use, and nothing changed."""
        if not self.idle:
            return False
        for ledger in self._ledgers:
            ledger.drop_cached()
        if self._saver is not None:
            self._saver.clear()
            self._saver.take_events()  # of blocks that are gone
        if self._events is not None:
            self._events.cleared()
        return True

    def check_integrity(self) -> None:
        """Check the books against leases, holds and loads. O(blocks). Raises IntegrityError."""
        leases, holds = list(self._leases), list(self._holds)
        problems: list[str] = []
        for group, ledger in enumerate(self._ledgers):
            uses = [block for lease in leases for block in lease.held(group)]
            uses += [block for hold in holds for block in hold.held(ledger)]
            uses += self._loads.held(group)
            problems += ledger.problems(uses)
        if problems:
            raise IntegrityError(problems)


def _check(groups: Sequence[Group], eviction: str | Factory) -> None:
    if not groups:
        raise InvalidGroup("a pool needs at least one group")
    if len({group.name for group in groups}) != len(groups):
        raise InvalidGroup(f"group names must differ, given {[group.name for group in groups]}")
    if isinstance(eviction, str) and eviction not in POLICIES:
        raise InvalidGroup(f"eviction is {eviction!r}; give one of {sorted(POLICIES)}, or a callable")
