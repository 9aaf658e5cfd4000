"""Index: which prefix of a sequence is cached, in every group."""

import math
from collections.abc import Callable, Iterable, Sequence

from .errors import InvalidTokens
from .group import Group
from .hashing import Chain
from .ledger import Ledger
from .parts import Pages, Snapshots


class Index:
    """Looks prefixes up in the ledgers of a pool.

    One hash chain serves all groups. A name stands for the whole prefix up to a position. So the chain needs a name
    only where a block of any group may end. `unit`: tokens between two names. `step`: tokens between two positions
    where blocks of all groups end; prefixes end there. enabled=False: it finds and hashes nothing.
    """

    def __init__(self, ledgers: Sequence[Ledger], *, enabled: bool) -> None:
        sizes = [ledger.group.block_size for ledger in ledgers]
        self.ledgers, self.enabled = ledgers, enabled
        self.unit, self.step = math.gcd(*sizes), math.lcm(*sizes)

    def parts(self, priority: int) -> list[Pages | Snapshots]:
        """The empty parts of a new lease, by group."""
        return [
            (Snapshots if ledger.group.snapshots else Pages)(
                ledger, ledger.group.block_size // self.unit, priority
            )
            for ledger in self.ledgers
        ]

    def chain(self, tokens: Sequence[int], salt: bytes, hashes: Sequence[bytes] | None) -> Chain:
        """The chain of a sequence's names, from the given ones. Raises InvalidTokens."""
        unit = self.unit
        if hashes is not None and len(hashes) * unit > len(tokens):
            raise InvalidTokens(
                f"{len(hashes)} hashes of {unit} tokens each do not fit {len(tokens)} tokens; "
                f"give hash_blocks(tokens, {unit}, salt)"
            )
        return Chain(unit, salt, list(hashes or ()), enabled=self.enabled)

    def match(
        self, tokens: Sequence[int], chain: Chain, limit: int
    ) -> tuple[int, list[list[int]], list[int]]:
        """The longest cached prefix of whole blocks, up to `limit` tokens; by group its pages and snapshot."""
        unit, step = self.unit, self.step
        end = limit // step * step
        # Name all blocks at once, even if a miss comes early: commit() needs the names of the computed blocks anyway.
        chain.extend(tokens, end // unit)
        hashes = chain.names
        tables: list[list[int]] = [[] for _ in self.ledgers]
        for index, ledger in enumerate(self.ledgers):
            if ledger.group.window is None and not ledger.group.snapshots:
                tables[index] = ledger.match(self.names(ledger, hashes, 0, end))
                end = min(end, len(tables[index]) * ledger.group.block_size) // step * step
        there = [
            (ledger.group, _runs(ledger.has(self.names(ledger, hashes, 0, end))))
            for ledger in self.ledgers
            if ledger.group.window is not None or ledger.group.snapshots
        ]
        end = _last_boundary(there, end, step)
        sources = [0] * len(self.ledgers)
        for index, ledger in enumerate(self.ledgers):
            size, window = ledger.group.block_size, ledger.group.window
            if ledger.group.snapshots:
                sources[index] = (ledger.find(hashes[end // unit - 1]) or 0) if end else 0
            elif window is not None:
                first = max(end - window, 0) // size
                tables[index] = [0] * first + ledger.match(self.names(ledger, hashes, first * size, end))
            else:
                del tables[index][end // size :]
        return end, tables, sources

    def names(self, ledger: Ledger, hashes: list[bytes], start: int, end: int) -> list[bytes]:
        """Names of the blocks that hold tokens[start:end]."""
        scale, unit = ledger.group.block_size // self.unit, self.unit
        return hashes[start // unit + scale - 1 : end // unit : scale]

    def missing(self, tokens: Sequence[int], chain: Chain) -> list[list[bytes]]:
        """By group, names of whole blocks that are not cached, to the last boundary that leaves a token."""
        end = max(0, len(tokens) - 1) // self.step * self.step if self.enabled else 0
        chain.extend(tokens, end // self.unit)
        named = [(ledger, self.names(ledger, chain.names, 0, end)) for ledger in self.ledgers]
        return [
            [name for name, has in zip(names, ledger.has(names), strict=True) if not has]
            for ledger, names in named
        ]

    def match_with(
        self, tokens: Sequence[int], chain: Chain, holds: Callable[[int, list[bytes]], Sequence[bool]]
    ) -> int:
        """Length of the longest prefix that is cached or held elsewhere and leaves a token to compute. holds(group,
        names): which blocks are held elsewhere. O(blocks)."""
        if not self.enabled or len(tokens) < 2:
            return 0
        end = (len(tokens) - 1) // self.step * self.step
        chain.extend(tokens, end // self.unit)
        runs = []
        for group, ledger in enumerate(self.ledgers):
            names = self.names(ledger, chain.names, 0, end)
            there = ledger.has(names)
            missing = [index for index, has in enumerate(there) if not has]
            held = holds(group, [names[index] for index in missing])
            for index, has in zip(missing, held, strict=True):
                there[index] = bool(has)
            runs.append((ledger.group, _runs(there)))
        return _last_boundary(runs, end, self.step)


def _runs(there: Iterable[bool]) -> list[int]:
    """For each block, the length of the run of present blocks that ends with it."""
    run = 0
    return [run := run + 1 if has else 0 for has in there]


def _last_boundary(runs: Sequence[tuple[Group, list[int]]], end: int, step: int) -> int:
    """The last multiple of `step` up to `end` where each group has the run of blocks that a sequence needs there."""
    while end:
        if all(run[end // group.block_size - 1] >= group.num_needed(end) for group, run in runs):
            break
        end -= step
    return end
