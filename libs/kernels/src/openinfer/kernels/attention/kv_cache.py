"""The paged cache of keys and values: the layout of its pages, in a float dtype or in FP8.

In FP8 the key and the value of a head of a token have a scale each: a power of two, which is one byte. A scale depends
on no other token. So pages are written token by token, and no code is ever quantised again. A token that replaces
another one (a rejected draft) replaces its scales too. A cached prefix has the same bits however it was computed. e4m3
keeps three bits of the mantissa whatever the scale is, so scales need be no finer than powers of two. They keep heads
of any size within its range.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.op.contract import expect_columns, require
from openinfer.tensor import Arena, Stream, Tensor, float8_e4m3fn, uint8

PUBLISHED_SCALES = ("*.k_scale", "*.v_scale")
"""Scales of a cache in a checkpoint, as patterns of Checkpoint.require. They are not needed: tokens have their own."""
FP8_ARCH = 89
"""The first architecture of a GPU that converts float8, and so can have an FP8 cache."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The numbers of a cache: their dtype, and whether the key and the value of a head have a scale of a byte each."""

    dtype: np.dtype[Any]
    scaled: bool = False

    @classmethod
    def of(cls, kv: Tensor, kv_scales: object) -> "CacheForm":
        """The form of a layer that ops are given."""
        return cls(kv.dtype, kv_scales is not None)

    @property
    def arch(self) -> int:
        """The first architecture of a GPU that can have such a cache."""
        return FP8_ARCH if self.scaled else 0

    def token_bytes(self, heads: int, dim: int) -> int:
        """Bytes of a token's keys and values in a layer of this many heads."""
        return 2 * heads * (dim * self.dtype.itemsize + self.scaled)


FP8_CACHE = CacheForm(np.dtype(float8_e4m3fn), scaled=True)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The sizes of a cache: layers, key heads G, tokens a page, elements d of a head."""

    layers: int
    heads: int
    page_size: int
    dim: int
    form: CacheForm

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's part of a page."""
        return self.page_size * self.form.token_bytes(self.heads, self.dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, which holds all layers."""
        return self.layers * self.layer_bytes

    def allocate(self, arena: Arena, stream: Stream, pages: int) -> "KvCache":
        """A cache of `pages` pages. On a GPU it is zeroed, because kernels may multiply by zero what no token wrote."""
        cache = self.over(arena.alloc((pages, self.page_bytes), uint8, "kv cache"))
        if arena.device.kind == "cuda":
            cache.clear(stream)
        return cache

    def over(self, memory: Tensor) -> "KvCache":
        """The cache in `memory`, uint8 [pages, page_bytes], which it keeps alive."""
        shape = (memory.shape[0], self.layers, 2, self.heads, self.page_size, self.dim)
        if not self.form.scaled:
            kv = memory.view_as(self.form.dtype).reshape(shape)
            return KvCache(kv, kv)

        def view(start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
            inner = [math.prod(shape[axis + 1 :]) for axis in range(2, len(shape))]
            strides = (self.page_bytes, self.layer_bytes, *inner)
            return Tensor(memory.ptr + start, shape, dtype, memory.device, strides, memory.owner, memory.name)

        return KvCache(memory, view(0, shape, self.form.dtype), view(math.prod(shape[2:]), shape[:-1], uint8))


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers, page-first.

    pages: the memory; its first axis is the page. kv [pages, L, 2, G, page_size, d]: K, then V of each layer. scales
    uint8 [pages, L, 2, G, page_size]: the E8M0 bytes of an FP8 cache, which lie behind the codes of their layer.
    """

    pages: Tensor
    kv: Tensor
    scales: Tensor | None = None

    def layer(self, index: int) -> dict[str, Any]:
        """A layer's tensors, as arguments of the ops of attention."""
        return {"kv": self.kv[:, index], "kv_scales": None if self.scales is None else self.scales[:, index]}

    def clear(self, stream: Stream, pages: int | None = None) -> None:
        """Zero the first pages; None: all."""
        self.pages[:pages].zero_(stream)


def expect_cache(kv: Tensor, kv_scales: Tensor | None, dim: int, dtype: np.dtype[Any]) -> None:
    """Raise ContractError unless kv is a layer of a cache for heads of `dim` (-1 = any) elements.

    kv [pages, 2, G, page_size, d] is dense within a page, with pages at any stride. It has `dtype` and no scales; or it
    is float8_e4m3fn, and kv_scales uint8 [pages, 2, G, page_size] has E8M0 bytes at the same stride: byte b of a head's
    token is the factor 2^(b - 127) of its d codes. Pages then have a multiple of 4 tokens.
    """
    form = CacheForm(dtype) if kv_scales is None else FP8_CACHE
    expect_columns("kv", kv, (-1, 2, -1, -1, dim), form.dtype)
    if kv_scales is not None:
        expect_columns("kv_scales", kv_scales, kv.shape[:4], uint8)
        strides = kv.strides[0], kv_scales.strides[0]
        require(
            strides[0] == strides[1] and strides[0] % 16 == 0,
            f"pages of kv and kv_scales are {strides} bytes apart; both must be the same multiple of 16",
        )
        whole = kv.shape[3] % 4 == 0
        require(whole, f"page size is {kv.shape[3]}; with kv_scales it must be a multiple of 4")


def cached_bytes(kv: Tensor, kv_scales: Tensor | None) -> int:
    """Bytes of a token's keys and values in a layer."""
    return CacheForm.of(kv, kv_scales).token_bytes(kv.shape[2], kv.shape[4])
