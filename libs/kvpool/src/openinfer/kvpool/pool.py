"""The pool: which block is whose, which are findable by prefix, which go first."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .errors import IntegrityError, InvalidGroup, InvalidTokens
from .events import EventBatch, EventLog
from .eviction import POLICIES, Eviction
from .group import BlockState, Group
from .hashing import Chain
from .hold import Hold, with_ancestors
from .lease import Lease
from .ledger import Ledger
from .loading import Load, Loader, LoadUnderWay, Part, Piece
from .parts import Pages, Snapshots
from .tails import Tails


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
    """Of these, tokens found in the prefix cache, loaded ones included."""
    loaded: int = 0
    """Blocks that a loader brought."""
    failed: int = 0
    """Blocks that a loader was asked for and did not bring."""


class Pool:
    """Blocks of one or several groups, handed out through leases, shared by prefix.

    A sequence holds one `Lease`. Its table has one entry a block of each group, in the order of its tokens.
    Blocks that are complete and committed are named by content; another sequence with the same prefix then
    starts from them. When nobody uses such a block it stays cached until the room is needed. Not thread-safe:
    one owner, normally the engine's loop.

    groups: at least one, names unique. prefix_cache=False turns sharing off: nothing is hashed or kept.
    eviction: "lru", "lineage", "priority", "s3fifo", or what makes an `Eviction` for a group.
    share_tails: a prefix may end inside a block if it uses at least so many of its tokens, and is then to be
    copied (`Lease.copies`); all groups must be pages of one size. None: whole blocks only.
    events: keep events for `take_events`, which the caller must call then. loader: where blocks come from that are not
    in the pool (Lease.load, poll); None: nowhere. Raises InvalidGroup.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        prefix_cache: bool = True,
        eviction: str | Callable[[Group], Eviction] = "lru",
        share_tails: int | None = None,
        events: bool = False,
        loader: Loader | None = None,
    ) -> None:
        _check(groups, eviction, share_tails)
        self.groups = tuple(groups)
        self.prefix_cache = prefix_cache
        self.stats = PoolStats()
        sizes = [group.block_size for group in groups]
        # One hash chain serves all groups: a name stands for the whole prefix up to a position, so it is
        # enough to have one at every position where any group's block may end.
        self.hash_block_size = math.gcd(*sizes)
        self.boundary_size = math.lcm(*sizes)
        make = POLICIES[eviction] if isinstance(eviction, str) else eviction
        self._events = EventLog() if events else None
        self._ledgers = [
            Ledger(
                group,
                index,
                make(group),
                self.stats,
                self._events,
                Tails(group.block_size, share_tails) if share_tails else None,
            )
            for index, group in enumerate(groups)
        ]
        self._loader = loader
        self._loads: dict[Load, LoadUnderWay] = {}
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # only for check_integrity
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()  # likewise

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
        """Blocks that could be handed out now, over all groups: free ones and cached ones."""
        return sum(ledger.num_free for ledger in self._ledgers)

    def num_used(self, group: int = 0) -> int:
        """Blocks of a group that leases and holds keep; cached ones that nobody uses are not among them."""
        return self._ledgers[group].num_in_use

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that one lease can hold when it has the pool for itself, reserved bit by bit with
        commits between (windows need no more than themselves then); sys.maxsize where no group sets an end."""
        return min(group.capacity_tokens for group in self.groups)

    @property
    def used_tokens(self) -> int:
        """Tokens that leases and holds occupy: the used part of the fullest group of pages, times `capacity_tokens`.

        In a pool of one group without a window this is used blocks times block size. Groups of snapshots do not
        count: a snapshot occupies the same room whatever the length of its sequence. O(groups).
        """
        pages = [ledger for ledger in self._ledgers if not ledger.group.snapshots]
        part = max((ledger.num_in_use / (ledger.group.num_blocks - 1) for ledger in pages), default=0.0)
        return min(round(part * self.capacity_tokens), self.capacity_tokens)

    def acquire(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        hashes: Sequence[bytes] | None = None,
        *,
        priority: int = 0,
    ) -> Lease:
        """A lease for a sequence that begins with `tokens`, holding the longest cached prefix.

        The prefix ends where *every* group has its part: all pages, those of the window, a snapshot of just
        that boundary. It leaves at least one token to compute (which gives the logits). Takes nothing that is
        not cached, so it never fails for want of room. `hashes`: hash_blocks(tokens, pool.hash_block_size,
        salt) or its beginning, where the caller has them already. `priority` is for eviction, after the
        release. The caller owns the lease. Raises InvalidTokens when there are more hashes than whole blocks.
        """
        chain = self._chain(tokens, salt, hashes)
        lease = Lease(self, self._new_parts(priority), chain, tokens, priority)
        self._leases.add(lease)
        if self.prefix_cache and len(tokens) > 1:
            lease._attach(*self._find(tokens, chain))
        return lease

    def _find(self, tokens: Sequence[int], chain: Chain) -> tuple[int, list[list[int]], list[int]]:
        """As _match, for the longest prefix that leaves a token to compute, and with its tail if tails are shared."""
        end, tables, sources = self._match(tokens, chain, len(tokens) - 1)
        if self._ledgers[0].tails is not None:
            end += self._match_tails(tokens, end, chain, sources)
        return end, tables, sources

    def _new_parts(self, priority: int) -> list[Pages | Snapshots]:
        return [
            (Snapshots if ledger.group.snapshots else Pages)(
                ledger, ledger.group.block_size // self.hash_block_size, priority
            )
            for ledger in self._ledgers
        ]

    def _chain(self, tokens: Sequence[int], salt: bytes, hashes: Sequence[bytes] | None) -> Chain:
        unit = self.hash_block_size
        if hashes is not None and len(hashes) * unit > len(tokens):
            raise InvalidTokens(
                f"{len(hashes)} hashes of {unit} tokens each do not fit {len(tokens)} tokens; "
                f"give hash_blocks(tokens, {unit}, salt)"
            )
        return Chain(unit, salt, list(hashes or ()), enabled=self.prefix_cache)

    def _match(
        self, tokens: Sequence[int], chain: Chain, limit: int
    ) -> tuple[int, list[list[int]], list[int]]:
        """Longest cached prefix in whole blocks, at most `limit` tokens; its pages and its snapshot, by group."""
        unit, step = self.hash_block_size, self.boundary_size
        end = limit // step * step
        # All at once, though a miss may come early: commit() needs the names of the computed blocks anyway.
        chain.extend(tokens, end // unit)
        hashes = chain.names
        tables: list[list[int]] = [[] for _ in self.groups]
        for index, ledger in enumerate(self._ledgers):
            if ledger.group.window is None and not ledger.group.snapshots:
                tables[index] = ledger.match(self._names(ledger, hashes, 0, end))
                end = min(end, len(tables[index]) * ledger.group.block_size) // step * step
        end = self._last_boundary(hashes, end)
        sources = [0] * len(self.groups)
        for index, ledger in enumerate(self._ledgers):
            size, window = ledger.group.block_size, ledger.group.window
            if ledger.group.snapshots:
                sources[index] = (ledger.find(hashes[end // unit - 1]) or 0) if end else 0
            elif window is not None:
                first = max(end - window, 0) // size
                tables[index] = [0] * first + ledger.match(self._names(ledger, hashes, first * size, end))
            else:
                del tables[index][end // size :]
        return end, tables, sources

    def _names(self, ledger: Ledger, hashes: list[bytes], start: int, end: int) -> list[bytes]:
        """Names of the blocks of tokens start..end."""
        scale, unit = ledger.group.block_size // self.hash_block_size, self.hash_block_size
        return hashes[start // unit + scale - 1 : end // unit : scale]

    def _last_boundary(self, hashes: list[bytes], end: int) -> int:
        """The last boundary up to `end` where windows and snapshots are there. O(blocks)."""
        runs = [
            (ledger.group, _runs(ledger.has(self._names(ledger, hashes, 0, end))))
            for ledger in self._ledgers
            if ledger.group.window is not None or ledger.group.snapshots
        ]
        return last_boundary(runs, end, self.boundary_size)

    def _match_tails(self, tokens: Sequence[int], end: int, chain: Chain, sources: list[int]) -> int:
        """Tokens found in a block that begins as tokens[end:] do, the same number in every group."""
        prefix = chain.names[end // self.hash_block_size - 1] if end else chain.root
        tokens = tokens[end : min(end + self.boundary_size, len(tokens) - 1)]
        count = len(tokens)
        for index, ledger in enumerate(self._ledgers):
            name, shared = ledger.tails.find(prefix, tokens) if ledger.tails is not None else (None, 0)
            sources[index] = (ledger.find(name) or 0) if name is not None else 0
            count = min(count, shared)
        if not all(sources):
            sources[:] = [0] * len(sources)
            return 0
        return count

    # -- loading --

    def poll(self, wait_s: float | None = 0.0) -> list[Lease]:
        """Leases whose load has ended, each once; also those that were released meanwhile, whose blocks are back now.

        num_cached says what is there: blocks that did not come are left to compute. Waits up to wait_s seconds (None:
        no limit) for the end of a load if none has ended, and not at all if nothing loads.
        """
        if self._loader is None or not self._loads:
            return []
        ended = []
        for load in self._loader.poll(wait_s):
            lease, parts = self._loads.pop(load)
            for group, part in enumerate(parts):
                part.register({p.name for p in load.pieces if p.group == group and p not in load.failed})
            lease._landed()
            for part in parts:
                part.release()
            self.stats.loaded += len(load.pieces) - len(load.failed)
            self.stats.failed += len(load.failed)
            ended.append(lease)
        return ended

    def _loadable(self, tokens: Sequence[int], chain: Chain) -> int:
        """The longest prefix that is there when what the loader has is loaded. O(blocks)."""
        if self._loader is None or not self.prefix_cache or len(tokens) < 2:
            return 0
        end, unit = (len(tokens) - 1) // self.boundary_size * self.boundary_size, self.hash_block_size
        chain.extend(tokens, end // unit)
        runs = []
        for group, ledger in enumerate(self._ledgers):
            names = self._names(ledger, chain.names, 0, end)
            there = ledger.has(names)
            missing = [index for index, has in enumerate(there) if not has]
            held = self._loader.holds(group, [names[index] for index in missing])
            for index, has in zip(missing, held, strict=True):
                there[index] = bool(has)
            runs.append((ledger.group, _runs(there)))
        return last_boundary(runs, end, self.boundary_size)

    def _begin(self, lease: Lease, tokens: Sequence[int], chain: Chain, end: int, leave: float) -> bool:
        """Load what is not cached of the first `end` tokens. False: there is no room."""
        parts = []
        for ledger in self._ledgers:
            size = ledger.group.block_size
            start = end - ledger.group.num_needed(end) * size
            names = self._names(ledger, chain.names, start, end)
            before = (
                chain.names[start // self.hash_block_size - 1]
                if start and not ledger.group.snapshots
                else None
            )
            parts.append(
                Part(ledger, names, before, chain.root, () if ledger.group.snapshots else tokens[start:end])
            )
        for part in parts:
            part.share()
        room = [
            part.ledger.num_free - math.ceil(leave * (part.ledger.group.num_blocks - 1)) for part in parts
        ]
        if self._loader is None or any(
            part.num_missing > max(0, r) for part, r in zip(parts, room, strict=True)
        ):
            for part in parts:
                part.release()
            return False
        load = Load([Piece(group, *fresh) for group, part in enumerate(parts) for fresh in part.allocate()])
        self._loads[load] = LoadUnderWay(lease, parts)
        self._loader.begin(load)
        return True

    # -- keeping --

    def hold(self, blocks: Sequence[int], group: int = 0) -> Hold:
        """Keep complete blocks of a group, and the pages that they descend from, as they are until released.

        For whoever reads them behind the pool's back, as a copy to another tier does. Raises InvalidBlocks.
        """
        ledger = self._ledgers[group]
        return self._keep(Hold([(ledger, with_ancestors(ledger, blocks))]))

    def pin(self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None) -> Hold:
        """Keep the longest cached prefix of `tokens` (all of it, if whole blocks) until released."""
        chain = self._chain(tokens, salt, hashes)
        if not self.prefix_cache:
            return self._keep(Hold([]))
        end, tables, sources = self._match(tokens, chain, len(tokens))
        blocks = [
            [block for block in (*table, source) if block]
            for table, source in zip(tables, sources, strict=True)
        ]
        return self._keep(Hold(list(zip(self._ledgers, blocks, strict=True)), end))

    def _keep(self, hold: Hold) -> Hold:
        self._holds.add(hold)
        return hold

    def take_events(self, data_parallel_rank: int | None = None) -> EventBatch | None:
        """What became findable or ceased to be since the last call; None if nothing did."""
        return self._events.take(data_parallel_rank) if self._events is not None else None

    def block_state(self, block: int, group: int = 0) -> BlockState:
        """Where a block is in its life."""
        return self._ledgers[group].state(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a change of weights. Does nothing, and says False, while blocks are
        in use."""
        if any(ledger.num_in_use for ledger in self._ledgers):
            return False
        for ledger in self._ledgers:
            ledger.drop_cached()
        if self._events is not None:
            self._events.cleared()
        return True

    def check_integrity(self) -> None:
        """Recompute the books from leases and blocks, O(blocks). Raises IntegrityError."""
        leases, holds = list(self._leases), list(self._holds)
        problems: list[str] = []
        for group, ledger in enumerate(self._ledgers):
            uses = [block for lease in leases for block in lease._held(group)]
            uses += [block for hold in holds for block in hold._held(ledger)]
            uses += [block for load in self._loads.values() for block in load.held(group)]
            problems += ledger.problems(uses)
        if problems:
            raise IntegrityError(problems)


