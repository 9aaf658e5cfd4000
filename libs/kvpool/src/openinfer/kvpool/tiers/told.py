"""Told: the events of tiers, for routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..events import BlockRemoved, BlockStored
from ..group import Group

Medium = Literal["CPU", "DISK"]


class Told:
    """Blocks that became findable in a tier, or are no longer. keep: False keeps no event."""

    def __init__(self, groups: Sequence[Group], *, keep: bool) -> None:
        self._groups, self._keep = groups, keep
        self._events: list[BlockStored | BlockRemoved] = []

    def stored(self, group: int, names: Sequence[bytes], medium: Medium) -> None:
        """Blocks of a group are in the tier."""
        if self._keep and names:
            size = self._groups[group].block_size
            self._events.append(BlockStored([*names], None, [], size, medium=medium, group_idx=group))

    def removed(self, gone: list[tuple[int, bytes]], medium: Medium) -> None:
        """These blocks, each a group and a name, are no longer in the tier. Clears the list."""
        if self._keep:
            self._events += [BlockRemoved([name], medium=medium, group_idx=group) for group, name in gone]
        gone.clear()

    def disk(self, found: list[tuple[int, bytes]], evicted: list[tuple[int, bytes]]) -> None:
        """Records of an earlier process, and those that were dropped. Clears the lists."""
        for group, name in found:
            self.stored(group, [name], "DISK")
        found.clear()
        self.removed(evicted, "DISK")

    def take(self) -> list[BlockStored | BlockRemoved]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken
