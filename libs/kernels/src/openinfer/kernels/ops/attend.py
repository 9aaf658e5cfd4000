"""attend: causal attention of a step's tokens over the paged cache."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from openinfer.kernels.attention import attention_launches, choose_attention
from openinfer.kernels.attention.call import AttendArgs, AttentionCall, AttentionChoice
from openinfer.kernels.attention.kv_cache import FP8_CACHE, CacheForm, KvLayout, cached_bytes, expect_cache
from openinfer.kernels.attention.tiles import Tile
from openinfer.kernels.op.cases import CaseRows, Commands, Memory, OpCase
from openinfer.kernels.op.contract import FLOATS, expect, expect_max_q_len, expect_rows, require
from openinfer.kernels.op.cores import HOST_WAY, together
from openinfer.kernels.op.launch import Command, Launch
from openinfer.kernels.op.op import Cost, Op, Workload
from openinfer.kernels.op.reference import Array, f32, scratch
from openinfer.kernels.op.rounding import q8_values
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor, bfloat16, int32, uint8


def _check(a: AttendArgs[Tensor]) -> None:
    expect("q", a.q, (-1, -1, -1), *FLOATS)
    tokens, heads, dim = a.q.shape
    expect("out", a.out, (tokens, heads * dim), a.q.dtype)
    expect_cache(a.kv, a.kv_scales, dim, a.q.dtype)
    rows, size = expect_rows(a.slots, a.q_starts, seq_lens=a.seq_lens, alive=a.alive)
    expect("block_tables", a.block_tables, (size, -1), int32)
    require(heads % a.kv.shape[2] == 0, f"{heads} query heads cannot share {a.kv.shape[2]} key heads evenly")
    require(a.scale > 0, f"scale is {a.scale}; it must be positive")
    require(a.window >= 0, f"window is {a.window}; it must be 0 (none) or positive")
    expect_max_q_len(a.max_q_len, tokens, rows)


QUERIES = 32
"""Tokens whose scores are computed together; one by one where the result must not depend on the chunk."""
FEW_PAGES = 16
"""Fewer are gathered by numpy's indexing, which starts sooner; more by np.take into memory that is there already."""


