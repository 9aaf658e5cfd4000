"""Attention of a token to its window and to compressed entries, where one vector is key and value of all heads.

A program has BM heads of a token, all of them if it can, so that a vector is read once. The vectors that the token sees
are a list of blocks of BN, the blocks of the window first. The blocks are dealt to the token's parts in turn. The
softmax is online, in base 2 and float32; `scale` holds log2(e). The D channels are taken in four quarters, because a
thread then has few rows of each, and few addresses.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import start_next, wait_ahead
from openinfer.kernels.device.rounding import rotated

LOW = tl.constexpr(-1.0e30)
"""A hidden score. exp2 of its distance to a real score is 0; exp2 of its distance to itself is 1 and not NaN."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sights(end, window, most, PAGE_BITS: tl.constexpr, ENTRY_BITS: tl.constexpr, BN: tl.constexpr):
    """(low, seen, blocks of the window, blocks in all) of a token that sees no raw vector from position `end` on.

    low: the position of the first raw vector that it sees. seen: the number of entries that it sees.
    """
    low = tl.maximum(end - window, 0)
    seen = most
    if ENTRY_BITS >= 0:
        seen = tl.minimum(end >> (PAGE_BITS - ENTRY_BITS), most)
    of_window = tl.cdiv(end - low, BN)
    return low, seen, of_window, of_window + tl.cdiv(seen, BN)


