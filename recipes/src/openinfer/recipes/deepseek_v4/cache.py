"""The KV cache on the device: two groups of pages of 128 tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from openinfer.kernels.authoring import power_of_two
from openinfer.kvpool import Eviction, Group, Lru, S3Fifo
from openinfer.recipes.deepseek_v4.config import CSA, HCA, Config
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.tensor import Arena, Device, Stream, Tensor, float32

WINDOW, ENTRIES = 0, 1
"""The pool's groups.

A page of the window group has the raw vectors of 128 tokens in all layers. It also has the states of the compressors
after the last of these tokens. A page that has left the window is given back. So a prompt of any length needs only the
pages of the window and of the chunks that are in flight.

A page of the entries group has the entries that 128 tokens were compressed to.

A cached prefix can end at every multiple of 128 tokens, because the page before it has the window and the states."""


TABLES = ("window_tables", "entry_tables")
"""The row fields with their block tables."""


@dataclass(frozen=True, slots=True)
class V4Cache:
    """The tensors of both groups, page-first; layers of a kind in their order. States are float32 (ops.compress)."""

    window: Tensor  # [pages, layers, 128, d]; those of layers that draft last
    csa_state: Tensor  # [pages, CSA layers, 3, 3, d]
    index_state: Tensor  # [pages, CSA layers, 3, 3, di]
    hca_state: Tensor  # [pages, HCA layers, 1, 3, d]
    csa_entries: Tensor  # [pages, CSA layers, 32, d]
    index_keys: Tensor  # [pages, CSA layers, 32, di]
    hca_entries: Tensor  # [pages, HCA layers, 1, d]

    @classmethod
    def allocate(
        cls, config: Config, arena: Arena, dtype: np.dtype[Any], blocks: Sequence[int], *, drafting: int = 0
    ) -> "V4Cache":
        """Uninitialised. blocks: pages of each group. drafting: layers that draft."""
        c, csa, hca, (window_pages, entry_pages) = config, config.count(CSA), config.count(HCA), blocks
        layers = c.num_layers + drafting
        return cls(
            window=arena.alloc((window_pages, layers, PAGE, c.head_dim), dtype, "window"),
            csa_state=arena.alloc((window_pages, csa, 3, 3, c.head_dim), float32, "CSA states"),
            index_state=arena.alloc((window_pages, csa, 3, 3, c.index_dim), float32, "indexer states"),
            hca_state=arena.alloc((window_pages, hca, 1, 3, c.head_dim), float32, "HCA states"),
            csa_entries=arena.alloc((entry_pages, csa, PAGE // CSA, c.head_dim), dtype, "CSA entries"),
            index_keys=arena.alloc((entry_pages, csa, PAGE // CSA, c.index_dim), dtype, "indexer keys"),
            hca_entries=arena.alloc((entry_pages, hca, PAGE // HCA, c.head_dim), dtype, "HCA entries"),
        )

    def by_group(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the window group, and of the entries group."""
        return (
            [self.window, self.csa_state, self.index_state, self.hca_state],
            [self.csa_entries, self.index_keys, self.hca_entries],
        )

    def zero_(self, stream: Stream, pages: int | None = None) -> None:
        """Fill with zeros, because kernels may multiply unwritten elements by zero, so these must be finite.

        `pages`: the number of pages to fill, from the first on; None: all.
        """
        for tensor in chain(*self.by_group()):
            tensor[:pages].zero_(stream)


@dataclass(frozen=True, slots=True)
class Recent:
    """The states of compressors after the last tokens of each slot, some of which may be drafts (ops.compress)."""

    csa: Tensor  # float32 [slots, CSA layers, tokens, 3, 3, d]
    index: Tensor  # float32 [slots, CSA layers, tokens, 3, 3, di]
    hca: Tensor  # float32 [slots, HCA layers, tokens, 1, 3, d]

    @classmethod
    def allocate(cls, cache: V4Cache, arena: Arena, slots: int, max_drafts: int) -> "Recent":
        """Uninitialised, for states as the cache has them. max_drafts: of a row."""
        ring, states = power_of_two(2 * max_drafts + 2), (cache.csa_state, cache.index_state, cache.hca_state)
        shapes = ((one.name, (slots, one.shape[1], ring, *one.shape[2:])) for one in states)
        return cls(*(arena.alloc(shape, float32, name + " of drafts") for name, shape in shapes))


def groups(config: Config, dtype: np.dtype[Any], blocks: Sequence[int], *, drafting: int = 0) -> list[Group]:
    page = V4Cache.allocate(config, Arena(Device("null"), None), dtype, (1, 1), drafting=drafting)
    window, entries = (sum(tensor.nbytes for tensor in tensors) for tensors in page.by_group())
    return [
        Group("window", PAGE, blocks[0], window, window=max(1, config.sliding_window - 1)),
        Group("entries", PAGE, blocks[1], entries),
    ]


def eviction(group: Group) -> Eviction:
    """The eviction order of a group: least recently used for entries, S3-FIFO for windows.

    A prompt leaves a window page at every 128 tokens, and later prompts start from one or two of them. So a window page
    from which no prompt started is evicted first.
    """
    return S3Fifo(group) if group.window is not None else Lru(group)
