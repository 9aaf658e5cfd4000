"""Low-rank products of adapters: x @ A^T, then its product with B^T.

A program has BM tokens, which may have any adapters. Of many tokens it takes one adapter after the other, with the
other tokens' rows zero. In steps of few tokens a program has one adapter (`_few`), so that all of them are read at the
same time.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import gated


@triton.jit
def _adapters_of(adapters, token_slots, token, tokens):
    """The adapter of each token; 0: none."""
    slot = tl.load(token_slots + token, mask=token < tokens, other=0)
    return tl.load(adapters + slot, mask=token < tokens, other=0)


@triton.jit
def _span(adapter, places):
    """The places from the first adapter of these tokens to the last: range(low, high)."""
    return tl.min(tl.where(adapter > 0, adapter, places + 1), 0) - 1, tl.max(adapter, 0)


@triton.jit
def lora_shrink(
    low, partial, counter, x, a, adapters, token_slots, tokens, x_stride, a_stride, K, rows, places,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """low [tokens, rows] = x @ a[adapter - 1]^T. A program has SPLIT columns; the last one of a tile adds up the
    partial sums [s] [tokens, rows], in their order. Tokens without an adapter are not written. Grid (cdiv(tokens, BM),
    cdiv(K, SPLIT), cdiv(rows, BR))."""
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.program_id(2) * BR + tl.arange(0, BR)
    column = tl.arange(0, BK)
    real = row < rows
    adapter = _adapters_of(adapters, token_slots, token, tokens)
    first, splits = tl.program_id(1) * SPLIT, tl.num_programs(1)
    values = x + token.to(tl.int64)[:, None] * x_stride
    begin, end = _span(adapter, places)
    if begin < end:
        acc = tl.zeros((BM, BR), tl.float32)
        for place in range(begin, end):
            mine = adapter == place + 1
            if tl.max(mine.to(tl.int32), 0) > 0:
                matrix = a + tl.cast(place, tl.int64) * a_stride + row.to(tl.int64)[None, :] * K
                for k in range(first, first + SPLIT, BK):
                    at = k + column
                    inside = at < K
                    value = tl.load(values + at[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
                    factor = tl.load(matrix + at[:, None], mask=inside[:, None] & real[None, :], other=0.0)
                    acc = tl.dot(value, factor, acc)
        at = token.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (adapter > 0)[:, None] & real[None, :]
        tl.store(partial + tl.program_id(1).to(tl.int64) * tokens * rows + at, acc, mask=mask)
        tl.debug_barrier()  # every thread's sums are written before one of them says so
        tile = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        if tl.atomic_add(counter + tile, 1, sem="acq_rel") == splits - 1:
            acc = tl.zeros((BM, BR), tl.float32)
            for split in range(splits):  # .cg: not from this SM's first-level cache
                of_split = partial + tl.cast(split, tl.int64) * tokens * rows
                acc += tl.load(of_split + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(low + at, acc.to(low.dtype.element_ty), mask=mask)
            tl.store(counter + tile, 0)


@triton.jit
def lora_expand(
    out, both, low, b, adapters, token_slots, tokens, out_stride, b_stride, size0, size1, size2, size3, places,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """out [tokens, sum of sizes] += low @ b[adapter - 1]^T by part; ADD false: out = that, and zeros for tokens without
    an adapter. Grid (cdiv(tokens, BM), cdiv(largest size, BN), PARTS).

    GATED: both [tokens, 2 size0] is gate and up, to each of which a part is added; out [tokens, size0] = silu(gate) *
    up. Grid (cdiv(tokens, BM), cdiv(size0, BN), 1)."""
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    rank = tl.arange(0, BR)
    size = tl.where(part == 0, size0, tl.where(part == 1, size1, tl.where(part == 2, size2, size3)))
    start = tl.where(part > 0, size0, 0) + tl.where(part > 1, size1, 0) + tl.where(part > 2, size2, 0)
    if tl.program_id(1) * BN < size:
        adapter = _adapters_of(adapters, token_slots, token, tokens)
        begin, end = _span(adapter, places)
        written = (token < tokens) & ((adapter > 0) | GATED | (not ADD))
        real = column < size
        mask = written[:, None] & real[None, :]
        place_of = out + token.to(tl.int64)[:, None] * out_stride + (start + column)[None, :]
        of_low = low + token.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK
        acc = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        if GATED:
            halves = both + token.to(tl.int64)[:, None] * 2 * size0 + column[None, :]
            acc = tl.load(halves, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(halves + size0, mask=mask, other=0.0).to(tl.float32)
        elif ADD:
            acc = tl.load(place_of, mask=mask, other=0.0).to(tl.float32)
        for place in range(begin, end):
            mine = adapter == place + 1
            if tl.max(mine.to(tl.int32), 0) > 0:  # what no token has may be anything
                of_b = b + tl.cast(place, tl.int64) * b_stride + (start + column).to(tl.int64)[None, :] * RANK
                for r in range(0, RANK, BR):
                    at = r + rank
                    own = tl.load(of_low + at[None, :], mask=mine[:, None], other=0.0)
                    acc = tl.dot(own, tl.load(of_b + at[:, None], mask=real[None, :], other=0.0), acc)
                    if GATED:
                        own = tl.load(of_low + RANK + at[None, :], mask=mine[:, None], other=0.0)
                        factor = tl.load(of_b + size0 * RANK + at[:, None], mask=real[None, :], other=0.0)
                        up = tl.dot(own, factor, up)
        if GATED:
            acc = gated(acc, up, out.dtype.element_ty)
        tl.store(place_of, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def lora_shrink_few(
    partial, squares, x, gain, a, adapters, token_slots, tokens, x_stride, a_stride, K, rows, tiles,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """lora_shrink by one adapter a program. NORM: x is weighted, and not yet normalised; squares [s] [tokens] are the
    sums of its squares. Grid (places * tiles, cdiv(K, SPLIT), cdiv(rows, BR))."""
    token = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    place = tl.program_id(0) // tiles
    row = tl.program_id(2) * BR + tl.arange(0, BR)
    mine = _adapters_of(adapters, token_slots, token, tokens) == place + 1
    if tl.max(mine.to(tl.int32), 0) > 0:
        values = x + token.to(tl.int64)[:, None] * x_stride
        matrix = a + tl.cast(place, tl.int64) * a_stride + row.to(tl.int64)[None, :] * K
        acc = tl.zeros((BM, BR), tl.float32)
        square = tl.zeros((BM,), tl.float32)
        for k in tl.static_range(0, SPLIT, BK):
            column = tl.program_id(1) * SPLIT + k + tl.arange(0, BK)
            inside = column < K
            real = inside[:, None] & (row < rows)[None, :]
            factor = tl.load(matrix + column[:, None], mask=real, other=0.0)
            value = tl.load(values + column[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            if NORM:
                wide = value.to(tl.float32)
                square += tl.sum(wide * wide, 1)
                weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
                value = (wide * weight[None, :]).to(x.dtype.element_ty)
            acc = tl.dot(value, factor, acc)
        at = tl.program_id(1) * tokens + token
        if NORM:
            tl.store(squares + at, square, mask=mine & (tl.program_id(2) == 0))
        place_of = partial + at.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(place_of, acc, mask=mine[:, None] & (row < rows)[None, :])


@triton.jit
def lora_expand_few(
    out, partial, squares, b, adapters, token_slots, tokens, out_stride, b_stride, size0, size1, size2, size3, splits,
    tiles, places, K, eps,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """lora_expand by one adapter a program; a program more has the tokens without one, if ADD is false. NORM: the
    partial sums are of x before its norm. splits <= SPLITS. Grid (tiles * places, or places + 1 if ADD is false,
    cdiv(largest size, BN), PARTS)."""
    BR: tl.constexpr = 16
    token = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    place = tl.program_id(0) // tiles
    part = tl.program_id(2)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    rank = tl.arange(0, BR)
    split = tl.arange(0, SPLITS)
    size = tl.where(part == 0, size0, tl.where(part == 1, size1, tl.where(part == 2, size2, size3)))
    start = tl.where(part > 0, size0, 0) + tl.where(part > 1, size1, 0) + tl.where(part > 2, size2, 0)
    adapter = _adapters_of(adapters, token_slots, token, tokens)
    mine = (adapter == place + 1) & (token < tokens)
    if not ADD:
        mine = mine | ((place == places) & (adapter == 0) & (token < tokens))
    if (tl.max(mine.to(tl.int32), 0) > 0) & (tl.program_id(1) * BN < size):
        acc = tl.zeros((BM, BN), tl.float32)
        if place < places:
            matrix = b + tl.cast(place, tl.int64) * b_stride + (start + column).to(tl.int64)[None, :] * RANK
            inside = (split < splits)[:, None] & mine[None, :]
            at = split[:, None] * tokens + token[None, :]
            scale = tl.full((BM,), 1.0, tl.float32)
            if NORM:
                square = tl.sum(tl.load(squares + at, mask=inside, other=0.0), 0)
                scale = tl.rsqrt(square / K + eps)
            for r in tl.static_range(0, RANK, BR):
                factor = tl.load(matrix + (r + rank)[:, None], mask=(column < size)[None, :], other=0.0)
                sums = at.to(tl.int64)[:, :, None] * (PARTS * RANK) + part * RANK + (r + rank)[None, None, :]
                low = tl.sum(tl.load(partial + sums, mask=inside[:, :, None], other=0.0), 0) * scale[:, None]
                acc = tl.dot(low.to(b.dtype.element_ty), factor, acc)
        place_of = out + token.to(tl.int64)[:, None] * out_stride + (start + column)[None, :]
        mask = mine[:, None] & (column < size)[None, :]
        if ADD:
            acc += tl.load(place_of, mask=mask, other=0.0).to(tl.float32)
        tl.store(place_of, acc.to(out.dtype.element_ty), mask=mask)
