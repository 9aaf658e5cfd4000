"""Shared counters of a server's processes, so that each process can show the sums."""

import mmap
from collections.abc import Sequence
from pathlib import Path

CELLS = 1024
"""Numbers a process has room for, 8 bytes each."""


class Cells:
    """Some neighbouring numbers of a Board. `own` is written to, by one process and thread only."""

    __slots__ = ("_all", "own")

    def __init__(self, boards: "Sequence[memoryview[float]]", start: int, count: int) -> None:
        self._all = [board[start : start + count] for board in boards]
        self.own = self._all[0]

    def sums(self) -> list[float]:
        """The sums over all processes."""
        return [sum(numbers) for numbers in zip(*self._all, strict=True)]


class Board:
    """Float64 numbers, starting at zero: our own, and where there are more processes, theirs to read.

    All processes claim the same cells in the same order. A process that dies leaves its numbers to its successor, so
    that sums never go down.
    """

    def __init__(self, buffers: Sequence[bytearray | mmap.mmap] = ()) -> None:
        self._boards = [memoryview(one).cast("d") for one in buffers or [bytearray(8 * CELLS)]]
        self._claimed = 0

    @classmethod
    def shared(cls, paths: Sequence[Path]) -> "Board":
        """Over files of create(): the first is ours."""
        buffers = []
        for path in paths:
            with path.open("r+b") as file:
                buffers.append(mmap.mmap(file.fileno(), 8 * CELLS))
        return cls(buffers)

    @staticmethod
    def create(path: Path) -> None:
        """Make a file for one process."""
        path.write_bytes(bytes(8 * CELLS))

    def claim(self, count: int) -> Cells:
        """The next `count` numbers. Raises MemoryError when there is no room."""
        start, self._claimed = self._claimed, self._claimed + count
        if self._claimed > CELLS:
            raise MemoryError(f"a board has {CELLS} numbers, and {self._claimed} are needed")
        return Cells(self._boards, start, count)
