"""ProgressBar: how far a long piece of work is, for a person or for a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24
_INTERVAL_S = 0.1


class ProgressBar:
    """A callable `(done, total)`: in bytes, as `load_tensors` wants it, or in `things` of that name.

    On a terminal it redraws one line, at most ten times a second; elsewhere it writes a line every 25 %.
    `file` defaults to sys.stderr.
    """

    def __init__(
        self, label: str = "loading weights", file: TextIO | None = None, *, things: str | None = None
    ) -> None:
        self._label = label
        self._things = things
        self._file = sys.stderr if file is None else file
        self._started = time.perf_counter()
        self._drawn_at = float("-inf")
        self._quarter = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        part = done / total if total else 1.0
        text = f"{self._label}  {self._amount(done, total, now)}"
        if self._file.isatty():
            if done >= total or now - self._drawn_at >= _INTERVAL_S:
                bar = "#" * int(part * _WIDTH)
                self._file.write(f"\r{text}  [{bar:<{_WIDTH}}]" + ("\n" if done >= total else ""))
                self._file.flush()
                self._drawn_at = now
        elif (quarter := int(part * 4)) > self._quarter:
            self._quarter = quarter
            self._file.write(f"{text}  {25 * quarter} %\n")
            self._file.flush()

    def _amount(self, done: int, total: int, now: float) -> str:
        if self._things is not None:
            return f"{done}/{total} {self._things}"
        rate = done / 1e9 / max(now - self._started, 1e-9)
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        return f"{done / size:.1f}/{total / size:.1f} {unit}  {rate:.1f} GB/s"
