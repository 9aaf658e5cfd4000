"""Attention of a token to its window and to compressed entries, where one vector is key and value of all heads.

A program has BM heads of a token, all of them if it can, so that a vector is read once. What the token sees is a list
of blocks of BN vectors, those of the window first, dealt to the token's parts in turn. The softmax is online, in base 2
and float32; `scale` holds log2(e). The D channels are taken in four quarters, for a thread then has few rows of each,
and few addresses.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.deepseek_v4.device.rounding import rotated

LOW = tl.constexpr(-1.0e30)
"""A score that nothing sees: exp2 of its distance to a real one is 0, to itself is 1 and not NaN."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sights(position, window, most, ENTRIES: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    """What a position sees: the first of its raw vectors, how many entries, and the blocks of both."""
    low = tl.maximum(position + 1 - window, 0)
    seen = 0
    if ENTRIES > 0:
        seen = tl.minimum((position + 1) // (PAGE // ENTRIES), most)
    of_window = tl.cdiv(position + 1 - low, BN)
    return low, seen, of_window, of_window + tl.cdiv(seen, BN)


@triton.jit
def _squares(x):
    """The sum of the squares of each row."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _scaled(x, factor):
    """x times a float32 factor, rounded."""
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def sparse_attend(
    out, q, kv, entries, selected, sinks, cos_sin, positions, token_slots, kv_tables, entry_tables, partial, weight,
    kv_width, entry_width, kv_stride, entry_stride, heads, window, most, scale, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, ENTRIES: tl.constexpr, SELECTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, tokens, cdiv(heads, BM)). ENTRIES a page, 0: none. `most` entries are seen: the columns of
    `selected` if SELECTED, else more than any token sees. With SPLITS > 1 nothing goes to out, but to partial [tokens,
    SPLITS, heads, D] and weight float32, the same less D: what `merge_parts` reads."""
    QUARTER: tl.constexpr = D // 4
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, i = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BN)
    slot = tl.load(token_slots + token).to(tl.int64)
    position = tl.load(positions + token)
    column = tl.arange(0, QUARTER)[None, :]
    inside = (head < heads)[:, None]
    place = (token * heads + head[:, None]) * D + column
    q0 = tl.load(q + place, mask=inside, other=0.0)
    q1 = tl.load(q + place + QUARTER, mask=inside, other=0.0)
    q2 = tl.load(q + place + 2 * QUARTER, mask=inside, other=0.0)
    q3 = tl.load(q + place + 3 * QUARTER, mask=inside, other=0.0)
    if slot == 0:
        if SPLITS == 1:
            for quarter in tl.static_range(4):
                tl.store(
                    out + place + quarter * QUARTER,
                    tl.zeros((BM, QUARTER), out.dtype.element_ty),
                    mask=inside,
                )
        return
    low, seen, of_window, blocks = _sights(position, window, most, ENTRIES, PAGE, BN)
    if part >= blocks:
        return
    kv_table, entry_table = kv_tables + slot * kv_width, entry_tables + slot * entry_width
    less = tl.rsqrt((_squares(q0) + _squares(q1) + _squares(q2) + _squares(q3)) / D + eps)[:, None]
    q0, q1, q2, q3 = _scaled(q0, less), _scaled(q1, less), _scaled(q2, less), _scaled(q3, less)
    q3 = rotated(q3.to(tl.float32), cos_sin, position, 1.0, QUARTER, ROTARY).to(q3.dtype)
    m = tl.full((BM,), LOW, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc0 = tl.zeros((BM, QUARTER), tl.float32)
    acc1 = tl.zeros((BM, QUARTER), tl.float32)
    acc2 = tl.zeros((BM, QUARTER), tl.float32)
    acc3 = tl.zeros((BM, QUARTER), tl.float32)
    for block in range(part, blocks, SPLITS):
        at = low + block * BN + i
        live = (block < of_window) & (at <= position)
        table, stride, base, inner = kv_table + at // PAGE, kv_stride, kv, at % PAGE
        if ENTRIES > 0:
            number = (block - of_window) * BN + i
            is_entry = (number >= 0) & (number < seen)
            if SELECTED:
                number = tl.load(selected + token * most + number, mask=is_entry, other=0)
            live = live | is_entry
            raw = block < of_window
            table = tl.where(raw, table, entry_table + number // ENTRIES)
            stride = tl.where(raw, kv_stride, entry_stride)
            base = tl.where(raw, kv, entries)
            inner = tl.where(raw, inner, number % ENTRIES)
        page = tl.load(table, mask=live, other=0).to(tl.int64)
        key = (base + page * stride + inner * D)[:, None] + column
        real = live[:, None]  # what was never written may be NaN
        k0 = tl.load(key, mask=real, other=0.0)
        k1 = tl.load(key + QUARTER, mask=real, other=0.0)
        k2 = tl.load(key + 2 * QUARTER, mask=real, other=0.0)
        k3 = tl.load(key + 3 * QUARTER, mask=real, other=0.0)
        score = tl.dot(q0, tl.trans(k0))
        score = tl.dot(q1, tl.trans(k1), score)
        score = tl.dot(q2, tl.trans(k2), score)
        score = tl.dot(q3, tl.trans(k3), score)
        score = tl.where(live[None, :], score * scale, LOW)
        top = tl.maximum(m, tl.max(score, 1))
        p = tl.exp2(score - top[:, None])
        decay = tl.exp2(m - top)
        share = p.to(k0.dtype)
        acc0 = tl.dot(share, k0, acc0 * decay[:, None])
        acc1 = tl.dot(share, k1, acc1 * decay[:, None])
        acc2 = tl.dot(share, k2, acc2 * decay[:, None])
        acc3 = tl.dot(share, k3, acc3 * decay[:, None])
        l = l * decay + tl.sum(p, 1)
        m = top
    if SPLITS > 1:
        row = (token * SPLITS + part) * heads + head
        tl.store(weight + row, m + tl.log2(l), mask=head < heads)
        to = partial + row[:, None] * D + column
    else:
        to = out + place
        sink = tl.load(sinks + head, mask=head < heads, other=LOW) * LOG2E
        top = tl.maximum(m, sink)
        l = (l * tl.exp2(m - top) + tl.exp2(sink - top)) / tl.exp2(m - top)
    less = (1.0 / l)[:, None]
    tl.store(to, (acc0 * less).to(to.dtype.element_ty), mask=inside)
    tl.store(to + QUARTER, (acc1 * less).to(to.dtype.element_ty), mask=inside)
    tl.store(to + 2 * QUARTER, (acc2 * less).to(to.dtype.element_ty), mask=inside)
    last = acc3 * less
    if SPLITS == 1:
        last = rotated(last, cos_sin, position, -1.0, QUARTER, ROTARY)
    tl.store(to + 3 * QUARTER, last.to(to.dtype.element_ty), mask=inside)


@triton.jit
def merge_parts(
    out, partial, weight, sinks, cos_sin, positions, token_slots, heads, window, most,
    D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, ENTRIES: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's heads from its parts, the sink among them, rotated back. PARTS: SPLITS or the next power of
    two. Grid (tokens, cdiv(heads, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    inside = (head < heads)[:, None]
    to = out + (token * heads + head[:, None]) * D + column[None, :]
    position = tl.load(positions + token)
    if tl.load(token_slots + token) == 0:
        tl.store(to, tl.zeros((HEADS, D), out.dtype.element_ty), mask=inside)
        return
    _, _, _, blocks = _sights(position, window, most, ENTRIES, PAGE, BN)
    part = tl.arange(0, PARTS)[:, None]
    real = (part < tl.minimum(blocks, SPLITS)) & (head < heads)[None, :]
    place = (token * SPLITS + part) * heads + head[None, :]
    share = tl.load(weight + place, mask=real, other=LOW)
    sink = tl.load(sinks + head, mask=head < heads, other=LOW) * LOG2E
    result = tl.load(
        partial + place[:, :, None] * D + column[None, None, :], mask=real[:, :, None], other=0.0
    ).to(tl.float32)
    top = tl.maximum(tl.max(share, 0), sink)
    share = tl.exp2(share - top[None, :])
    total = tl.sum(share, 0) + tl.exp2(sink - top)
    o = tl.sum(result * (share / total[None, :])[:, :, None], 0)
    tl.store(to, rotated(o, cos_sin, position, -1.0, D, ROTARY).to(out.dtype.element_ty), mask=inside)
