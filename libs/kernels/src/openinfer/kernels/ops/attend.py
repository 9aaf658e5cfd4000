"""attend: causal attention of a step's tokens over the paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from openinfer.kernels.attention.call import AttentionCall, AttentionChoice
from openinfer.kernels.attention.choose import choose, launches
from openinfer.kernels.attention.kv_cache import KvLayout, cached_bytes, expect_cache
from openinfer.kernels.attention.tiles import Tile
from openinfer.kernels.formats.codes import q8_values
from openinfer.kernels.op.cases import CaseRows, Commands, Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_max_q_len, expect_rows, require
from openinfer.kernels.op.launch import Command, Launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, int32, uint8


def _contract(
    *,
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None = None,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    max_q_len: int,
) -> None:
    """out[t] = softmax(scale * q[t] . K) V over the cached tokens that token t may see.

    Rows, slots, q_starts, seq_lens and alive as in expand_rows. Token i of row r is at position p = seq_lens[slot] + i.
    It sees the positions j <= p, and with window > 0 only those with p - j < window. Its own key and value are in the
    cache already. q [T, A, d] and out [T, A * d] of one float dtype; kv [pages, 2, G, page_size, d] and kv_scales as in
    kv_cache.expect_cache; query head a uses key head a // (A / G). block_tables int32 [S, B]. max_q_len: no row has
    more tokens than this (1 in a decode step). scale > 0. Softmax in float32. The values written for tokens of dead
    rows and for tokens past q_starts[R] are finite and otherwise unspecified. On a GPU d is a power of two.
    """
    expect("q", q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = q.shape
    expect("out", out, (tokens, heads * dim), q.dtype)
    expect_cache(kv, kv_scales, dim, q.dtype)
    rows, size = expect_rows(slots, q_starts, seq_lens=seq_lens, alive=alive)
    expect("block_tables", block_tables, (size, -1), int32)
    require(heads % kv.shape[2] == 0, f"{heads} query heads cannot share {kv.shape[2]} key heads evenly")
    require(scale > 0, f"scale is {scale}; it must be positive")
    require(window >= 0, f"window is {window}; it must be 0 (none) or positive")
    expect_max_q_len(max_q_len, tokens, rows)


def _reference(
    *,
    out: Array,
    q: Array,
    kv: Array,
    kv_scales: Array | None = None,
    slots: Array,
    q_starts: Array,
    seq_lens: Array,
    alive: Array,
    block_tables: Array,
    scale: float,
    window: int,
    max_q_len: int,
) -> None:
    _, heads, dim = q.shape
    kv_heads, page_size = kv.shape[2:4]
    out[:] = 0
    for row, slot in enumerate(slots):
        start, end = int(q_starts[row]), int(q_starts[row + 1])
        if start == end or not alive[slot]:
            continue
        first = int(seq_lens[slot])
        length = first + end - start
        pages = block_tables[slot, : -(-length // page_size)]
        keys, values = (_cached(kv, kv_scales, pages, part, length) for part in range(2))
        for token in range(start, end):  # one query at a time: the result must not depend on the chunk
            position = first + token - start
            low = max(0, position + 1 - window) if window else 0
            query = f32(q[token]).reshape(kv_heads, heads // kv_heads, dim)
            scores = np.matmul(query, keys[:, low : position + 1].transpose(0, 2, 1)) * np.float32(scale)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            total = weights.sum(axis=-1, keepdims=True)
            weights = weights if q.dtype == np.float32 else f32(weights.astype(q.dtype))
            out[token] = (np.matmul(weights, values[:, low : position + 1]) / total).reshape(-1)


def _cached(kv: Array, kv_scales: Array | None, pages: Array, part: int, length: int) -> Array:
    """Keys (part 0) or values (1) of the first `length` tokens of pages: float32 [G, length, d]."""

    def by_token(array: Array) -> Array:
        heads_first = array[pages, part].swapaxes(0, 1)
        return np.asarray(heads_first.reshape(kv.shape[2], -1, *array.shape[4:])[:, :length])

    codes = by_token(kv)
    return f32(codes) if kv_scales is None else q8_values(codes, by_token(kv_scales))


def require_attention(dtype: np.dtype[Any], dim: int, page_size: int) -> None:
    """Raise ContractError for sizes that the kernels of attention do not support."""
    require(dtype == bfloat16, f"q is {dtype.name}; attention on a GPU is bfloat16 (float32: the cpu pack)")
    require(
        dim >= 16 and dim & (dim - 1) == 0,
        f"head size is {dim}; attention on a GPU takes powers of two from 16",
    )
    require(
        page_size >= 1 and page_size & (page_size - 1) == 0,
        f"page size is {page_size}; it must be a power of two",
    )


TENSORS = ("out", "q", "kv", "kv_scales", "slots", "q_starts", "seq_lens", "alive", "block_tables")
"""The tensors of a call in the order of the kernels' parameters."""


