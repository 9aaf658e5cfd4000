"""A decode step's gated attention from its qkv projection, in one kernel: norms of the new query and key, partial
rotary embedding, the write into the cache, attention over it, and the output gate.

The new key and value are taken from qkv, never from the cache, so no program waits for another's write.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.attention import (
    HIDDEN,
    LOW,
    add_block,
    cache_places,
    merge_parts,
    numbers,
    pair_places,
)
from openinfer.kernels.device.decode_attention import write_codes, write_scale
from openinfer.kernels.device.norm import weighted
from openinfer.recipes.qwen3_5.device.gates import sigmoid


@triton.jit
def _rotated(source, inside, gain, angle, eps, D: tl.constexpr, ROTARY: tl.constexpr):
    """Heads at source [N, 1], normalised, rotated and rounded: [N, D]. `angle`: cosines and sines of the position."""
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, D)
    # The partner of each element in the rotation. Elements beyond ROTARY have an angle of 0, so they stay.
    other = tl.where(column < HALF, column + HALF, tl.where(column < ROTARY, column - HALF, column))
    rotates = column < ROTARY
    x = tl.load(source + column[None, :], mask=inside, other=0.0)
    y = tl.load(source + other[None, :], mask=inside, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    wide = weighted(wide * scale, tl.load(gain + column)[None, :], dtype).to(tl.float32)
    turned = weighted(y.to(tl.float32) * scale, tl.load(gain + other)[None, :], dtype).to(tl.float32)
    cos = tl.load(angle + column % HALF, mask=rotates, other=1.0)
    sin = tl.load(angle + HALF + column % HALF, mask=rotates, other=0.0)
    sin = tl.where(column < HALF, -sin, sin)
    return (wide * cos[None, :] + turned * sin[None, :]).to(dtype)


@triton.jit
def _store_gated(out, place, value, gate, inside):
    """`value` (float32), rounded, times the rounded sigmoid of its gate."""
    dtype = out.dtype.element_ty
    factor = sigmoid(tl.load(gate, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + place, (value.to(dtype).to(tl.float32) * factor).to(dtype), mask=inside)


@triton.jit
def attend_gated(
    out, kv, kv_scales, qkv, q_norm, k_norm, cos_sin, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, scale, eps, partial, weight, arrived, tokens, part_size,
    GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MR: tl.constexpr, MERGE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token a row. A row's keys are dealt to its parts in turn, BN at a time; the last part to arrive merges them.
    Also zeros for the tokens after the last row. Grid (rows, key heads, parts at most).

    qkv [tokens, 2 GROUP * G + 2 G heads, D], each query head followed by its gate; cos_sin float32 [positions, 2,
    ROTARY / 2]. partial: float32 [rows, key heads, parts, GROUP, D], weight the same less D; arrived: int32 [rows, key
    heads], zero before and after. MR: GROUP or the next power of two. kv_scales as in decode_attention.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, kv_heads, splits = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    slot, first = tl.load(slots + row).to(tl.int64), tl.load(q_starts + row)
    count, end = tl.load(q_starts + row + 1) - first, tl.load(q_starts + rows)
    before, live = tl.load(seq_lens + slot), tl.load(alive + slot) != 0
    pair, column = tl.arange(0, BM), tl.arange(0, D)[None, :]
    heads = kv_heads * GROUP
    inside = (pair < GROUP)[:, None]
    if part == 0:
        for token in range(end + row, tokens, rows):
            to = pair_places(token, head, heads, GROUP, D, BM)[:, None] + column
            tl.store(out + to, tl.zeros((BM, D), out.dtype.element_ty), mask=inside)
    if count == 0:
        return
    place = pair_places(first, head, heads, GROUP, D, BM)[:, None] + column
    if not live:
        if part == 0:
            tl.store(out + place, tl.zeros((BM, D), out.dtype.element_ty), mask=inside)
        return
    parts = tl.minimum(tl.cdiv(before + 1, part_size), splits)
    if part >= parts:
        return

    source = qkv + first.to(tl.int64) * 2 * (heads + kv_heads) * D
    angle = cos_sin + before.to(tl.int64) * ROTARY
    query = source + (head * GROUP + pair)[:, None] * 2 * D
    q = _rotated(query, inside, q_norm, angle, eps, D, ROTARY)
    m = tl.full((BM,), LOW, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    table = block_tables + slot * table_width
    key = kv + head * PAGE * D + column
    value = key + kv_heads * PAGE * D
    for n in range(part * BN, before, parts * BN):
        where = cache_places(table, n, before, page_stride, D, PAGE, BN)[:, None]
        number = n + tl.arange(0, BN)
        cached = (number < before)[:, None]  # what was never written may be NaN
        score = tl.dot(q, tl.trans(numbers(tl.load(key + where, mask=cached, other=0.0), q.dtype, PAIRS)))
        score = tl.where((number < before)[None, :], score, HIDDEN)
        v = numbers(tl.load(value + where, mask=cached, other=0.0), q.dtype, PAIRS)
        m, l, acc = add_block(
            m, l, acc, score, v, scale, kv_scales, head, kv_heads, table, n, before, page_stride, PAGE, BN
        )
    if before // BN % parts == part:
        new = source + (2 * heads + head) * D + tl.zeros((1, 1), tl.int32)
        k = _rotated(new, True, k_norm, angle, eps, D, ROTARY)
        v = tl.load(new + kv_heads * D + column)
        page = tl.load(table + before // PAGE).to(tl.int64)
        to = kv + page * page_stride + (head * PAGE + before % PAGE) * D + column
        if kv_scales is None:
            tl.store(to, k)
            tl.store(to + kv_heads * PAGE * D, v)
        else:
            to_scale = kv_scales + page * page_stride + head * PAGE + before % PAGE
            of_value = write_scale(to_scale + kv_heads * PAGE, tl.abs(v))
            k = write_codes(to, k, write_scale(to_scale, tl.abs(k)))
            v = write_codes(to + kv_heads * PAGE * D, v, of_value)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        top = tl.maximum(m, score)
        decay, p = tl.exp2(m - top), tl.exp2(score - top)
        acc = acc * decay[:, None] + p.to(v.dtype).to(tl.float32)[:, None] * v.to(tl.float32)
        l = l * decay + p
        m = top
    acc = acc / l[:, None]
    if parts == 1:
        _store_gated(out, place, acc, query + D + column, inside)
        return

    tile = row * kv_heads + head
    partial += (tile * splits).to(tl.int64) * GROUP * D
    weight += tile * splits * GROUP
    mine = part * GROUP + pair
    tl.store(partial + mine[:, None] * D + column, acc, mask=inside)
    tl.store(weight + mine, m + tl.log2(l), mask=pair < GROUP)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1:
        merged = merge_parts(partial, weight, parts, GROUP, GROUP, D, D, MR, MERGE)
        of_group = tl.arange(0, MR)
        to = pair_places(first, head, heads, GROUP, D, MR)[:, None] + column
        gate = source + (head * GROUP + of_group)[:, None] * 2 * D + D + column
        _store_gated(out, to, merged, gate, (of_group < GROUP)[:, None])
        tl.store(arrived + tile, 0)
