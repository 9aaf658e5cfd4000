"""Attention with the keys of long rows in parts: the division is made on the device, from the lengths of all rows.

A step of few tokens has few tiles. A program a tile would leave most of the GPU idle while a long row is read. How many
rows a bucket holds, and how long they are, is known on the device alone.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.attention import merge_parts, over_keys, pair_places


@triton.jit
def _item(item, of_rows, limits, rows, window, BQ: tl.constexpr, BN: tl.constexpr, SEARCH: tl.constexpr):
    """(row, tile of the row, part of the tile, parts at most, keys of a part, first place of the tile's results) of an
    item; row = rows past the last item.

    A row of more than `over` and at most `most` tokens has a tile for every BQ of them. Its tiles have the same number
    of parts, at most `most_parts`. A part has `least` keys, or more, so that there are at most `room` items more
    than tiles. Only a row of several parts has places: one an item, and at most 2 * room in all."""
    slots, q_starts, seq_lens, alive = of_rows
    over, most, room, least, most_parts = limits
    r = tl.arange(0, SEARCH)
    real = r < rows
    slot = tl.load(slots + r, mask=real, other=0)
    first = tl.load(q_starts + r, mask=real, other=0)
    count = tl.load(q_starts + r + 1, mask=real, other=0) - first
    before = tl.load(seq_lens + slot, mask=real, other=0)
    live = tl.load(alive + slot, mask=real, other=0) != 0
    keys = tl.where(live, before + count - tl.maximum(before + 1 - window, 0) // BN * BN, 1)
    tiles = tl.where((count > over) & (count <= most), tl.cdiv(count, BQ), 0)
    size = tl.maximum(least, tl.cdiv(tl.cdiv(tl.sum(tiles * keys, 0), room), BN) * BN)
    sizes = tl.maximum(size, tl.cdiv(tl.cdiv(keys, most_parts), BN) * BN)
    parts = tl.cdiv(keys, sizes)
    items = tiles * parts
    row = tl.sum((real & (tl.cumsum(items, 0) <= item)).to(tl.int32), 0)
    ahead, mine = r < row, r == row
    item -= tl.sum(tl.where(ahead, items, 0), 0)
    place = tl.sum(tl.where(ahead & (parts > 1), items, 0), 0)
    parts = tl.maximum(tl.sum(tl.where(mine, parts, 0), 0), 1)
    tile = item // parts
    return row, tile, item % parts, parts, tl.sum(tl.where(mine, sizes, 0), 0), place + tile * parts


@triton.jit
def attend_split(
    out, q, kv, kv_scales, slots, q_starts, seq_lens, alive, block_tables,
    table_width, page_stride, window, scale, partial, weight, arrived, rows, tokens, over, most, room, least,
    most_parts,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MR: tl.constexpr, MERGE: tl.constexpr, SEARCH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows of more than `over` and at most `most` tokens, and zeros for the tokens from the last row's end to `tokens`.
    The last part of a tile to arrive merges the parts. Grid (key heads, items at most): tiles at most, and `room` more.

    partial: float32 [key heads, 2 * room, BM, D], weight the same less D; arrived: int32 [key heads, 2 * room], zero
    before and after. MR: a power of two, at least the pairs of a tile. SEARCH: a power of two >= rows.
    """
    BQ: tl.constexpr = BM // GROUP
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    item, items = tl.program_id(1), tl.num_programs(1)
    pair = tl.arange(0, BM)
    column = tl.arange(0, D)[None, :]
    heads = kv_heads * GROUP
    zero = tl.zeros((BM, D), out.dtype.element_ty)
    for token in range(tl.load(q_starts + rows) + item, tokens, items):
        rest = pair_places(token, head, heads, GROUP, D, BM)[:, None] + column
        tl.store(out + rest, zero, mask=(pair < GROUP)[:, None])
    of_rows, limits = (slots, q_starts, seq_lens, alive), (over, most, room, least, most_parts)
    row, tile, part, parts, size, first_place = _item(item, of_rows, limits, rows, window, BQ, BN, SEARCH)
    if row >= rows:
        return
    first = tl.load(q_starts + row)
    begin = first + tile * BQ
    count = tl.minimum(tl.load(q_starts + row + 1) - begin, BQ)
    place = pair_places(begin, head, heads, GROUP, D, BM)[:, None] + column
    inside = (pair < count * GROUP)[:, None]
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(alive + slot) == 0:
        tl.store(out + place, zero, mask=inside)
        return

    seen_first = tl.load(seq_lens + slot) + begin - first
    stop = seen_first + count
    low = tl.maximum(seen_first + 1 - window, 0) // BN * BN
    parts = tl.cdiv(stop - low, size)
    if part >= parts:
        return
    whole = (seen_first + 1) // BN * BN  # every token of the tile sees the keys before this one ...
    if stop > window:
        whole = low  # ... unless the window ends for some of them
    low += part * size
    end = tl.minimum(low + size, stop)
    whole = tl.minimum(tl.maximum(whole, low), end)
    key = kv + head * PAGE * D + column
    query = tl.load(q + place, mask=inside, other=0.0)
    value, table = key + kv_heads * PAGE * D, block_tables + slot * table_width
    cache = (key, value, kv_scales, table, page_stride, head, kv_heads)
    position = seen_first + pair // GROUP
    m, l, acc = over_keys(query, cache, low, whole, end, stop, position, window, scale, PAGE, BN, PAIRS)
    # A pair may see nothing: one past the row's end, or a tile's first tokens of its last part. Its weight is then LOW.
    l = tl.where(l > 0.0, l, 1.0)
    acc = acc / l[:, None]
    if parts == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
        return

    first_place += head * 2 * room
    mine = (first_place + part) * BM + pair
    tl.store(partial + mine.to(tl.int64)[:, None] * D + column, acc, mask=inside)
    tl.store(weight + mine, m + tl.log2(l), mask=pair < count * GROUP)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(arrived + first_place, 1, sem="acq_rel") == parts - 1:
        partial += first_place.to(tl.int64) * BM * D
        weight += first_place * BM
        W: tl.constexpr = D if D < 128 else 128
        for c in range(0, D, W):
            merged = merge_parts(partial + c, weight, parts, BM, count * GROUP, D, W, MR, MERGE)
            to = pair_places(begin, head, heads, GROUP, D, MR)[:, None] + c + tl.arange(0, W)[None, :]
            live = (tl.arange(0, MR) < count * GROUP)[:, None]
            tl.store(out + to, merged.to(out.dtype.element_ty), mask=live)
        tl.store(arrived + first_place, 0)
