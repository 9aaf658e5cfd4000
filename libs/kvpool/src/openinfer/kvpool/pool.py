"""The pool: which block is whose, which are findable by prefix, which go first."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import IntegrityError, InvalidGroup, InvalidTokens
from .group import Group
from .hashing import extend_hashes, root_hash
from .lease import Lease
from .ledger import Ledger


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
    """Of these, tokens found in the prefix cache."""


class Pool:
    """Blocks of one or several groups, handed out through leases, shared by prefix.

    A sequence holds one `Lease`. Its table has one entry a block of each group, in the order of its tokens.
    Blocks that are complete and committed are named by content; another sequence with the same prefix then
    starts from them. When nobody holds such a block it stays cached until the room is needed (least recently
    used first, a child always before its parent). Not thread-safe: one owner, normally the engine's loop.

    groups: at least one, names unique. prefix_cache=False turns sharing off: nothing is hashed or kept.
    Raises InvalidGroup.
    """

    def __init__(self, groups: Sequence[Group], *, prefix_cache: bool = True) -> None:
        if not groups:
            raise InvalidGroup("a pool needs at least one group")
        if len({group.name for group in groups}) != len(groups):
            raise InvalidGroup(f"group names must differ, given {[group.name for group in groups]}")
        self.groups = tuple(groups)
        self.prefix_cache = prefix_cache
        self.stats = PoolStats()
        sizes = [group.block_size for group in groups]
        # One hash chain serves all groups: a name stands for the whole prefix up to a position, so it is
        # enough to have one at every position where any group's block may end.
        self.hash_block_size = math.gcd(*sizes)
        self._hit_size = math.lcm(*sizes)
        self._ledgers = [Ledger(group, self.stats) for group in groups]
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # only for check_integrity

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

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one lease can hold when it has the pool for itself."""
        return min((group.num_blocks - 1) * group.block_size for group in self.groups)

    def acquire(
        self, tokens: Sequence[int], salt: bytes = b"", hashes: Sequence[bytes] | None = None
    ) -> Lease:
        """A lease for a sequence that begins with `tokens`, holding the longest cached prefix.

        The prefix is whole blocks of *all* groups and leaves at least one token to compute (which gives the
        logits). Takes nothing that is not cached, so it never fails for want of room. `hashes`:
        hash_blocks(tokens, pool.hash_block_size, salt) or its beginning, where the caller has them already.
        The caller owns the lease. Raises InvalidTokens when there are more hashes than whole blocks.
        """
        unit = self.hash_block_size
        if hashes is not None and len(hashes) * unit > len(tokens):
            raise InvalidTokens(
                f"{len(hashes)} hashes of {unit} tokens each do not fit {len(tokens)} tokens; "
                f"give hash_blocks(tokens, {unit}, salt)"
            )
        root = root_hash(unit, salt) if self.prefix_cache else b""
        lease = Lease(self, self._ledgers, root, list(hashes or ()), len(tokens))
        self._leases.add(lease)
        if self.prefix_cache:
            lease._attach(*self._match(tokens, root, lease.hashes))
        return lease

    def _match(self, tokens: Sequence[int], root: bytes, hashes: list[bytes]) -> tuple[int, list[list[int]]]:
        """Longest cached prefix in tokens, and its blocks by group."""
        unit = self.hash_block_size
        end = max(len(tokens) - 1, 0) // self._hit_size * self._hit_size
        # All at once, though a miss may come early: commit() needs the names of the computed blocks anyway.
        extend_hashes(hashes, root, tokens, end // unit, unit)
        tables = []
        for group, ledger in zip(self.groups, self._ledgers, strict=True):
            scale = group.block_size // unit
            tables.append(ledger.match(hashes[scale - 1 : end // unit : scale]))
            end = min(end, len(tables[-1]) * group.block_size)
        end = end // self._hit_size * self._hit_size
        return end, [
            table[: end // group.block_size] for group, table in zip(self.groups, tables, strict=True)
        ]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a change of weights. Does nothing, and says False, while leases hold
        blocks."""
        if any(ledger.num_in_use for ledger in self._ledgers):
            return False
        for ledger in self._ledgers:
            ledger.drop_cached()
        return True

    def check_integrity(self) -> None:
        """Recompute the books from leases and blocks, O(blocks). Raises IntegrityError."""
        leases = list(self._leases)
        problems = [
            problem
            for group, ledger in enumerate(self._ledgers)
            for problem in ledger.problems([lease.block_table(group) for lease in leases])
        ]
        if problems:
            raise IntegrityError(problems)
