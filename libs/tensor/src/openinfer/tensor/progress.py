"""How far a long piece of work is, and how many bytes something has, for a person or for a log."""

import sys
import time
from typing import TextIO

_WIDTH = 24
_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0


def format_bytes(count: float) -> str:
    """Bytes as text of three digits in B, kB, MB or GB, the powers of 1,000: 7712345 is "7.71 MB"."""
    unit, size = _unit(count)
    value = count / size
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"


def _unit(count: float) -> tuple[str, float]:
    """The unit in which a count of bytes, rounded to three digits, is below 1,000; GB for all that is larger."""
    for unit, size in (("B", 1.0), ("kB", 1e3), ("MB", 1e6)):
        if abs(count) < 999.5 * size:
            return unit, size
    return "GB", 1e9


class ProgressBar:
    """A callable `(done, total)`: in bytes, as `load_tensors` wants it, or in `things` of that name.

    On a terminal it redraws one line, at most ten times a second; elsewhere it writes a line every 25 %, and after ten
    seconds without one.
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
        self._written_at = self._started

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
        elif (quarter := int(part * 4)) > self._quarter or now - self._written_at >= _LOG_INTERVAL_S:
            self._quarter, self._written_at = quarter, now
            self._file.write(f"{text}  {int(100 * part)} %\n")
            self._file.flush()

    def _amount(self, done: int, total: int, now: float) -> str:
        if self._things is not None:
            return f"{done}/{total} {self._things}"
        rate = done / max(now - self._started, 1e-9)
        unit, size = _unit(total)
        return f"{done / size:.1f}/{total / size:.1f} {unit}  {format_bytes(rate)}/s"
