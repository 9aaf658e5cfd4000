"""A lease: one sequence's hold on its blocks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .errors import InvalidTokens, LeaseReleased
from .hashing import extend_hashes

if TYPE_CHECKING:
    from .ledger import Ledger
    from .pool import Pool


@dataclass(slots=True)
class _Part:
    """What a lease holds of one group."""

    ledger: Ledger
    block_size: int
    table: list[int]
    num_committed: int  # blocks


class Lease:
    """One sequence's blocks. Made by `Pool.acquire`, owned by the caller, who must `release()` it.

    Also a context manager. A lease that is dropped unreleased releases itself and warns (ResourceWarning).
    """

    num_cached: int
    """Tokens found in the prefix cache by acquire: the first ones, already computed."""
    num_tokens: int
    """Tokens that fit the blocks held now, in every group."""
    hashes: list[bytes]
    """Names of the first whole blocks of `pool.hash_block_size` tokens, as far as they were needed. Read
    only."""

    def __init__(
        self, pool: Pool, ledgers: Sequence[Ledger], root: bytes, hashes: list[bytes], num_queried: int
    ) -> None:
        self.num_cached = 0
        self.num_tokens = 0
        self.hashes = hashes
        self._pool = pool
        self._parts = [_Part(ledger, ledger.block_size, [], 0) for ledger in ledgers]
        self._root = root
        self._num_queried: int | None = num_queried
        self._released = False

    def _attach(self, num_cached: int, tables: Sequence[list[int]]) -> None:
        self.num_cached = self.num_tokens = num_cached
        for part, table in zip(self._parts, tables, strict=True):
            part.ledger.share(table)
            part.table = table
            part.num_committed = len(table)

    def block_table(self, group: int = 0) -> Sequence[int]:
        """Block ids of a group, in the order of the tokens. A live view: copy it to keep it."""
        return self._parts[group].table

    def reserve(self, num_tokens: int) -> list[tuple[int, int, list[int]]] | None:
        """Grow the tables until `num_tokens` tokens in all fit.

        Returns what was added, (group, index of the first new entry, new block ids) for each group that grew;
        None when the pool is dry, and then nothing changed. Raises LeaseReleased.
        """
        self._check_live()
        if num_tokens <= self.num_tokens:
            self._count_query()
            return []
        wanted = []
        for part in self._parts:
            count = -(-num_tokens // part.block_size) - len(part.table)
            if count > part.ledger.num_free:
                return None
            wanted.append(count)
        grown = []
        for group, count in enumerate(wanted):
            if count > 0:
                part = self._parts[group]
                blocks = part.ledger.allocate(count)
                grown.append((group, len(part.table), blocks))
                part.table.extend(blocks)
        self.num_tokens = min([len(part.table) * part.block_size for part in self._parts])
        self._count_query()
        return grown

    def _count_query(self) -> None:
        # Counted here, not in acquire: a sequence may be looked up many times before there is room for it.
        if self._num_queried is not None:
            self._pool.stats.query_tokens += self._num_queried
            self._pool.stats.hit_tokens += self.num_cached
            self._num_queried = None

    def commit(self, tokens: Sequence[int], num_confirmed: int) -> None:
        """Make findable the blocks that the first `num_confirmed` of `tokens` fill: all known to be computed.

        Where the same content is registered by another lease already, ours stays private (as a duplicate); it
        takes over if the other goes first. Each block is hashed once in a lease's life. Raises LeaseReleased,
        InvalidTokens.
        """
        self._check_live()
        if num_confirmed > len(tokens) or num_confirmed > self.num_tokens:
            raise InvalidTokens(
                f"cannot commit {num_confirmed} tokens: {len(tokens)} given, "
                f"room reserved for {self.num_tokens}"
            )
        if not self._pool.prefix_cache:
            return
        unit = self._pool.hash_block_size
        for part in self._parts:
            first, last = part.num_committed, num_confirmed // part.block_size
            if last <= first:
                continue
            scale = part.block_size // unit
            extend_hashes(self.hashes, self._root, tokens, last * scale, unit)
            for index in range(first, last):
                parent = self.hashes[index * scale - 1] if index else None
                part.ledger.register(part.table[index], self.hashes[(index + 1) * scale - 1], parent)
            part.num_committed = last

    def release(self) -> None:
        """Give all blocks back: registered ones stay cached, the others are free. Idempotent."""
        if self._released:
            return
        self._released = True
        for part in self._parts:
            part.ledger.release(part.table)
            part.table.clear()
        self.num_tokens = 0

    def _check_live(self) -> None:
        if self._released:
            raise LeaseReleased("this lease was released; acquire a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            warnings.warn(
                f"a lease of {self.num_tokens} tokens was never released", ResourceWarning, stacklevel=2
            )
            self.release()
