"""q_kv_write: norms of the query's low-rank vector and of the key-value vector, which goes into its page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from openinfer.kernels.authoring import (
    FLOATS,
    SCALE_BLOCK,
    Aligned,
    Array,
    Command,
    Cost,
    Op,
    Target,
    Workload,
    aligned,
    expect,
    expect_cos_sin,
    f32,
    launch,
    power_of_two,
    q8,
    require,
    rms_norm,
    rounded,
)
from openinfer.recipes.deepseek_v4.ops.common import PAGE, rope
from openinfer.tensor import Tensor, bfloat16, float32, int32

KV_BLOCK = 64
"""Channels of a key-value vector or an entry that share a scale; the rotated ones are not rounded."""


def rounded_key(x: Array, rotary: int) -> Array:
    """Float32 x [..., d] with all but the last `rotary` channels through q8 in blocks of 64."""
    return np.concatenate([q8(x[..., :-rotary], KV_BLOCK), x[..., -rotary:]], axis=-1)


def _contract(
    *,
    qr: Tensor,
    kv: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    block_tables: Tensor,
    eps: float,
    quantized: bool,
) -> None:
    """Split qkv into the query's Q columns and the key-value vector's d; normalise both; rotate and write the latter.

    qkv [T, Q + d]. qr [T, Q] = q_norm * q / rms(q), rounded; with `quantized` through q8 in blocks of 128 (formats.q8).
    The key-value vector: kv_norm * v / rms(v), rounded, its last r channels rotated in pairs (2i, 2i + 1), rounded;
    with `quantized` the first d - r go through q8 in blocks of 64. It is written to kv [pages, 128, d]: one layer of
    the window pages, dense within a page, pages at any stride. All of one float dtype; q_norm float32 [Q], kv_norm
    float32 [d]. cos_sin float32 [P, 2, r / 2], by position. positions, token_slots int32 [T]; block_tables int32
    [S, B]: the page of position p of slot s is block_tables[s, p // 128]. Slot 0's table names page 0, which no row
    reads, so tokens of slot 0 may write there or not at all. Q is a multiple of 128, d - r of 64.
    """
    expect("kv", kv, (-1, PAGE, -1), *FLOATS, dense=False)
    expect("kv[0]", kv[0], kv.shape[1:])
    dim, tokens = kv.shape[2], positions.shape[0]
    expect("qr", qr, (tokens, -1), kv.dtype)
    width = qr.shape[1]
    expect("qkv", qkv, (tokens, width + dim), kv.dtype)
    expect("q_norm", q_norm, (width,), float32)
    expect("kv_norm", kv_norm, (dim,), float32)
    expect_cos_sin(cos_sin, dim)
    expect("positions", positions, (tokens,), int32)
    expect("token_slots", token_slots, (tokens,), int32)
    expect("block_tables", block_tables, (-1, -1), int32)
    plain = dim - 2 * cos_sin.shape[2]
    require(width % SCALE_BLOCK == 0, f"qr has {width} columns; it must be a multiple of {SCALE_BLOCK}")
    require(plain % KV_BLOCK == 0, f"{plain} channels are not rotated; it must be a multiple of {KV_BLOCK}")
    require(eps > 0, f"eps is {eps}; it must be positive")


def _reference(
    *,
    qr: Array,
    kv: Array,
    qkv: Array,
    q_norm: Array,
    kv_norm: Array,
    cos_sin: Array,
    positions: Array,
    token_slots: Array,
    block_tables: Array,
    eps: float,
    quantized: bool,
) -> None:
    width = qr.shape[1]
    normed = f32(rms_norm(qkv[:, :width], q_norm, eps))
    qr[:] = q8(normed, SCALE_BLOCK) if quantized else normed
    live = np.flatnonzero(token_slots)
    position = positions[live]
    key = f32(rms_norm(qkv[live, width:], kv_norm, eps))
    key = rounded(rope(key, cos_sin, position), kv.dtype)
    page = block_tables[token_slots[live], position // PAGE]
    kv[page, position % PAGE] = rounded_key(key, 2 * cos_sin.shape[2]) if quantized else key


def _launches(
    target: Target,
    *,
    qr: Tensor,
    kv: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    block_tables: Tensor,
    eps: float,
    quantized: bool,
) -> Iterator[Command]:
    (tokens, width), dim = qr.shape, kv.shape[2]
    require(kv.dtype == bfloat16, f"kv is {kv.dtype.name}; on a GPU it is bfloat16 (float32: the cpu pack)")
    require(dim == power_of_two(dim), f"kv has vectors of {dim}; on a GPU a power of two")
    yield launch(
        "openinfer.recipes.deepseek_v4.device.queries",
        "q_kv_write",
        (tokens, 2),
        {
            "qr": qr,
            "kv": kv,
            "qkv": qkv,
            "q_norm": q_norm,
            "kv_norm": kv_norm,
            "cos_sin": cos_sin,
            "positions": positions,
            "token_slots": token_slots,
            "block_tables": block_tables,
            "width": aligned(width),
            "table_width": block_tables.shape[1],
            "page_stride": Aligned(kv.strides[0]),
            "eps": eps,
        },
        {
            "BLOCK": power_of_two(width),
            "D": dim,
            "ROTARY": 2 * cos_sin.shape[2],
            "PAGE": PAGE,
            "QUANTIZED": quantized,
        },
    )


def _cost(workload: Workload, *, qkv: Tensor, **_: object) -> Cost:
    return Cost(2 * workload.tokens * qkv.shape[1] * qkv.itemsize, 8 * workload.tokens * qkv.shape[1])


q_kv_write = Op("q_kv_write", _contract, reference=_reference, launches=_launches, cost=_cost)
