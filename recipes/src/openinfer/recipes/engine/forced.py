"""Forced: chosen tokens through an engine's recorded steps, below its scheduler, with leases of the engine's pool."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openinfer.graph import NoWatch, StepPace
from openinfer.graph.runner import NoDrafts, Runner, Sampling
from openinfer.kvpool import Lease
from openinfer.recipes.engine.engine import Engine
from openinfer.sampler import SamplingParams
from openinfer.scheduler import BlockWrite, Row, Seq, Step

Array = np.ndarray[Any, Any]

NO_LIMIT = 1 << 30
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class NoRoom(ValueError):
    """The engine's cache is too small for the measured sequences; the message says what to change."""

    user_can_mend = True


class ForcedSeq:
    """A sequence whose tokens are all known. `fed`: how many of them the device has now; it may be set back, and the
    tokens after it are then fed again. `tabled`: whether the device has its block tables."""

    def __init__(self, seq: Seq[Sampling], lease: Lease, named: list[int]) -> None:
        self.seq, self.lease, self.fed, self.named = seq, lease, lease.num_cached, named
        self.committed, self.tabled = self.fed, False


class Forced:
    """Feeds chosen tokens to sequences. A forced token is a prompt chunk of one token, so launches, tables, states and
    cached prefixes are those of the engine. The token that the engine would sample is ignored.

    The engine must be idle, and stays usable after `leave`. runner: the engine's, or a variant of it (Runner.eager).
    wrong_table: a row field with block tables whose entries are all the first, as a negative control.
    """

    def __init__(self, engine: Engine, runner: Runner | None = None, wrong_table: str | None = None) -> None:
        # Forced steps must not count as the engine's own, so they run without its trace and its step times. Layers that
        # draft would overwrite the logits.
        self.engine, own = engine, runner or engine.runner
        self.runner = replace(own, watch=NoWatch(), pace=StepPace(), drafting=NoDrafts(own.buckets))
        self._pool = engine.pool
        self._wrong = None if wrong_table is None else self.runner.model.tables.index(wrong_table)
        self._index = 0
        self._running: dict[int, ForcedSeq] = {}

    def join(
        self, slot: int, tokens: Sequence[int], salt: bytes | None = None, shown: Sequence[int] | None = None
    ) -> ForcedSeq:
        """Start a sequence in a slot, 1 or more. Sequences of one salt share cached prefixes; without salt none do.
        shown: what the device gets in place of `tokens`, as a negative control; blocks are named by `tokens`."""
        own = os.urandom(16) if salt is None else salt
        named = list(tokens)
        seq = Seq(slot, list(shown or tokens), NO_LIMIT, salt=own, owner=Sampling(GREEDY, 0, ()))
        seq.slot, seq.target, seq.max_len = slot, len(tokens), NO_LIMIT
        lease = self._pool.acquire(named, own)
        seq.lease = lease
        forced = ForcedSeq(seq, lease, named)
        self._running[slot] = forced
        return forced

    def step(self, items: Sequence[tuple[ForcedSeq, int]]) -> Array:
        """Feed each sequence its next `count` tokens, in one step; items: (sequence, count). Returns the logits after
        the last token of each, float32 [len(items), V]. Raises NoRoom."""
        joined = [forced.seq for forced, _ in items if not forced.tabled]
        blocks: list[BlockWrite[Sampling]] = []
        rows = []
        for forced, count in items:
            blocks += self._grown(forced, forced.fed + count)
            rows.append(Row(forced.seq, count, False, forced.fed))
        self._index += 1
        blocks = [self._as_told(write) for write in blocks]
        self.runner.launch(Step(self._index, rows, True, 0, (), joined, blocks))
        self.runner.collect(None)
        self.runner.stream.synchronize()
        for forced, count in items:
            forced.fed += count
            if forced.fed > forced.committed:
                forced.lease.commit(forced.named, forced.fed)
                forced.committed = forced.fed
        return self.runner.model.batch.logits[: len(items)].numpy()

    def _grown(self, forced: ForcedSeq, length: int) -> list[BlockWrite[Sampling]]:
        """Reserve blocks for `length` tokens. Returns the table entries that the device does not have yet."""
        grown = forced.lease.reserve(length)
        if grown is None:
            raise NoRoom(
                f"the cache has no room for {length} tokens of a sequence beside {len(self._running) - 1} others: "
                "raise --kv-cache-memory-bytes or --gpu-memory-utilization, or ask for fewer or shorter sequences"
            )
        if not forced.tabled:
            forced.tabled = True
            groups = range(self._pool.num_groups)
            return [BlockWrite(forced.seq, g, 0, list(forced.lease.block_table(g))) for g in groups]
        return [BlockWrite(forced.seq, *write) for write in grown]

    def _as_told(self, write: BlockWrite[Sampling]) -> BlockWrite[Sampling]:
        if write.group != self._wrong:
            return write
        (first, *_) = self._running[write.seq.slot].lease.block_table(write.group)
        return write._replace(blocks=[first] * len(write.blocks))

    def reserve(self, forced: ForcedSeq, length: int) -> None:
        """Give a sequence blocks for `length` tokens in all. It must have been fed before."""
        tables = self.runner.model.tables
        for write in self._grown(forced, length):
            table = tables[write.group]
            if table is not None:
                self.runner.model.batch.rows.write(table, write.seq.slot, write.blocks, offset=write.first)

    def feed(self, forced: ForcedSeq, count: int, chunk: int) -> Array | None:
        """Feed one sequence up to `count` tokens in all, `chunk` at a time; the logits after the last."""
        logits = None
        while forced.fed < count:
            logits = self.step([(forced, min(chunk, count - forced.fed))])
        return logits

    def rewind(self, forced: ForcedSeq, length: int) -> None:
        """Set a sequence back to its first `length` tokens. Recurrent states and pages outside a window are not
        restored and no snapshots left, so later steps can be timed, but not compared."""
        forced.fed = forced.seq.target = length
        self.runner.model.batch.rows.set("seq_lens", forced.seq.slot, length)

    def leave(self) -> None:
        """End all sequences and give their blocks back."""
        for forced in list(self._running.values()):
            self.drop(forced)
        self.runner.upload()

    def drop(self, forced: ForcedSeq) -> None:
        """End one sequence, as a preemption does; its slot is free."""
        del self._running[forced.seq.slot]
        self.runner.model.batch.rows.set("alive", forced.seq.slot, 0)
        forced.lease.release()
