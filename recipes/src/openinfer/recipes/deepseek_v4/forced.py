"""Chosen tokens through an engine's recorded steps, below its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer.kernels import Pack, apply_writes
from openinfer.recipes.deepseek_v4.batch import MAX_STOP_IDS, TABLES
from openinfer.recipes.deepseek_v4.cache import Cache
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.runner import Runner

Array = np.ndarray[Any, Any]


def num_pages(cache: Cache) -> int:
    """Pages that there are in both groups, the padding one included. Sequences have all of theirs here: there is no
    scheduler that moves windows on."""
    return min(cache.window.shape[0], cache.csa_entries.shape[0])


class Forced:
    """Feeds chosen tokens through an engine's recorded steps, below its scheduler. Slots are the caller's to choose;
    pages are handed out in order, the same ids in both groups. The engine must be idle, and is to be closed
    afterwards. `pack`: for eager steps, another than the runner's."""

    def __init__(self, runner: Runner, *, eager: bool = False, pack: Pack | None = None) -> None:
        self._runner, self._eager, self._pack = runner, eager, pack or runner.pack
        self._next_page = 1
        self._lengths: dict[int, int] = {}
        self._num_pages = num_pages(runner.model.cache)

    def join(self, slot: int, max_len: int, shared: Sequence[int] = ()) -> list[int]:
        """Start a sequence of at most max_len tokens; the pages in `shared` hold its beginning already. Returns its
        pages."""
        rows = self._runner.model.rows
        fresh = -(-max_len // PAGE) - len(shared)
        pages = [*shared, *range(self._next_page, self._next_page + fresh)]
        self._next_page += fresh
        if self._next_page > self._num_pages:
            raise MemoryError("the cache has too few pages for this gate")
        self._lengths[slot] = len(shared) * PAGE
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, self._lengths[slot])
        rows.write("stop_ids", slot, [-1] * MAX_STOP_IDS)
        for table in TABLES:
            rows.write(table, slot, pages)
        return pages

    def step(self, items: Sequence[tuple[int, Sequence[int]]], pad_rows: int = 0) -> Array:
        """Feed tokens to slots; returns the logits after each one's last token, float32 [len(items), V]. `pad_rows`
        makes the step at least that many rows."""
        runner, rows, n = self._runner, self._runner.model.rows, len(items)
        lengths = [len(tokens) for _, tokens in items]
        total = sum(lengths)
        tokens, num_rows, longest = runner.buckets.choose(
            max(total, pad_rows) if total == n else total, max(n, pad_rows)
        )
        starts = np.full(num_rows + 1, total, np.int32)
        starts[: n + 1] = np.concatenate([[0], np.cumsum(lengths)])
        slots = np.zeros(num_rows, np.int32)
        slots[:n] = [slot for slot, _ in items]
        prompt = np.full(tokens, -1, np.int32)
        prompt[:total] = np.concatenate([np.asarray(ids, np.int32) for _, ids in items])
        rows.write("slots", 0, slots)
        rows.write("q_starts", 0, starts)
        rows.write("prompt", 0, prompt)
        self.upload()
        if self._eager:
            runner.model.forward(self._pack, tokens, num_rows, longest)
        else:
            runner.graphs.launch(("forward", tokens, num_rows, longest))
        runner.stream.synchronize()
        for slot, ids in items:
            self._lengths[slot] += len(ids)
            rows.set("seq_lens", slot, self._lengths[slot])
        return runner.model.buffers.logits[:n].numpy()

    def upload(self) -> None:
        """Bring the batch state on the device up to date."""
        rows = self._runner.model.rows
        for _ in rows.uploads(self._runner.stream):
            apply_writes(self._runner.pack, words=rows.words, writes=rows.writes)

    def feed(self, slot: int, tokens: Sequence[int], chunk: int) -> Array | None:
        """Feed tokens to one slot, `chunk` at a time; the logits after the last."""
        logits = None
        for start in range(0, len(tokens), chunk):
            logits = self.step([(slot, tokens[start : start + chunk])])
        return logits

    def leave(self) -> None:
        """End all sequences and take the pages back."""
        for slot in self._lengths:
            self._runner.model.rows.set("alive", slot, 0)
        self._lengths.clear()
        self._next_page = 1
