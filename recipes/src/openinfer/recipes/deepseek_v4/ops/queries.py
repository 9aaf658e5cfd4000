"""q_kv_write: norms of the query's low-rank vector and of the key-value vector, which goes into its page.

place_vectors: the same of vectors that q_kv_write has made on other ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Coded, Command, Cost, Op, T, Target, Workload
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.tensor import Tensor, float32, int32

_DEVICE = "openinfer.recipes.deepseek_v4.device.queries"
KV_BLOCK = 64
"""Channels of a key-value vector or an entry that share a scale; the rotated ones are not rounded."""


def rounded_key(x: Array, rotary: int) -> Array:
    """Float32 x [..., d] with all but the last `rotary` channels through q8 in blocks of 64."""
    return np.concatenate([op.q8(x[..., :-rotary], KV_BLOCK), x[..., -rotary:]], axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """Split qkv into the query's Q columns and the key-value vector's d; normalise both; rotate and write the latter.

    qkv [T, Q + d]. qr [T, Q], or Coded, = q_norm * q / rms(q), rounded.
    The key-value vector: kv_norm * v / rms(v), rounded, its last r channels rotated in pairs (2i, 2i + 1), rounded;
    with `quantized` the first d - r go through q8 in blocks of 64. It is written to kv [pages, 128, d]: one layer of
    the window pages, dense within a page, pages at any stride. All of one float dtype; q_norm float32 [Q], kv_norm
    float32 [d]. cos_sin float32 [P, 2, r / 2], by position. positions, token_slots int32 [T]; block_tables int32
    [S, B]: the page of position p of slot s is block_tables[s, p // 128]. Slot 0's table names page 0, which no row
    reads, so tokens of slot 0 may write there or not at all. None: kv is [T, d], a vector a token. Q is a multiple of
    128, d - r of 64.
    """

    qr: Coded[T] | T
    kv: T
    qkv: T
    q_norm: T
    kv_norm: T
    cos_sin: T
    positions: T
    token_slots: T
    block_tables: T | None
    eps: float
    quantized: bool


def _check(a: _Args[Tensor]) -> None:
    dim, tokens = a.kv.shape[-1], a.positions.shape[0]
    if a.block_tables is None:
        op.expect("kv", a.kv, (tokens, dim), *op.FLOATS)
    else:
        op.expect_columns("kv", a.kv, (-1, PAGE, -1), *op.FLOATS)
        op.expect("block_tables", a.block_tables, (-1, -1), int32)
    op.expect_values("qr", a.qr, (tokens, -1), a.kv.dtype)
    width = a.qr.shape[1]
    op.expect("qkv", a.qkv, (tokens, width + dim), a.kv.dtype)
    op.expect("q_norm", a.q_norm, (width,), float32)
    op.expect("kv_norm", a.kv_norm, (dim,), float32)
    op.expect_cos_sin(a.cos_sin, dim)
    op.expect_each(a, (tokens,), int32, "positions", "token_slots")
    plain = dim - 2 * a.cos_sin.shape[2]
    op.require(
        width % op.SCALE_BLOCK == 0, f"qr has {width} columns; it must be a multiple of {op.SCALE_BLOCK}"
    )
    op.require(
        plain % KV_BLOCK == 0, f"{plain} channels are not rotated; it must be a multiple of {KV_BLOCK}"
    )
    op.require(a.eps > 0, f"eps is {a.eps}; it must be positive")


def _reference(a: _Args[Array]) -> None:
    width = a.qr.shape[1]
    op.write_values(a.qr, op.f32(op.rms_norm(a.qkv[:, :width], a.q_norm, a.eps)))
    live = np.flatnonzero(a.token_slots)
    position = a.positions[live]
    key = op.f32(op.rms_norm(a.qkv[live, width:], a.kv_norm, a.eps))
    key = op.rounded(op.rotated_pairs(key, a.cos_sin, position), a.kv.dtype)
    key = rounded_key(key, 2 * a.cos_sin.shape[2]) if a.quantized else key
    if a.block_tables is None:
        a.kv[live] = key
    else:
        a.kv[a.block_tables[a.token_slots[live], position // PAGE], position % PAGE] = key


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    (tokens, width), dim, tables = a.qr.shape, a.kv.shape[-1], a.block_tables
    op.expect_bf16(a.kv, "kv")
    op.require(dim == op.power_of_two(dim), f"kv has vectors of {dim}; on a GPU a power of two")
    args = {**op.code_args(a.qr), **op.tensors(a, "kv", "qkv", "q_norm", "kv_norm", "cos_sin", "positions")}
    args |= {"token_slots": a.token_slots, "block_tables": a.token_slots if tables is None else tables}
    args |= {"width": op.aligned(width), "table_width": 0 if tables is None else tables.shape[1]}
    args |= {"page_stride": op.Aligned(a.kv.strides[0]), "eps": a.eps}
    constants = {"BLOCK": op.power_of_two(width), "D": dim, "ROTARY": 2 * a.cos_sin.shape[2]}
    constants |= {"PAGE": 0 if tables is None else PAGE, "CODED": isinstance(a.qr, Coded)}
    constants |= {"QUANTIZED": a.quantized}
    yield op.launch(_DEVICE, "q_kv_write", (tokens, 2), args, constants, early=target.early(tokens))


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.qkv.shape[1] * a.qkv.itemsize, 8 * workload.tokens * a.qkv.shape[1])


q_kv_write = Op("q_kv_write", _Args[Tensor], _check, _reference, _launches, _cost, writes=("qr", "kv"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlaceArgs(Generic[T]):
    """Copy key-value vectors x [T, d], as q_kv_write makes them, to where it writes: into kv [pages, 128, d] by
    positions, token_slots and block_tables. Of one float dtype."""

    x: T
    kv: T
    positions: T
    token_slots: T
    block_tables: T


def _place_check(a: _PlaceArgs[Tensor]) -> None:
    tokens, dim = a.positions.shape[0], a.kv.shape[-1]
    op.expect("x", a.x, (tokens, dim), *op.FLOATS)
    op.expect_columns("kv", a.kv, (-1, PAGE, -1), a.x.dtype)
    op.expect("block_tables", a.block_tables, (-1, -1), int32)
    op.expect_each(a, (tokens,), int32, "positions", "token_slots")


def _place_reference(a: _PlaceArgs[Array]) -> None:
    live = np.flatnonzero(a.token_slots)
    position = a.positions[live]
    a.kv[a.block_tables[a.token_slots[live], position // PAGE], position % PAGE] = a.x[live]


def _place_launches(target: Target, a: _PlaceArgs[Tensor]) -> Iterator[Command]:
    tokens, dim = a.x.shape
    op.require(dim == op.power_of_two(dim), f"x has vectors of {dim}; on a GPU a power of two")
    page_stride = op.Aligned(a.kv.strides[0])
    args: dict[str, Arg] = {
        **op.tensors(a),
        "table_width": a.block_tables.shape[1],
        "page_stride": page_stride,
    }
    constants, early = {"D": dim, "PAGE": PAGE}, target.early(tokens)
    yield op.launch(_DEVICE, "place_vectors", (tokens,), args, constants, num_warps=1, early=early)


def _place_cost(workload: Workload, a: _PlaceArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.x.shape[1] * a.x.itemsize, 0)


place_vectors = Op(
    "place_vectors", _PlaceArgs[Tensor], _place_check, _place_reference, _place_launches, _place_cost, writes=("kv",)
)  # fmt: skip
