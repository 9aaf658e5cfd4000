"""Chosen tokens through an engine's recorded steps, below its scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openinfer.kernels import Pack, apply_writes
from openinfer.recipes.deepseek_v4.batch import MAX_STOP_IDS, TABLES
from openinfer.recipes.deepseek_v4.cache import ENTRIES, WINDOW
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.runner import Runner

Array = np.ndarray[Any, Any]


class Forced:
    """Feeds chosen tokens through an engine's recorded steps, below its scheduler. Slots are the caller's to choose.
    The engine must be idle, and is to be closed afterwards. `pack`: for eager steps, another than the runner's.

    Pages of entries are handed out in order. Pages of the window group are too, and have the same ids, as long as there
    are any: then those that no slot's window reaches are taken, the oldest first."""

    def __init__(self, runner: Runner, *, eager: bool = False, pack: Pack | None = None) -> None:
        self._runner, self._eager, self._pack = runner, eager, pack or runner.pack
        cache = runner.model.cache
        self._num_windows, self._num_entries = cache.window.shape[0], cache.csa_entries.shape[0]
        self._reach = max(1, runner.model.config.sliding_window - 1)
        self._next_page = 1
        self._lengths: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}  # of entries, by slot
        self._windows: dict[int, int] = {}  # by page of entries, that of the window group for the same tokens
        self._shown: dict[int, dict[int, int]] = {}  # by slot, what was written to its table of windows

    def join(self, slot: int, max_len: int, shared: Sequence[int] = ()) -> list[int]:
        """Start a sequence of at most max_len tokens; the pages in `shared` hold its beginning already. Returns its
        pages of entries."""
        rows = self._runner.model.rows
        fresh = -(-max_len // PAGE) - len(shared)
        pages = [*shared, *range(self._next_page, self._next_page + fresh)]
        self._next_page += fresh
        if self._next_page > self._num_entries:
            raise MemoryError("the cache has too few pages of entries for this gate")
        self._lengths[slot], self._pages[slot], self._shown[slot] = len(shared) * PAGE, pages, {}
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, self._lengths[slot])
        rows.write("stop_ids", slot, [-1] * MAX_STOP_IDS)
        rows.write(TABLES[ENTRIES], slot, pages)
        return pages

    def _give_windows(self, counts: dict[int, int]) -> None:
        """Pages of the window group for slots that get so many tokens: what those read and write, and one more."""
        needed = {
            slot: range(max(0, length - self._reach) // PAGE, (length + counts.get(slot, 0)) // PAGE + 2)
            for slot, length in self._lengths.items()
        }
        busy = {
            page for slot, reach in needed.items() for page in self._pages[slot][reach.start : reach.stop]
        }
        for slot in counts:
            shown, pages = self._shown[slot], self._pages[slot]
            for index in needed[slot][: len(pages) - needed[slot].start]:
                if pages[index] not in self._windows:
                    self._windows[pages[index]] = self._window_page(busy)
                page = self._windows[pages[index]]
                if shown.get(index) != page:
                    shown[index] = page
                    self._runner.model.rows.write(TABLES[WINDOW], slot, [page], offset=index)

    def _window_page(self, busy: set[int]) -> int:
        if len(self._windows) < self._num_windows - 1:
            return len(self._windows) + 1
        for entries in self._windows:
            if entries not in busy:
                return self._windows.pop(entries)
        raise MemoryError("the cache has too few pages of the window group for this gate")

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
        self._give_windows({slot: len(tokens) for slot, tokens in items})
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

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Set the lengths of slots, and send what changed. What is left of windows there is not what was."""
        self._lengths.update(lengths)
        for slot, length in lengths.items():
            self._runner.model.rows.set("seq_lens", slot, length)
        self.upload()

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
        for books in (self._lengths, self._pages, self._windows, self._shown):
            books.clear()
        self._next_page = 1