def _launches(
    target: Target,
    *,
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None = None,
    slots: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    alive: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    max_q_len: int,
) -> Iterator[Command]:
    require_attention(q.dtype, q.shape[2], kv.shape[3])
    given = (out, q, kv, kv_scales, slots, q_starts, seq_lens, alive, block_tables)
    call = AttentionCall.of(dict(zip(TENSORS, given, strict=True)), scale, window)
    yield from launches(call, choose(target, call), max_q_len)


def _cost(
    workload: Workload, *, out: Tensor, q: Tensor, kv: Tensor, kv_scales: Tensor | None = None, **rest: object
) -> Cost:
    _, heads, dim = q.shape
    cached = workload.kv_tokens * cached_bytes(kv, kv_scales)
    return Cost(cached + 2 * workload.tokens * heads * dim * q.itemsize, 4 * workload.qk_pairs * heads * dim)


attend = Op("attend", _contract, reference=_reference, launches=_launches, cost=_cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Decode, prompts and both in one step, for heads of 128 and of 256, over a cache in bf16 and in FP8."""
    steps = {f"decode {rows} x {n}": CaseRows([1] * rows, [n - 1] * rows)
        for n in (1024, 4096, 16384) for rows in (1, 8, 32, 128)}  # fmt: skip
    steps |= {f"prompt {n}": CaseRows([n], [0]) for n in (128, 1024, 4096, 16384)}
    steps["chunk 2048 after 14336"] = CaseRows([2048], [14336])
    steps["chunk 1984 and 64 rows x 4096"] = CaseRows([1984] + [1] * 64, [0] + [4095] * 64)
    models = {"Qwen3-4B": (32, 8, 128), "Qwen3.5-4B": (16, 4, 256)}
    for (model, (heads, kv_heads, dim)), dtype in itertools.product(
        models.items(), (bfloat16, float8_e4m3fn)
    ):
        layout, kind = KvLayout(1, kv_heads, 16, dim, dtype), "" if dtype == bfloat16 else " FP8 cache"
        for name, rows in steps.items():
            tables, pages = rows.pages(memory, 16, 40960)
            args = {
                "out": memory.empty(rows.tokens, heads * dim),
                "q": memory.normal(rows.tokens, heads, dim),
                "pages": _pages(memory, layout, pages),
                **rows.fields(memory),
                "block_tables": tables,
                "scale": dim**-0.5,
                "window": 0,
                "max_q_len": max(rows.lengths),
            }
            copies = [dict(one) for one in memory.copies(args, "pages")]
            calls = [one | layout.over(one.pop("pages")).layer(0) for one in copies]
            yield OpCase(f"{model}{kind} {name}", attend, calls, rows.workload)


def _pages(memory: Memory, layout: KvLayout, count: int) -> Tensor:
    """Normal numbers, or codes and scales whose values are near 0.1."""
    if layout.dtype == bfloat16:
        return memory.normal(count, layout.page_bytes // 2).view_as(uint8)
    return memory.codes(count, layout.page_bytes, low=112, high=120)


def variants(target: Target, case: OpCase) -> Iterator[tuple[str, Commands]]:
    """Other tiles, and other numbers of parts of a row."""
    args = case.args[0]

    def call(args: Mapping[str, Any]) -> AttentionCall:
        return AttentionCall.of({name: args.get(name) for name in TENSORS}, args["scale"], args["window"])

    plain = choose(target, call(args))
    others: dict[str, AttentionChoice] = {}
    for tile in (Tile(16, 64, 4, 3), Tile(16, 64, 4, 5), Tile(16, 64, 4, 7), Tile(16, 128, 8, 5)):
        others[f"short {tile.bm} x {tile.bn}, {tile.warps} warps, {tile.stages} stages"] = replace(
            plain, short=tile
        )
    for tile in (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)):
        others[f"long {tile.bm} x {tile.bn}, {tile.warps} warps, {tile.stages} stages"] = replace(
            plain, long=tile
        )
    for name, choice in others.items():

        def commands(args: Mapping[str, Any], choice: AttentionChoice = choice) -> list[Launch]:
            return launches(call(args), choice, args["max_q_len"])

        yield name, commands
