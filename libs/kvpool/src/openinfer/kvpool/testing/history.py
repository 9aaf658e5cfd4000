"""A random history of a pool, with a simulated memory that checks the pool's answers.

For each token position the memory holds the identity of the whole prefix. A prefix that a lease calls cached must be in
memory while the lease is held. No lease may write to a block that another lease reads.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..group import Group
from ..parts import Copy
from .loader import FakeLoader, contents


class Broken(AssertionError):
    """A pool broke a rule."""


def must_hold(fact: bool, complaint: str) -> None:
    """Raise Broken unless `fact` holds."""
    if not fact:
        raise Broken(complaint)


class _Row:
    """A live lease, and the content of its tokens in memory."""

    def __init__(self, lease: Any, salt: bytes, tokens: Sequence[int]) -> None:
        self.lease, self.salt = lease, salt
        self.tokens: list[int] = []
        self.contents = contents(salt, ())  # contents[p]: the state after p tokens
        self.promised = 0  # cached tokens after the load in flight; 0: nothing loads
        self.extend(tokens)
        self.written: int = lease.num_cached
        self.snapshots: list[Copy] = []  # copies to carry out later
        self.is_started = False  # its first copies were carried out

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.contents.append(hash((self.contents[-1], token)))


class History:
    """Random operations on a pool: each method does one, and raises Broken if the pool answers wrongly.

    pool: acquire, num_free, num_total as openinfer.kvpool.Pool has them; leases with reserve, commit, release,
    block_table, num_cached, num_tokens. If it has check_integrity, that runs after each operation. holds: the pool has
    hold and pin too. loader: the pool's; the history then loads, and tells the loader what it has. Prompts are short,
    of few different tokens, so that they share and collide.
    """

    def __init__(
        self,
        pool: Any,
        groups: Sequence[Group],
        seed: int,
        *,
        holds: bool = False,
        loader: FakeLoader | None = None,
    ) -> None:
        self.pool, self.groups, self.holds = pool, tuple(groups), holds
        self.random = random.Random(seed)
        self.live: list[_Row] = []
        self.held: list[tuple[Any, int, dict[int, Any]]] = []  # hold, group, contents by block
        self.loader = loader
        self.memory: list[dict[int, Any]] = loader.memory if loader else [{} for _ in groups]
        longest = 3 * max(group.block_size for group in groups) + 4
        self.prompts = [[self.random.randint(0, 1) for _ in range(longest)] for _ in range(3)]
        self.num_hits = self.num_copies = self.num_dry = self.num_holds = self.num_loads = 0

    def run(self, operations: int) -> None:
        """Do a number of random operations, then give everything back; if one fails, abandon()."""
        weighted = [self.acquire] * 5 + [self.reserve] * 5 + [self.compute] * 6 + [self.release] * 3
        weighted += [self.fork, self.reset]
        if any(group.snapshots for group in self.groups):
            weighted += [self.snapshot] * 4
        if self.holds:
            weighted += [self.hold, self.hold, self.pin, self.let_go, self.let_go]
        if self.loader:
            weighted += [self.load] * 4 + [self.poll] * 4 + [self.store]
        try:
            for _ in range(operations):
                self.random.choice(weighted)()
                self.check()
            self.close()
        except BaseException:
            self.abandon()
            raise

    def close(self) -> None:
        """Give everything back. All blocks must be free then."""
        while self.held:
            self.let_go()
        while self.live:
            self.release()
            self.check()
        while self.loader and self.loader.loads:
            self.pool.poll(None)
        must_hold(self.pool.num_free == self.pool.num_total, "nothing is held, and not all is free")

    def abandon(self) -> None:
        """Drop everything quietly, after a failure."""
        for holder in [*(seq.lease for seq in self.live), *(hold for hold, _, _ in self.held)]:
            with suppress(Exception):
                holder.release()

    # -- operations --

    def acquire(self, tokens: Sequence[int] | None = None) -> None:
        if len(self.live) >= 6:
            return
        if tokens is None:
            prompt = self.random.choice(self.prompts)
            tokens = [*prompt[: self.random.randint(0, len(prompt))], self.random.randint(0, 1)]
        salt = self.random.choice([b"", b"", b"salt"])
        lease = self.pool.acquire(tokens, salt)
        must_hold(
            0 <= lease.num_cached < len(tokens),
            f"{lease.num_cached} of {len(tokens)} tokens are cached: at least one must be left to compute",
        )
        self.num_hits += lease.num_cached > 0
        self.live.append(_Row(lease, salt, tokens))
        if self.loader and self.random.random() < 0.7:
            self._load(self.live[-1])

    def fork(self) -> None:
        """A new sequence that begins as a live one."""
        if self.live:
            seq = self.random.choice(self.live)
            self.acquire([*seq.tokens[: self.random.randint(0, len(seq.tokens))], self.random.randint(0, 1)])

    def reserve(self) -> None:
        """Grow one sequence: for all its tokens and a few more, or for a chunk with kept_tokens for the rest."""
        ready = [seq for seq in self.live if not seq.promised]
        if not ready:
            return
        seq, rng = self.random.choice(ready), self.random
        whole = len(seq.tokens) + rng.randint(0, 5)
        leave = rng.choice([0.0, 0.0, 0.0, 0.3])
        if rng.random() < 0.5:
            self.reserve_for(seq, whole, 0, leave)
        else:
            self.reserve_for(seq, min(seq.written + rng.randint(1, 6), whole), whole, leave)

    def reserve_for(self, seq: _Row, num_tokens: int, kept_tokens: int, leave: float) -> bool:
        """Call Lease.reserve for this sequence and check its answer. Returns whether there was room."""
        lease, groups = seq.lease, range(len(self.groups))
        before = [list(lease.block_table(group)) for group in groups]
        free, reach = self.pool.num_free, lease.reach(leave)
        grown = lease.reserve(num_tokens, kept_tokens, leave)
        after = [list(lease.block_table(group)) for group in groups]
        if grown is None:
            self.num_dry += 1
            must_hold(reach < max(num_tokens, kept_tokens), f"refused, with room for {reach} tokens")
            must_hold(after == before and self.pool.num_free == free, "a refused reserve changed something")
            return False
        must_hold(num_tokens <= reach, f"{num_tokens} tokens were reserved where there was room for {reach}")
        for group, first, blocks in grown:
            must_hold(first == len(before[group]), f"group {group} grew at {first}, had {len(before[group])}")
            before[group] += blocks
        must_hold(after == before, "reserve does not return what it added to the tables")
        must_hold(lease.num_tokens >= num_tokens, f"{lease.num_tokens} tokens fit, not {num_tokens}")
        for group, spec in enumerate(self.groups):
            room = len(after[group]) * spec.block_size
            if not spec.snapshots and spec.window is None:
                must_hold(room >= kept_tokens, f"group {group} has room for {room}, not {kept_tokens}")
        return True

    def compute(self) -> None:
        """Write some tokens of one sequence, and mostly commit them."""
        ready = [seq for seq in self.live if seq.lease.num_tokens > seq.written and not seq.promised]
        if not ready:
            return
        seq = self.random.choice(ready)
        if not seq.is_started:
            self._start(seq)
        end = min(seq.written + self.random.randint(1, 8), seq.lease.num_tokens)
        seq.extend([self.random.randint(0, 1) for _ in range(end - len(seq.tokens))])
        while seq.written < end:
            self._write(seq)
        if self.random.random() < 0.8:
            seq.lease.commit(seq.tokens, seq.written)
            self.check_sequence(seq)

    def snapshot(self) -> None:
        step = getattr(self.pool, "boundary_size", 0)
        ready = [
            seq
            for seq in self.live
            if step and not seq.promised and seq.lease.num_tokens >= seq.written // step * step + step
        ]
        if ready and any(group.snapshots for group in self.groups):
            seq = self.random.choice(ready)
            seq.snapshots += seq.lease.snapshot(seq.written // step * step + step) or []

    def store(self) -> None:
        """Let the loader have the blocks of a live sequence or of a prompt."""
        if self.loader:
            seq = self.random.choice(self.live) if self.live and self.random.random() < 0.5 else None
            tokens = seq.tokens if seq else self.random.choice(self.prompts)
            self.loader.store(tokens, seq.salt if seq else b"", self.pool.hash_block_size)

    def load(self) -> None:
        ready = [seq for seq in self.live if not seq.promised]
        if ready:
            self._load(self.random.choice(ready))

    def _load(self, seq: _Row) -> None:
        count, free = seq.lease.num_loadable, self.pool.num_free
        if not count:
            return
        must_hold(seq.lease.num_cached + count < len(seq.tokens), "a token must be left when all is loaded")
        if seq.lease.load(self.random.choice([0.0, 0.0, 0.3])):
            seq.promised = seq.lease.num_cached + count
        else:
            must_hold(self.pool.num_free == free, "a load that is refused changed something")

    def poll(self) -> None:
        """Poll, and check the leases whose loads have ended."""
        by_lease = {id(seq.lease): seq for seq in self.live}
        failed = self.loader.num_failed if self.loader else 0
        for lease in self.pool.poll(0.0):
            seq = by_lease.get(id(lease))
            if seq is None:
                continue  # released meanwhile
            must_hold(seq.promised > 0, "poll() names a lease that loads nothing")
            must_hold(
                lease.num_cached
                >= (seq.promised if self.loader and self.loader.num_failed == failed else seq.written),
                f"{lease.num_cached} tokens are cached after a load of {seq.promised}, {seq.written} before it",
            )
            self.num_loads += 1
            seq.promised, seq.written = 0, lease.num_cached

    def release(self) -> None:
        if self.live:
            self.live.pop(self.random.randrange(len(self.live))).lease.release()

    def reset(self) -> None:
        """Drop the cache, which works only if no block is in use."""
        if hasattr(self.pool, "reset_prefix_cache") and self.random.random() < 0.3:
            idle = self.pool.num_free == self.pool.num_total
            must_hold(self.pool.reset_prefix_cache() is idle, "a reset works when nothing is held, only")

    def hold(self) -> None:
        """Hold some blocks, as a copy in flight does."""
        group = self.random.randrange(len(self.groups))
        state, count = self.pool.block_state, self.groups[group].num_blocks
        blocks = [block for block in range(1, count) if state(block, group) >= 3]
        if blocks and len(self.held) < 3:
            blocks = self.random.sample(blocks, min(len(blocks), 3))
            self._keep(self.pool.hold(blocks, group), group, blocks)

    def pin(self) -> None:
        if len(self.held) < 3:
            self._keep(self.pool.pin(self.random.choice(self.prompts)), 0, [])

    def let_go(self) -> None:
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))[0].release()

    # -- memory --

    def _keep(self, hold: Any, group: int, blocks: Sequence[int]) -> None:
        self.num_holds += 1
        self.held.append((hold, group, {block: self._peek(group, block) for block in blocks}))

    def _peek(self, group: int, block: int) -> Any:
        content = self.memory[group].get(block)
        return dict(content) if isinstance(content, dict) else content

    def _start(self, seq: _Row) -> None:
        seq.is_started = True
        for copy in getattr(seq.lease, "copies", ()):
            self.num_copies += 1
            self._copy(copy)
        for group, spec in enumerate(self.groups):
            if spec.snapshots and not seq.written:
                self.memory[group][seq.lease.block_table(group)[0]] = seq.contents[0]
        self.check_sequence(seq)

    def _copy(self, copy: Copy) -> None:
        content = self._peek(copy.group, copy.source)
        if isinstance(content, dict):
            content = {offset: value for offset, value in content.items() if offset < copy.num_tokens}
        self.memory[copy.group][copy.target] = content

    def _write(self, seq: _Row) -> None:
        position, content = seq.written, seq.contents[seq.written + 1]
        for group, spec in enumerate(self.groups):
            table = seq.lease.block_table(group)
            if spec.snapshots:
                self.memory[group][table[0]] = content
                continue
            block = table[position // spec.block_size]
            must_hold(block != 0, f"position {position} of group {group} goes to the padding block")
            self.memory[group].setdefault(block, {})[position % spec.block_size] = content
        seq.written += 1
        for copy in seq.snapshots:
            if copy.num_tokens == seq.written:
                self._copy(copy)

    # -- checks --

    def check(self) -> None:
        """Check everything that is visible from outside."""
        if hasattr(self.pool, "check_integrity"):
            self.pool.check_integrity()
        for seq in self.live:
            self.check_sequence(seq)
        for _, group, kept in self.held:
            for block, content in kept.items():
                must_hold(self._peek(group, block) == content, f"block {block} changed while it was held")

    def check_sequence(self, seq: _Row) -> None:
        """Check that memory holds the tokens that the sequence would read."""
        for group, spec in enumerate(self.groups):
            table, memory = seq.lease.block_table(group), self.memory[group]
            if spec.snapshots:
                if seq.is_started:
                    must_hold(memory[table[0]] == seq.contents[seq.written], f"group {group}: wrong state")
                continue
            end = seq.written if seq.is_started else seq.written // spec.block_size * spec.block_size
            for position in range(max(0, seq.written - (spec.window or seq.written)), end):
                index, offset = divmod(position, spec.block_size)
                found = memory.get(table[index], {}).get(offset)
                must_hold(
                    found == seq.contents[position + 1],
                    f"a lease reads position {position} in block {table[index]} of group {group}, which holds "
                    + ("nothing" if found is None else "something else"),
                )
