"""Causal attention over the paged cache: an online softmax over blocks of BN keys, in base 2 and float32.

A program works on the query heads that share one key head: its tile is BM (token, query head) pairs, token by token,
GROUP heads each. `scale` holds log2(e) and is positive; `window` is huge for a layer without a window. A page of the
cache is [K heads | V heads, PAGE, D] at kv + page * page_stride.

An FP8 cache has e4m3 codes and, for each head of a token, a power of two as an E8M0 byte: [K heads | V heads, PAGE] at
kv_scales + page * page_stride. Other caches have no scales, and kv_scales is None. Codes become bfloat16, which is
exact. Scores are multiplied by the scales of the keys, and weights by those of the values. So products and their
float32 sums are those of a cache in bfloat16, however long the context is.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import e8m0
from openinfer.kernels.device.norm import start_next

LOW = tl.constexpr(-1.0e30)
"""The maximum before any key was seen. It must be finite, so that its distance to a hidden score is not NaN."""

HIDDEN = tl.constexpr(-float("inf"))
"""The score of a key that a query does not see. It must not be a large finite number, because the compiler fuses
score * scale - top. For a block without a seen key the result is then not 0 but the rounding of top. exp2 of that may
be infinite or 0."""


@triton.jit
def pair_places(token, head, heads, GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):
    """The places in q and out of the rows of the tile that starts at `token`: int64 [BM]."""
    i = tl.arange(0, BM)
    return ((token + i // GROUP).to(tl.int64) * heads + head * GROUP + i % GROUP) * D


@triton.jit
def cache_places(table, n, stop, page_stride, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    """Places of a head's tokens n to n + BN - 1 in the cache, n a multiple of BN: int64 [BN]; page 0 from `stop` on."""
    i = tl.arange(0, BN)
    if PAGE % BN == 0:
        page = tl.load(table + n // PAGE).to(tl.int64)
        offset = n % PAGE + i
    else:
        page = tl.load(table + n // PAGE + i // PAGE, mask=n + i < stop, other=0).to(tl.int64)
        offset = i % PAGE
    return page * page_stride + offset * D


@triton.jit
def cache_scales(scales, table, n, stop, page_stride, PAGE: tl.constexpr, BN: tl.constexpr):
    """Scales of a head's tokens n to n + BN - 1, n a multiple of BN: float32 [BN]; 1 from `stop` on.

    They are read as words of four tokens, because the compiler reads no smaller ones ahead.
    """
    i = tl.arange(0, BN // 4) * 4
    if PAGE % BN == 0:
        page = tl.load(table + n // PAGE).to(tl.int64)
        offset = n % PAGE + i
    else:
        page = tl.load(table + n // PAGE + i // PAGE, mask=n + i < stop, other=0).to(tl.int64)
        offset = i % PAGE
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.load(words + (page * page_stride + offset) // 4, mask=n + i < stop, other=0)
    byte = tl.reshape((word[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 255, (BN,))
    return e8m0(tl.where(n + tl.arange(0, BN) < stop, byte, 127))


WIDE = tl.constexpr("""{
.reg .b32 a, b, c;
mov.b32 c, 0x7B807B80;
prmt.b32 a, $2, 0, 0x1404; shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;
mul.bf16x2 $0, a, c;
prmt.b32 a, $2, 0, 0x3424; shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;
mul.bf16x2 $1, a, c;
}""")
"""Four e4m3 codes as bf16: sign to bit 15, the others to bits 10 to 4, times 2^120."""


@triton.jit
def numbers(loaded, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Values that were loaded from the cache, as numbers of `dtype`. PAIRS: codes become bf16 by assembly. It must not
    be pure, because the compiler would move it behind a load from shared memory byte by byte."""
    if PAIRS:
        return tl.inline_asm_elementwise(WIDE, "=r,=r,r", [loaded], dtype=tl.bfloat16, is_pure=False, pack=4)
    return loaded.to(dtype)


@triton.jit
def _seen(n, position, window, stop, BN: tl.constexpr):
    """Which of the keys n to n + BN - 1, before `stop`, are seen from each position: [BM, BN]."""
    key = n + tl.arange(0, BN)[None, :]
    return (key <= position[:, None]) & (key > position[:, None] - window) & (key < stop)


@triton.jit
def online_softmax(m, l, acc, score, v, scale, value_scale):
    """One block of the online softmax: running maximum m, sum l and product acc with the values. value_scale: factors
    of the values, or None."""
    top = tl.maximum(m, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - top[:, None])
    decay = tl.exp2(m - top)
    share = p
    if value_scale is not None:
        share = p * value_scale[None, :]
    acc = tl.dot(share.to(v.dtype), v, acc * decay[:, None])
    return top, l * decay + tl.sum(p, 1), acc


@triton.jit
def add_block(m, l, acc, score, v, scale, cache, n, stop, PAGE: tl.constexpr, BN: tl.constexpr):
    """online_softmax over the keys n to n + BN - 1, n a multiple of BN: their scores, HIDDEN or of the numbers in the
    cache, and the numbers of their values. cache: as for over_keys."""
    _, _, kv_scales, table, page_stride, head, kv_heads = cache
    if kv_scales is None:
        m, l, acc = online_softmax(m, l, acc, score, v, scale, None)
    else:
        of_keys = kv_scales + head * PAGE
        key_scale = cache_scales(of_keys, table, n, stop, page_stride, PAGE, BN)
        value_scale = cache_scales(of_keys + kv_heads * PAGE, table, n, stop, page_stride, PAGE, BN)
        m, l, acc = online_softmax(m, l, acc, score * key_scale[None, :], v, scale, value_scale)
    return m, l, acc


@triton.jit
def over_keys(query, cache, low, whole, end, stop, position, window, scale, PAGE: tl.constexpr, BN: tl.constexpr,
              PAIRS: tl.constexpr):  # fmt: skip
    """Maximum, sum and product of a tile's queries [BM, D] over the keys from `low` to `end`. Every query sees the keys
    before `whole`. The row has `stop` keys. low and whole are multiples of BN, and so is end, or it is stop. cache: the
    head's keys and values in page 0, the scales of all, the row's pages, the distance of pages, the head, and heads."""
    key, value, _, table, page_stride, _, _ = cache
    BM: tl.constexpr = query.shape[0]
    D: tl.constexpr = query.shape[1]
    m = tl.full((BM,), LOW, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(low, whole, BN):
        where = cache_places(table, n, stop, page_stride, D, PAGE, BN)[:, None]
        score = tl.dot(query, tl.trans(numbers(tl.load(key + where), query.dtype, PAIRS)))
        v = numbers(tl.load(value + where), query.dtype, PAIRS)
        m, l, acc = add_block(m, l, acc, score, v, scale, cache, n, stop, PAGE, BN)
    for n in range(whole, end, BN):
        where = cache_places(table, n, stop, page_stride, D, PAGE, BN)[:, None]
        written = (n + tl.arange(0, BN) < stop)[:, None]  # what was never written may be NaN
        score = tl.dot(
            query, tl.trans(numbers(tl.load(key + where, mask=written, other=0.0), query.dtype, PAIRS))
        )
        score = tl.where(_seen(n, position, window, stop, BN), score, HIDDEN)
        v = numbers(tl.load(value + where, mask=written, other=0.0), query.dtype, PAIRS)
        m, l, acc = add_block(m, l, acc, score, v, scale, cache, n, stop, PAGE, BN)
    return m, l, acc


@triton.jit
def attend_long(
    out, q, kv, kv_scales, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, window, scale, done, rows, tokens, short,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows of more than `short` tokens, and zeros for the tokens after the last row. done: None, or int32 by slot: 1
    for those that are left out.

    BQ = BM // GROUP tokens a tile; row r has the tiles from q_starts[r] // BQ + r on, and the tokens after the last row
    count as one more. Grid (key heads, tokens // BQ + rows + 1): the tiles with most keys start first.
    """
    BQ: tl.constexpr = BM // GROUP
    SEARCH: tl.constexpr = 128
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    passed = tl.zeros((SEARCH,), tl.int32)
    for r in range(0, rows + 1, SEARCH):
        candidate = r + tl.arange(0, SEARCH)
        start = tl.load(q_starts + candidate, mask=candidate <= rows, other=1 << 30)
        passed += (start // BQ + candidate <= tile).to(tl.int32)
    row = tl.sum(passed, 0) - 1
    first = tl.load(q_starts + row)
    after = tokens
    if row < rows:
        after = tl.load(q_starts + row + 1)
    begin = first + (tile - first // BQ - row) * BQ
    if begin >= after or (row < rows and after - first <= short):
        return
    pair = tl.arange(0, BM)
    place = pair_places(begin, head, kv_heads * GROUP, GROUP, D, BM)[:, None] + tl.arange(0, D)[None, :]
    inside = ((pair < BQ * GROUP) & (begin + pair // GROUP < after))[:, None]
    slot = tl.load(slots + tl.minimum(row, rows - 1)).to(tl.int64)
    if row == rows or tl.load(alive + slot) == 0:
        tl.store(out + place, tl.zeros((BM, D), out.dtype.element_ty), mask=inside)
        return
    if done is not None:  # noqa: SIM102 - the compiler has no `and` of a constant and a value
        if tl.load(done + slot) != 0:
            return

    count = tl.minimum(after - begin, BQ)
    seen_first = tl.load(seq_lens + slot) + begin - first
    position = seen_first + pair // GROUP
    stop = seen_first + count
    low = tl.maximum(seen_first + 1 - window, 0) // BN * BN
    whole = (seen_first + 1) // BN * BN  # every token of the tile sees the keys before this one ...
    if stop > window:
        whole = low  # ... unless the window ends for some of them
    table, key = block_tables + slot * table_width, kv + head * PAGE * D + tl.arange(0, D)[None, :]
    cache = (key, key + kv_heads * PAGE * D, kv_scales, table, page_stride, head, kv_heads)
    query = tl.load(q + place, mask=inside, other=0.0)
    _, l, acc = over_keys(query, cache, low, whole, stop, stop, position, window, scale, PAGE, BN, PAIRS)
    l = tl.where(l > 0.0, l, 1.0)  # pairs past the row's end may see nothing
    tl.store(out + place, (acc / l[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_parts(partial, weight, parts, used, live, D: tl.constexpr, W: tl.constexpr, MR: tl.constexpr,
                MERGE: tl.constexpr):  # fmt: skip
    """The parts' results in one, MERGE of them at a time, in a fixed order: float32 [MR, W], the columns from `partial`
    on. A part has room for `used` pairs of D columns, of which `live` were written."""
    pair = tl.arange(0, MR)
    m = tl.full((MR,), LOW, tl.float32)
    l = tl.zeros((MR,), tl.float32)
    acc = tl.zeros((MR, W), tl.float32)
    for s in range(0, parts, MERGE):
        part = s + tl.arange(0, MERGE)
        inside = (part < parts)[:, None] & (pair < live)[None, :]
        place = part[:, None] * used + pair[None, :]
        # .cg: not from this SM's first-level cache
        share = tl.load(weight + place, mask=inside, other=LOW, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(share, 0))
        share = tl.exp2(share - top[None, :])
        decay = tl.exp2(m - top)
        from_part = partial + place[:, :, None] * D + tl.arange(0, W)[None, None, :]
        result = tl.load(from_part, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        acc = acc * decay[:, None] + tl.sum(result * share[:, :, None], 0)
        l = l * decay + tl.sum(share, 0)
        m = top
    return acc / l[:, None]


@triton.jit
def attend_short(
    out, q, kv, kv_scales, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, window, scale, partial, weight, arrived, tokens, short, part_size,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MR: tl.constexpr, MERGE: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of at most `short` tokens, their keys in parts of at least `part_size`; the last part to arrive merges them.
    Also zeros for the tokens from the last row's end to `tokens`. Grid (rows, key heads, parts at most).

    partial: float32 [rows, key heads, parts, short * GROUP, D], weight the same less D; arrived: int32 [rows, key
    heads], zero before and after. MR: short * GROUP or the next power of two. EARLY: whether this kernel starts
    before the one ahead has ended, and lets the next one do so (launch.Launch, `early`).
    """
    start_next(EARLY)
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, kv_heads, splits = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    pair = tl.arange(0, BM)
    column = tl.arange(0, D)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - first
    before = tl.load(seq_lens + slot)
    dead = tl.load(alive + slot) == 0
    zero = tl.zeros((BM, D), out.dtype.element_ty)
    if part == 0:
        for token in range(tl.load(q_starts + rows) + row, tokens, rows):
            place = pair_places(token, head, kv_heads * GROUP, GROUP, D, BM)[:, None] + column
            tl.store(out + place, zero, mask=(pair < GROUP)[:, None])
    if count == 0 or count > short:
        return
    place = pair_places(first, head, kv_heads * GROUP, GROUP, D, BM)[:, None] + column
    inside = (pair < count * GROUP)[:, None]
    if dead:
        if part == 0:
            tl.store(out + place, zero, mask=inside)
        return
    low = tl.maximum(before + 1 - window, 0) // BN * BN
    size = tl.maximum(tl.cdiv(tl.cdiv(before + count - low, splits), BN) * BN, part_size)
    parts = tl.cdiv(before + count - low, size)
    if part >= parts:
        return

    begin = low + part * size
    stop = tl.minimum(begin + size, before + count)
    position = before + pair // GROUP
    table, key = block_tables + slot * table_width, kv + head * PAGE * D + column
    cache = (key, key + kv_heads * PAGE * D, kv_scales, table, page_stride, head, kv_heads)
    query = tl.load(q + place, mask=inside, other=0.0)
    m, l, acc = over_keys(query, cache, begin, begin, stop, stop, position, window, scale, PAGE, BN, PAIRS)
    # A row's first tokens may see no key of its last part. Their weight is then LOW.
    l = tl.where(l > 0.0, l, 1.0)
    acc = acc / l[:, None]
    if parts == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
        return

    used = short * GROUP
    tile = row * kv_heads + head
    partial += (tile * splits).to(tl.int64) * used * D
    weight += tile * splits * used
    mine = part * used + pair
    tl.store(partial + mine[:, None] * D + column, acc, mask=inside)
    tl.store(weight + mine, m + tl.log2(l), mask=pair < count * GROUP)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1:
        merged = merge_parts(partial, weight, parts, used, count * GROUP, D, D, MR, MERGE)
        to = pair_places(first, head, kv_heads * GROUP, GROUP, D, MR)[:, None] + column
        live = (tl.arange(0, MR) < count * GROUP)[:, None]
        tl.store(out + to, merged.to(out.dtype.element_ty), mask=live)
        tl.store(arrived + tile, 0)
