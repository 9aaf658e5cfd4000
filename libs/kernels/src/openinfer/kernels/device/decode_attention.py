"""A decode step's attention from its qkv projection: norms of the new query and key, rotary embedding, the write into
the cache and attention over it, in one kernel. The pieces are those of `attention` and `qk_norm_rope_write`.

The new key and value are taken from qkv, never from the cache, so no program waits for another's write.
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from openinfer.kernels.device.attention import (
    HIDDEN,
    LOW,
    add_block,
    cache_places,
    merge_parts,
    numbers,
    pair_places,
)
from openinfer.kernels.device.formats import e4m3, e8m0, q8_exponent
from openinfer.kernels.device.norm import weighted


@triton.jit
def _halves(D: tl.constexpr, ROTARY: tl.constexpr):
    """The columns of a head as two rows [1, D / 2], of which those of one place are rotated together. With ROTARY < D
    the first ROTARY columns are rotated, and the others are halved alike."""
    a = tl.arange(0, D // 2)
    b = a + D // 2
    if ROTARY < D:
        rotated = a < ROTARY // 2
        b = tl.where(rotated, a + ROTARY // 2, b)
        a = tl.where(rotated, a, a + ROTARY // 2)
        run: tl.constexpr = 16 if ROTARY % 32 == 0 else 2
        a = tl.max_contiguous(tl.multiple_of(a, [run]), [run])
        b = tl.max_contiguous(tl.multiple_of(b, [run]), [run])
    return a[None, :], b[None, :]


@triton.jit
def _normed(of_head, inside, gain, a_column, b_column, cos, sin, D: tl.constexpr, eps):
    """Heads at of_head [N, 1] as two halves [N, D / 2]: normalised unless `gain` is None, rotated and rounded."""
    a = tl.load(of_head + a_column, mask=inside, other=0.0)
    b = tl.load(of_head + b_column, mask=inside, other=0.0)
    dtype = a.dtype
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(wide_a * wide_a + wide_b * wide_b, 1) / D + eps)[:, None]
        wide_a = weighted(wide_a * scale, tl.load(gain + a_column), dtype).to(tl.float32)
        wide_b = weighted(wide_b * scale, tl.load(gain + b_column), dtype).to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(dtype), (wide_b * cos + wide_a * sin).to(dtype)


@triton.jit
def write_scale(to, size):
    """Store the scale of a head of a token in an FP8 cache; `size`: its magnitudes [1, N]. Returns the E8M0 byte as
    int32 [1, 1]."""
    exponent = q8_exponent(tl.max(size.to(tl.float32), 1)[:, None])
    tl.store(to + tl.zeros((1, 1), tl.int32), exponent.to(tl.uint8))
    return exponent


@triton.jit
def write_codes(to, value, exponent):
    """Store `value` as e4m3 codes. Returns their values in its dtype, as they will be read from the cache."""
    codes = e4m3(value.to(tl.float32), exponent)
    tl.store(to, codes)
    return (codes.to(tl.float32) * e8m0(exponent)).to(value.dtype)


@triton.jit
def _first_key(before, window, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """The first key that is read of a row with `before` cached ones."""
    low = before * 0
    if WINDOWED:
        low = tl.maximum(before + 1 - window, 0) // BN * BN
    return low


@triton.jit
def _dealt(item, slots, seq_lens, rows, spare, part_size, window, BN: tl.constexpr, WINDOWED: tl.constexpr,
           SEARCH: tl.constexpr):  # fmt: skip
    """(row, part, the row's parts, the row's first item) of an item; row = rows past the last item.

    The parts of all rows are items, one row after the other. A part has part_size keys, or more, so that there are at
    most `spare` items more than rows."""
    r = tl.arange(0, SEARCH)
    real = r < rows
    before = tl.load(seq_lens + tl.load(slots + r, mask=real, other=0), mask=real, other=0)
    keys = tl.where(real, before + 1 - _first_key(before, window, BN, WINDOWED), 0)
    size = tl.maximum(part_size, tl.cdiv(tl.cdiv(tl.sum(keys, 0), spare), BN) * BN)
    parts = tl.cdiv(keys, size)
    row = tl.sum((real & (tl.cumsum(parts, 0) <= item)).to(tl.int32), 0)
    begin = tl.sum(tl.where(r < row, parts, 0), 0)
    return row, item - begin, tl.sum(tl.where(r == row, parts, 0), 0), begin


@triton.jit
def _store(out, value, gate, inside, GATED: tl.constexpr):
    """Store `value` (float32), rounded; if GATED times the rounded sigmoid of its gate."""
    dtype = out.dtype.element_ty
    value = value.to(dtype)
    if GATED:
        of_gate = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        factor = (1.0 / (1.0 + tl.exp(-of_gate))).to(dtype)
        value = (value.to(tl.float32) * factor.to(tl.float32)).to(dtype)
    tl.store(out, value, mask=inside)


@triton.jit
def attend_new(
    out, kv, kv_scales, qkv, q_norm, k_norm, cos_sin, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, window, scale, eps, partial, weight, arrived, tokens, rows, part_size,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MR: tl.constexpr, MERGE: tl.constexpr, WINDOWED: tl.constexpr, SEARCH: tl.constexpr,
    PAIRS: tl.constexpr, RELEASE: tl.constexpr, ROTARY: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One token a row. A row's keys are dealt to its parts in turn, BN at a time; the last part to arrive merges them.
    Also zeros for the tokens after the last row.

    SEARCH: 0, and the grid (key heads, rows, parts at most); a row that is short has fewer parts, of part_size keys.
    Or a power of two >= rows, and the grid (key heads, items at most), more than rows: rows have the parts that
    `_dealt` gives them.

    qkv [tokens, GROUP * G + 2 G heads, D], if GATED each query head followed by its gate; q_norm and k_norm [D], or
    None: no norms; cos_sin float32 [positions, 2, ROTARY / 2]. partial: float32 [key heads, rows * parts at most, or
    items at most, GROUP, D], weight the same less D; arrived: int32 [rows, key heads], zero before and after. MR: GROUP
    or the next power of two. WINDOWED: whether `window` hides anything. kv_scales: see `attention`; the new key and
    value are attended to as the cache will have them. RELEASE: whether the next kernel may start as soon as all
    programs have (launch.Launch, `early`).
    """
    if RELEASE:
        gdc_launch_dependents()
    OF_QUERY: tl.constexpr = 2 * D if GATED else D
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    items = tl.num_programs(1) * tl.num_programs(2)
    if SEARCH > 0:
        row, part, parts, begin = _dealt(
            tl.program_id(1), slots, seq_lens, rows, items - rows, part_size, window, BN, WINDOWED, SEARCH
        )
        if row >= rows:
            return
    else:
        row, part = tl.program_id(1), tl.program_id(2)
        begin = row * tl.num_programs(2)
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - first
    before = tl.load(seq_lens + slot)
    dead = tl.load(alive + slot) == 0
    pair = tl.arange(0, BM)
    a_column, b_column = _halves(D, ROTARY)
    wide = tl.arange(0, D)[None, :]
    heads = kv_heads * GROUP
    if part == 0:
        for token in range(tl.load(q_starts + rows) + row, tokens, rows):
            place = pair_places(token, head, heads, GROUP, D, BM)[:, None] + wide
            tl.store(out + place, tl.zeros((BM, D), out.dtype.element_ty), mask=(pair < GROUP)[:, None])
    if count == 0:
        return
    inside = (pair < GROUP)[:, None]
    place = pair_places(first, head, heads, GROUP, D, BM)[:, None] + wide
    if dead:
        if part == 0:
            tl.store(out + place, tl.zeros((BM, D), out.dtype.element_ty), mask=inside)
        return
    low = _first_key(before, window, BN, WINDOWED)
    if SEARCH == 0:
        parts = tl.minimum(tl.cdiv(before + 1 - low, part_size), tl.num_programs(2))
        if part >= parts:
            return

    source = qkv + first.to(tl.int64) * (heads * OF_QUERY + 2 * kv_heads * D)
    query = source + (head * GROUP + pair)[:, None] * OF_QUERY
    place_of_angle = tl.arange(0, D // 2)[None, :]
    angle = cos_sin + before.to(tl.int64) * ROTARY + place_of_angle
    if ROTARY < D:
        cos = tl.load(angle, mask=place_of_angle < ROTARY // 2, other=1.0)
        sin = tl.load(angle + ROTARY // 2, mask=place_of_angle < ROTARY // 2, other=0.0)
    else:
        cos, sin = tl.load(angle), tl.load(angle + D // 2)
    qa, qb = _normed(query, inside, q_norm, a_column, b_column, cos, sin, D, eps)
    m = tl.full((BM,), LOW, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    table = block_tables + slot * table_width
    key = kv + head * PAGE * D
    value = kv + (kv_heads + head) * PAGE * D + wide
    cache = (key, value, kv_scales, table, page_stride, head, kv_heads)
    for n in range(low + part * BN, before, parts * BN):
        where = cache_places(table, n, before, page_stride, D, PAGE, BN)[:, None]
        number = n + tl.arange(0, BN)
        cached = (number < before)[:, None]  # what was never written may be NaN
        score = tl.dot(
            qa, tl.trans(numbers(tl.load(key + a_column + where, mask=cached, other=0.0), qa.dtype, PAIRS))
        )
        other = numbers(tl.load(key + b_column + where, mask=cached, other=0.0), qb.dtype, PAIRS)
        score = tl.dot(qb, tl.trans(other), score)
        seen = number < before
        if WINDOWED:
            seen = seen & (number > before - window)
        score = tl.where(seen[None, :], score, HIDDEN)
        v = numbers(tl.load(value + where, mask=cached, other=0.0), qa.dtype, PAIRS)
        m, l, acc = add_block(m, l, acc, score, v, scale, cache, n, before, PAGE, BN)
    if (before - low) // BN % parts == part:
        mine = source + heads * OF_QUERY + head * D
        of_head = mine + tl.zeros((1, 1), tl.int32)
        ka, kb = _normed(of_head, True, k_norm, a_column, b_column, cos, sin, D, eps)
        v = tl.load(mine + kv_heads * D + wide)
        page = tl.load(table + before // PAGE).to(tl.int64)
        to_key = kv + page * page_stride + (head * PAGE + before % PAGE) * D
        if kv_scales is None:
            tl.store(to_key + a_column, ka)
            tl.store(to_key + b_column, kb)
            tl.store(to_key + kv_heads * PAGE * D + wide, v)
        else:
            to_scale = kv_scales + page * page_stride + head * PAGE + before % PAGE
            of_key = write_scale(to_scale, tl.maximum(tl.abs(ka), tl.abs(kb)))
            of_value = write_scale(to_scale + kv_heads * PAGE, tl.abs(v))
            ka = write_codes(to_key + a_column, ka, of_key)
            kb = write_codes(to_key + b_column, kb, of_key)
            v = write_codes(to_key + kv_heads * PAGE * D + wide, v, of_value)
        score = (
            tl.sum(qa.to(tl.float32) * ka.to(tl.float32) + qb.to(tl.float32) * kb.to(tl.float32), 1) * scale
        )
        top = tl.maximum(m, score)
        decay, p = tl.exp2(m - top), tl.exp2(score - top)
        acc = acc * decay[:, None] + p.to(v.dtype).to(tl.float32)[:, None] * v.to(tl.float32)
        l = l * decay + p
        m = top
    acc = acc / l[:, None]
    if parts == 1:
        _store(out + place, acc, query + D + wide, inside, GATED)
        return

    first_part = head * items + begin
    partial += first_part.to(tl.int64) * GROUP * D
    weight += first_part * GROUP
    mine = part * GROUP + pair
    tl.store(partial + mine[:, None] * D + wide, acc, mask=inside)
    tl.store(weight + mine, m + tl.log2(l), mask=pair < GROUP)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(arrived + row * kv_heads + head, 1, sem="acq_rel") == parts - 1:
        merged = merge_parts(partial, weight, parts, GROUP, GROUP, D, D, MR, MERGE)
        of_group = tl.arange(0, MR)[:, None]
        to = pair_places(first, head, heads, GROUP, D, MR)[:, None] + wide
        gate = source + (head * GROUP + of_group) * OF_QUERY + D + wide
        _store(out + to, merged, gate, of_group < GROUP, GATED)
        tl.store(arrived + row * kv_heads + head, 0)