@triton.jit
def _end(positions, token, tokens, BLOCK: tl.constexpr):
    """Where the raw vectors end that a token sees: behind itself, or with BLOCK before its row's block."""
    if BLOCK:
        return tl.load(positions + token % (tokens // BLOCK), cache_modifier=".cg")
    return tl.load(positions + token, cache_modifier=".cg") + 1


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def sparse_attend(
    out, q, kv, entries, selected, sinks, cos_sin, positions, token_slots, kv_tables, entry_tables, partial, weight,
    kv_width, entry_width, kv_stride, entry_stride, heads, window, most, scale, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, PAGE_BITS: tl.constexpr, ENTRY_BITS: tl.constexpr, SELECTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, tokens, cdiv(heads, BM)).

    A page has 2^PAGE_BITS raw vectors or 2^ENTRY_BITS entries; ENTRY_BITS is -1 without pages of entries. A token sees
    at most `most` entries: the columns of `selected` if SELECTED, else more than any token sees. BLOCK: tokens of a
    block, each with an entry (SparseAttendArgs), or 0. With SPLITS > 1 the kernel does not write out. It writes the
    input of `merge_parts`: partial [tokens, SPLITS, heads, D] and weight float32 [tokens, SPLITS, heads].
    """
    QUARTER: tl.constexpr = D // 4
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, i = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BN)
    slot = tl.load(token_slots + token, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions + token, cache_modifier=".cg")
    end = _end(positions, token, tl.num_programs(1), BLOCK)
    wait_ahead(EARLY)
    column = tl.arange(0, QUARTER)[None, :]
    inside = (head < heads)[:, None]
    place = (token * heads + head[:, None]) * D + column
    qs = ()
    for quarter in tl.static_range(4):
        qs += (tl.load(q + place + quarter * QUARTER, mask=inside, other=0.0),)
    if slot == 0:
        if SPLITS == 1:
            zero = tl.zeros((BM, QUARTER), out.dtype.element_ty)
            for quarter in tl.static_range(4):
                tl.store(out + place + quarter * QUARTER, zero, mask=inside)
        return
    low, seen, of_window, blocks = _sights(end, window, most, PAGE_BITS, ENTRY_BITS, BN)
    if part >= blocks:
        return
    kv_table, entry_table = kv_tables + slot * kv_width, entry_tables + slot * entry_width
    # The norm is a factor of a head's scores. It leaves the queries as they came, for the products to take from memory.
    factor = (
        tl.rsqrt((_squares(qs[0]) + _squares(qs[1]) + _squares(qs[2]) + _squares(qs[3])) / D + eps) * scale
    )
    factor = factor[:, None]
    last = rotated(qs[3].to(tl.float32), cos_sin, position, 1.0, QUARTER, ROTARY).to(q.dtype.element_ty)
    qs = (qs[0], qs[1], qs[2], last)
    m = tl.full((BM,), LOW, tl.float32)
    l, none = tl.zeros((BM,), tl.float32), tl.zeros((BM, QUARTER), tl.float32)
    acc = (none, none, none, none)
    for block in range(part, blocks, SPLITS):
        raw = block < of_window
        first = tl.where(raw, block, block - of_window) * BN
        count = tl.where(raw, end - low, seen) - first
        live = i < count
        number = first + i
        table, base, stride, bits = kv_table, kv, kv_stride, PAGE_BITS
        if ENTRY_BITS >= 0:
            table, base = tl.where(raw, kv_table, entry_table), tl.where(raw, kv, entries)
            stride, bits = tl.where(raw, kv_stride, entry_stride), tl.where(raw, PAGE_BITS, ENTRY_BITS)
        if SELECTED:
            chosen = tl.load(selected + token * most + number, mask=live & (block >= of_window), other=0)
            number = tl.where(raw, number, chosen)
        number += tl.where(raw, low, 0)
        at, paged = number & ((1 << bits) - 1), live
        if BLOCK:
            rows = tl.num_programs(1) // BLOCK
            base, paged = tl.where(raw, kv, entries), live & raw
            at = tl.where(raw, at, number * rows + token.to(tl.int32) % rows)
        page = tl.load(table + (number >> bits), mask=paged, other=0).to(tl.int64)
        key = (base + page * stride + at * D)[:, None] + column
        real = live[:, None]  # what was never written may be NaN
        keys, new = (), ()
        for quarter in tl.static_range(4):
            keys += (tl.load(key + quarter * QUARTER, mask=real, other=0.0),)
        score = tl.dot(qs[0], tl.trans(keys[0])) * factor
        for quarter in tl.static_range(1, 4):
            score += tl.dot(qs[quarter], tl.trans(keys[quarter])) * factor
        if count < BN:
            score = tl.where(live[None, :], score, LOW)
        top = tl.maximum(m, tl.max(score, 1))
        p = tl.exp2(score - top[:, None])
        decay = tl.exp2(m - top)
        for quarter in tl.static_range(4):
            new += (tl.dot(p.to(kv.dtype.element_ty), keys[quarter], acc[quarter] * decay[:, None]),)
        acc = new
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
    for quarter in tl.static_range(3):
        tl.store(to + quarter * QUARTER, (acc[quarter] * less).to(to.dtype.element_ty), mask=inside)
    last = acc[3] * less
    if SPLITS == 1:
        last = rotated(last, cos_sin, position, -1.0, QUARTER, ROTARY)
    tl.store(to + 3 * QUARTER, last.to(to.dtype.element_ty), mask=inside)


@triton.jit
def merge_parts(
    out, partial, weight, sinks, cos_sin, positions, token_slots, heads, window, most,
    D: tl.constexpr, ROTARY: tl.constexpr, PAGE_BITS: tl.constexpr, ENTRY_BITS: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's heads from its parts, the sink among them, rotated back. All but the parts is read before the
    wait. Grid (tokens, cdiv(heads, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, D)[None, :]
    inside = head < heads
    to = out + (token * heads + head) * D
    position = tl.load(positions + token, cache_modifier=".cg")
    live = tl.load(token_slots + token, cache_modifier=".cg") != 0
    # All loads are issued at once, also those of parts that do not exist, so that no load waits for another.
    first = token * SPLITS * heads + tl.minimum(head, heads - 1)
    pair = tl.zeros((HEADS, 1), tl.int32) + tl.arange(0, D // 2)[None, :] - (D - ROTARY) // 2
    angle = cos_sin + position.to(tl.int64) * ROTARY + pair
    cos = tl.load(angle, mask=pair >= 0, other=1.0)
    sin = tl.load(angle + ROTARY // 2, mask=pair >= 0, other=0.0)
    sink = tl.load(sinks + tl.minimum(head, heads - 1)) * LOG2E
    end = _end(positions, token, tl.num_programs(0), BLOCK)
    _, _, _, blocks = _sights(end, window, most, PAGE_BITS, ENTRY_BITS, BN)
    start_next(EARLY)
    logs, parts = (), ()
    for part in tl.static_range(SPLITS):
        logs += (tl.load(weight + first + part * heads, cache_modifier=".cg"),)
        parts += (tl.load(partial + (first + part * heads) * D + column, cache_modifier=".cg"),)
    top = sink
    for part in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.where(live & (part < blocks), logs[part], LOW))
    total = tl.exp2(sink - top)
    o = tl.zeros((HEADS, D), tl.float32)
    for part in tl.static_range(SPLITS):
        real = live & (part < blocks)
        share = tl.where(real, tl.exp2(logs[part] - top), 0.0)
        total += share
        o += tl.where(real, share * parts[part].to(tl.float32), 0.0)
    even, odd = tl.split(tl.reshape(o / total, (HEADS, D // 2, 2)))
    turned = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (HEADS, D))
    tl.store(to + column, turned.to(to.dtype.element_ty), mask=inside)