def _reference(a: AttendArgs[Array]) -> None:
    page_size, size = a.kv.shape[3], 1 if HOST_WAY.get().batch_invariant else QUERIES
    a.out[:] = 0
    jobs = []
    for row, slot in enumerate(a.slots):
        start, end = int(a.q_starts[row]), int(a.q_starts[row + 1])
        if start == end or not a.alive[slot]:
            continue
        first = int(a.seq_lens[slot])
        length = first + end - start
        pages = a.block_tables[slot, : -(-length // page_size)]
        chunks = [slice(at, min(at + size, end)) for at in range(start, end, size)]
        if len(chunks) == 1:
            jobs.append(partial(_attend_row, a, pages, chunks, first - start))
        else:
            _attend_row(a, pages, chunks, first - start)
    together(jobs)


def _attend_row(a: AttendArgs[Array], pages: Array, chunks: list[slice], before: int) -> None:
    """All tokens of a row, by chunks; token t is at position before + t."""
    length = before + chunks[-1].stop
    keys, values = (_cached(a.kv, a.kv_scales, pages, part, length) for part in range(2))
    # The longest first.
    together([partial(_attend, a, keys, values, tokens, before + tokens.start) for tokens in chunks[::-1]])


def _attend(a: AttendArgs[Array], keys: Array, values: Array, tokens: slice, position: int) -> None:
    """Of some tokens of a row, the first of which is at `position`. keys, values: float32 [G, length, d]."""
    (kv_heads, _, dim), count = keys.shape, tokens.stop - tokens.start
    low, high = max(0, position + 1 - a.window) if a.window else 0, position + count
    query = f32(a.q[tokens]).reshape(count, kv_heads, -1, dim).swapaxes(0, 1).reshape(kv_heads, -1, dim)
    if count > 1:
        scores = np.matmul(query, keys[:, low:high].transpose(0, 2, 1))
    else:  # BLAS takes half as long with the long side first
        scores = np.matmul(keys[:, low:high], query.transpose(0, 2, 1)).transpose(0, 2, 1)
    scores = np.multiply(scores, np.float32(a.scale), order="C")
    if count > 1:
        edge = low if a.window else position + 1  # all see what is before
        seen = np.arange(edge, high) - np.arange(position, high)[:, None]
        hidden = (seen > 0) | (seen <= -a.window if a.window else False)
        by_token = scores.reshape(kv_heads, count, -1, high - low)[..., edge - low :]
        np.copyto(by_token, -np.inf, where=hidden[:, None])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights if a.q.dtype == np.float32 else f32(weights.astype(a.q.dtype))
    found = np.matmul(weights, values[:, low:high]) / total
    a.out[tokens] = found.reshape(kv_heads, count, -1, dim).swapaxes(0, 1).reshape(count, -1)


def _cached(kv: Array, kv_scales: Array | None, pages: Array, part: int, length: int) -> Array:
    """Keys (part 0) or values (1) of the first `length` tokens of pages: float32 [G, length, d]."""

    def by_token(array: Array) -> Array:
        heads, rest, stride = np.arange(array.shape[2]), array.shape[3:], array.strides[0]
        row = math.prod(rest) * array.itemsize  # a head's part of a page
        if len(pages) < FEW_PAGES or stride % row:
            found: Array = array[pages[None], part, heads[:, None]]
        else:
            size = ((len(array) - 1) * stride // row + 2 * len(heads), row // array.itemsize)
            at = pages * (stride // row) + (part * len(heads) + heads)[:, None]
            found = scratch(f"cached {part} {array.dtype}", (*at.shape, size[1]), array.dtype)
            np.take(as_strided(array, size, (row, array.itemsize)), at, axis=0, out=found, mode="clip")
        return found.reshape(len(heads), -1, *rest[1:])[:, :length]

    codes = by_token(kv)
    return f32(codes) if kv_scales is None else q8_values(codes, by_token(kv_scales))


def require_attention(dtype: np.dtype[Any], dim: int, page_size: int) -> None:
    """Raise ContractError for sizes that the kernels of attention do not support."""
    require(dtype == bfloat16, f"q is {dtype.name}; attention on a GPU is bfloat16 (float32: the cpu pack)")
    fits = dim >= 16 and dim & (dim - 1) == 0
    require(fits, f"head size is {dim}; attention on a GPU takes powers of two from 16")
    even = page_size >= 1 and page_size & (page_size - 1) == 0
    require(even, f"page size is {page_size}; it must be a power of two")


def _launches(target: Target, a: AttendArgs[Tensor]) -> Iterator[Command]:
    require_attention(a.q.dtype, a.q.shape[2], a.kv.shape[3])
    call = AttentionCall.of(a)
    yield from attention_launches(call, choose_attention(target, call), a.max_q_len)


def _cost(workload: Workload, a: AttendArgs[Tensor]) -> Cost:
    _, heads, dim = a.q.shape
    moved = workload.kv_tokens * cached_bytes(a.kv, a.kv_scales)
    moved += 2 * workload.tokens * heads * dim * a.q.itemsize
    return Cost(moved, 4 * workload.qk_pairs * heads * dim)


attend = Op("attend", AttendArgs[Tensor], _check, _reference, _launches, _cost)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Decode, prompts and both in one step, for heads of 128 and of 256, over a cache in bf16 and in FP8."""
    steps = {f"decode {rows} x {n}": CaseRows([1] * rows, [n - 1] * rows)
        for n in (1024, 4096, 16384) for rows in (1, 8, 32, 128)}  # fmt: skip
    steps |= {f"prompt {n}": CaseRows([n], [0]) for n in (128, 1024, 4096, 16384)}
    steps["chunk 2048 after 14336"] = CaseRows([2048], [14336])
    steps["chunk 1984 and 64 rows x 4096"] = CaseRows([1984] + [1] * 64, [0] + [4095] * 64)
    models = {"Qwen3-4B": (32, 8, 128), "Qwen3.5-4B": (16, 4, 256)}
    forms = (CacheForm(np.dtype(bfloat16)), FP8_CACHE)
    for (model, (heads, kv_heads, dim)), form in itertools.product(models.items(), forms):
        layout, kind = KvLayout(1, kv_heads, 16, dim, form), " FP8 cache" if form.scaled else ""
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
    if layout.form.dtype == bfloat16:
        return memory.normal(count, layout.page_bytes // 2).view_as(uint8)
    return memory.codes(count, layout.page_bytes, low=112, high=120)


def variants(target: Target, case: OpCase) -> Iterator[tuple[str, Commands]]:
    """Other tiles, and other numbers of parts of a row."""
    plain = choose_attention(target, AttentionCall.of(case.calls[0]))
    short = Tile(16, 64, 4, 3), Tile(16, 64, 4, 5), Tile(16, 64, 4, 7), Tile(16, 128, 8, 5)
    long = Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)
    found = [("short", tile, replace(plain, short=tile)) for tile in short]
    found += [("long", tile, replace(plain, long=tile)) for tile in long]
    for rows, tile, changed in found:

        def commands(a: AttendArgs[Tensor], choice: AttentionChoice = changed) -> list[Launch]:
            return attention_launches(AttentionCall.of(a), choice, a.max_q_len)

        yield f"{rows} {tile.bm} x {tile.bn}, {tile.warps} warps, {tile.stages} stages", commands
