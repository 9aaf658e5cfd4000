"""A call of attention, and its division among a GPU's programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer.kernels.attention.tiles import HopperTile, Tile
from openinfer.kernels.op.launch import Aligned, Arg, Launch
from openinfer.tensor import Tensor

NO_WINDOW = 2**31 - 1
"""A window that reaches back to the first token from every position."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of both kernels of one call, in their order, and its sizes. `group`: query heads a key
    head; `table_tokens`: the longest context."""

    args: Mapping[str, Arg]
    kv: Tensor
    tokens: int
    rows: int
    kv_heads: int
    group: int
    dim: int
    page_size: int
    table_tokens: int

    @classmethod
    def of(cls, tensors: Mapping[str, Any], scale: float, window: int) -> AttentionCall:
        """`tensors`: what the kernels are given, by name; all are Tensor, but q may be Scratch and kv_scales None."""
        kv, table_width = tensors["kv"], tensors["block_tables"].shape[1]
        tokens, heads, dim = tensors["q"].shape
        _, _, kv_heads, page_size, _ = kv.shape
        args: dict[str, Arg] = {
            **{name: value for name, value in tensors.items() if value is not None},
            "table_width": table_width,
            "page_stride": Aligned(kv.strides[0]),
            "window": window or NO_WINDOW,
            "scale": scale * math.log2(math.e),
        }
        rows, group = tensors["slots"].shape[0], heads // kv_heads
        return cls(args, kv, tokens, rows, kv_heads, group, dim, page_size, table_width * page_size)

    def constants(self, tile: Tile | HopperTile) -> dict[str, int]:
        return {"GROUP": self.group, "D": self.dim, "PAGE": self.page_size, "BM": tile.bm, "BN": tile.bn}

    @property
    def windowed(self) -> bool:
        return self.args["window"] != NO_WINDOW

    @property
    def cache(self) -> dict[str, Arg]:
        """The tensors of the cache by their names: kv, and kv_scales of an FP8 cache."""
        return {name: self.args[name] for name in ("kv", "kv_scales") if name in self.args}

    @property
    def without(self) -> dict[str, None]:
        """The constant in place of the scales that the cache does not have."""
        return {} if "kv_scales" in self.args else {"kv_scales": None}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The division of a call: the tiles of both kernels, and the result of `split`."""

    short: Tile
    long: Tile | HopperTile
    codes: Tile
    """For rows of many tokens whose codes were not widened."""
    splits: int
    part_size: int
    num_sms: int
    only_long: bool = False
    """Whether rows of few tokens take the kernel of the others."""
    pairs: bool = False
    """Whether codes of an FP8 cache become numbers by assembly."""
    release: bool = False
    """Whether the kernel behind decode attention may start at once, which a ring of weights does (launch.Launch)."""
    decode: Launch | None = None
    """All of a decode step over an FP8 cache, where one kernel does that."""
