"""Saver: takes blocks that a pool evicts to a place from which a Loader brings them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .events import BlockRemoved, BlockStored


class Saver(Protocol):
    """Takes blocks that leave the pool. One thread, that of the pool's owner, calls it."""

    def save(self, group: int, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Cached blocks were evicted; they are about to be written. The saver must read them first: it copies them
        before it returns, or orders its copies before later work of the device."""

    def clear(self) -> None:
        """Forget every block: the pool drops its cache, as after a change of weights."""

    def take_events(self) -> Sequence[BlockStored | BlockRemoved]:
        """Blocks that became findable in the saver, or are no longer, since the last call."""