def _runs(there: Iterable[bool]) -> list[int]:
    """For each block, how many blocks in a row are there up to it."""
    run = 0
    return [run := run + 1 if has else 0 for has in there]


def last_boundary(runs: Sequence[tuple[Group, list[int]]], end: int, step: int) -> int:
    """The last multiple of `step` up to `end` where each group has the run of blocks that a sequence needs there."""
    while end:
        if all(run[end // group.block_size - 1] >= group.num_needed(end) for group, run in runs):
            break
        end -= step
    return end


def _check(
    groups: Sequence[Group], eviction: str | Callable[[Group], Eviction], share_tails: int | None
) -> None:
    if not groups:
        raise InvalidGroup("a pool needs at least one group")
    if len({group.name for group in groups}) != len(groups):
        raise InvalidGroup(f"group names must differ, given {[group.name for group in groups]}")
    if isinstance(eviction, str) and eviction not in POLICIES:
        raise InvalidGroup(f"eviction is {eviction!r}; give one of {sorted(POLICIES)}, or a callable")
    if share_tails is None:
        return
    sizes = {group.block_size for group in groups}
    if len(sizes) > 1 or any(group.snapshots for group in groups):
        raise InvalidGroup(
            "tails can be shared only where all groups are pages of one size; leave share_tails out"
        )
    if not 1 <= share_tails < min(sizes):
        raise InvalidGroup(f"share_tails is {share_tails}; give 1..{min(sizes) - 1} tokens, or None")
