"""A call of attention, and its division among a GPU's programs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from openinfer.kernels.attention.kv_cache import CacheForm
from openinfer.kernels.attention.tiles import HopperTile, Tile
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch
from openinfer.kernels.op.op import T, tensors
from openinfer.tensor import Tensor, float32, int32

ROWS = ("slots", "q_starts", "seq_lens", "alive", "block_tables")
"""Arguments by which a kernel finds the tokens of rows and their pages."""
NO_WINDOW = 2**31 - 1
"""A window that reaches back to the first token from every position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendArgs(Generic[T]):
    """out[t] = softmax(scale * q[t] . K) V over the cached tokens that token t may see.

    Rows, slots, q_starts, seq_lens and alive as in expand_rows. Token i of row r is at position p = seq_lens[slot] + i.
    It sees the positions j <= p, and with window > 0 only those with p - j < window. Its own key and value are in the
    cache already. q [T, A, d] and out [T, A * d] of one float dtype; kv [pages, 2, G, page_size, d] and kv_scales as in
    kv_cache.expect_cache; query head a uses key head a // (A / G). block_tables int32 [S, B]. max_q_len: no row has
    more tokens than this (1 in a decode step). scale > 0. Softmax in float32. The values written for tokens of dead
    rows and for tokens past q_starts[R] are finite and otherwise unspecified. On a GPU d is a power of two.
    """

    out: T
    q: T
    kv: T
    kv_scales: T | None = None
    slots: T
    q_starts: T
    seq_lens: T
    alive: T
    block_tables: T
    scale: float
    window: int
    max_q_len: int


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
    def of(cls, a: AttendArgs[Any]) -> "AttentionCall":
        """All tensors are Tensor, but q may be Scratch."""
        table_width, (tokens, heads, dim) = a.block_tables.shape[1], a.q.shape
        _, _, kv_heads, page_size, _ = a.kv.shape
        args: dict[str, Arg] = {
            "out": a.out,
            "q": a.q,
            **tensors(a, "kv", "kv_scales", "slots", "q_starts", "seq_lens", "alive", "block_tables"),
            "table_width": table_width,
            "page_stride": Aligned(a.kv.strides[0]),
            "window": a.window or NO_WINDOW,
            "scale": a.scale * math.log2(math.e),
        }
        rows, group = a.slots.shape[0], heads // kv_heads
        return cls(args, a.kv, tokens, rows, kv_heads, group, dim, page_size, table_width * page_size)

    def constants(self, tile: Tile | HopperTile) -> dict[str, int | None]:
        return {"GROUP": self.group, "D": self.dim, "PAGE": self.page_size, "BM": tile.bm, "BN": tile.bn}

    @property
    def form(self) -> CacheForm:
        """The numbers of the cache."""
        return CacheForm.of(self.kv, self.args.get("kv_scales"))

    @property
    def windowed(self) -> bool:
        return self.args["window"] != NO_WINDOW

    @property
    def cache(self) -> dict[str, Arg]:
        """The tensors of the cache by their names: kv, and kv_scales of an FP8 cache."""
        return self.some("kv", "kv_scales") if self.form.scaled else self.some("kv")

    def some(self, *names: str) -> dict[str, Arg]:
        """Some of the arguments, in this order."""
        return {name: self.args[name] for name in names}

    def parts(self, shape: tuple[int, ...], heads: tuple[int, ...]) -> dict[str, Scratch]:
        """Memory for parts of the results, with their weights, and for a count of those that are there by head."""
        partial, weight = Scratch((*shape, self.dim), float32), Scratch(shape, float32)
        return {"partial": partial, "weight": weight, "arrived": Scratch(heads, int32, zeroed=True)}

    @property
    def without(self) -> dict[str, None]:
        """The constant in place of the scales that the cache does not have."""
        return {} if self.form.scaled else {"kv_scales": None}


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
