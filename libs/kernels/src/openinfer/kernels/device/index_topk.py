"""An indexer: a score of every finished entry for every token, and the entries of the largest scores.

The largest of n numbers are found by cutting the range of their bits in three, again and again; the bits have the order
of the numbers. Where a token sees more entries than a program holds, several programs take a segment each. Another
program then chooses among their choices.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import wait_ahead
from openinfer.kernels.device.rounding import hadamard, ordered, q4, rotated


@triton.jit
def _keys(keys, table, entry, live, page_stride, D: tl.constexpr, ENTRIES: tl.constexpr):
    """Where the keys of entries [N] are, [N, D]."""
    page = tl.load(table + entry // ENTRIES, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    return (keys + page * page_stride + entry % ENTRIES * D)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _store_scores(scores, query, weight, key, entry, live):
    product = tl.maximum(tl.dot(key, query), 0.0)
    tl.store(scores + entry, tl.sum(product * weight[None, :], 1), mask=live)


@triton.jit
def index_scores(
    scores, q, weights, keys, cos_sin, positions, token_slots, block_tables,
    width, table_width, page_stride, weight_stride, heads, topk, scale, tokens,
    D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
    BN: tl.constexpr, QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """scores float32 [tokens, width] of tokens that see more than topk entries. Grid (tokens, parts): blocks of BN
    entries are dealt to a token's parts in turn. HEADS: `heads` or the next power of two, at least 16.

    EARLY: entries of a part's first block that ended before the step, which has `tokens` tokens, are read before the
    wait: the kernels ahead write those of the step."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + token, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions + token, cache_modifier=".cg")
    seen = (position + 1) // (PAGE // ENTRIES)
    first, blocks = tl.program_id(1), tl.cdiv(seen, BN)
    table, i = block_tables + slot * table_width, tl.arange(0, BN)
    if EARLY:
        entry = first * BN + i
        live, old = entry < seen, entry < tl.maximum(position + 1 - tokens, 0) // (PAGE // ENTRIES)
        where = _keys(keys, table, entry, live, page_stride, D, ENTRIES)
        held = tl.load(where, mask=old[:, None], other=0.0, cache_modifier=".cg")
    wait_ahead(EARLY)
    if (slot == 0) | (seen <= topk) | (first >= blocks):
        return
    head, column, to = tl.arange(0, HEADS), tl.arange(0, D)[None, :], scores + token * width
    real = head < heads
    query = tl.load(q + (token * heads + head)[:, None] * D + column, mask=real[:, None], other=0.0)
    query = rotated(query.to(tl.float32), cos_sin, position, 1.0, D, ROTARY).to(query.dtype)
    if QUANTIZED:
        turned = hadamard(query, D).to(query.dtype)
        query = q4(turned.to(tl.float32)).to(query.dtype)
    query = tl.trans(query)
    weight = tl.load(weights + token * weight_stride + head, mask=real, other=0.0) * scale
    if EARLY:
        key = tl.load(where, mask=(live & ~old)[:, None], other=held)
        _store_scores(to, query, weight, key, entry, live)
        first += tl.num_programs(1)
    for block in range(first, blocks, tl.num_programs(1)):
        entry = block * BN + i
        live = entry < seen
        where = _keys(keys, table, entry, live, page_stride, D, ENTRIES)
        _store_scores(to, query, weight, tl.load(where, mask=live[:, None], other=0.0), entry, live)


@triton.jit
def _places(order, live, count):
    """Where each of the `count` largest of the live numbers goes in a list of them by index, and -1 for the others;
    of equals the lowest index is larger. int32 [N]."""
    low = tl.min(tl.where(live, order, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(live, order, -0x7FFFFFFF), 0).to(tl.int64)
    while low < high:  # at least `count` are low or larger, and fewer are larger than high
        one, two = low + (((high - low) * 5 + 15) >> 4), low + (((high - low) * 11 + 15) >> 4)
        reached = (order >= one).to(tl.int32) + ((order >= two).to(tl.int32) << 16)
        reached = tl.sum(tl.where(live, reached, 0), 0)
        of_one, of_two = reached & 0xFFFF, reached >> 16
        if of_two >= count:
            low = two
        elif of_one >= count:
            low, high = one, two - 1
        else:
            high = one - 1
        if (of_one == count) | (of_two == count):
            high = low
    above, equal = live & (order > low), live & (order == low)
    left = count - tl.sum(above.to(tl.int32), 0)
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # of both kinds, itself included
    chosen = above | (equal & ((before >> 16) <= left))
    return tl.where(chosen, (before & 0xFFFF) + tl.minimum(before >> 16, left) - 1, -1)


@triton.jit
def select_entries(
    selected, scores, found, found_order, positions, token_slots, width, topk, ratio,
    BLOCK: tl.constexpr, SMALL: tl.constexpr, FILL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """selected[t]: the topk entries of the largest scores, in the order of their numbers, then -1. Grid (tokens,
    segments of BLOCK entries).

    A token that sees more than BLOCK has candidates instead: found, found_order int32 [tokens, segments, topk], -1
    where a segment has fewer. 2 SMALL <= BLOCK: a token that sees at most SMALL entries costs less, and so does one
    that sees at most 2 SMALL.
    """
    token, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    live_token = tl.load(token_slots + token, cache_modifier=".cg") != 0
    position = tl.load(positions + token, cache_modifier=".cg")
    seen = tl.where(live_token, (position + 1) // ratio, 0)
    wait_ahead(EARLY)
    first = segment * BLOCK
    if (segment > 0) & (first >= seen):
        return
    j = tl.arange(0, FILL)
    to = selected + token * topk
    if seen <= topk:
        tl.store(to + j, tl.where(j < seen, j, -1), mask=j < topk)
    elif seen <= SMALL:
        _select(to, to, scores + token * width, 0, seen, topk, SMALL, False)
    elif seen <= 2 * SMALL:
        _select(to, to, scores + token * width, 0, seen, topk, 2 * SMALL, False)
    elif seen <= BLOCK:
        _select(to, to, scores + token * width, 0, seen, topk, BLOCK, False)
    else:
        place = (token * tl.num_programs(1) + segment) * topk
        _select(found + place, found_order + place, scores + token * width, first, seen, topk, BLOCK, True)
        here = seen - first
        tl.store(found + place + j, tl.full((FILL,), -1, tl.int32), mask=(j >= here) & (j < topk))


@triton.jit
def _select(to, to_order, scores, first, seen, topk, BLOCK: tl.constexpr, ORDER: tl.constexpr):
    """The topk largest of BLOCK scores from `first`, of `seen` in all, or all of them if there are fewer."""
    entry = first + tl.arange(0, BLOCK)
    live = entry < seen
    order = ordered(tl.load(scores + entry, mask=live, other=0.0))
    place = _places(order, live, tl.minimum(topk, seen - first))
    tl.store(to + place, entry, mask=place >= 0)
    if ORDER:
        tl.store(to_order + place, order, mask=place >= 0)


@triton.jit
def select_found(
    selected, found, found_order, positions, token_slots, topk, ratio, segments, lists,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """selected[t] from the candidates of a token that sees more than SEGMENT entries. Grid (tokens,).

    A program takes the candidates of `lists` segments at a time; BLOCK >= lists * topk is a power of two. The first
    segment's place holds the best so far, which come before the others, so that of equals the lowest is larger.
    """
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions + token) + 1) // ratio
    if (tl.load(token_slots + token) == 0) | (seen <= SEGMENT):
        return
    i = tl.arange(0, BLOCK)
    base, end = token * segments * topk, tl.cdiv(seen, SEGMENT) * topk
    taken = tl.zeros((), tl.int32)  # candidates behind the first segment's that were looked at
    while taken + topk < end:
        number = i + tl.where(i < topk, 0, taken)
        live = (i < lists * topk) & (number < end)
        entry = tl.load(found + base + number, mask=live, other=-1)
        live = live & (entry >= 0)
        order = tl.load(found_order + base + number, mask=live, other=0)
        place = _places(order, live, topk)
        taken += (lists - 1) * topk
        last = taken + topk >= end
        tl.store(selected + token * topk + place, entry, mask=(place >= 0) & last)
        tl.store(found + base + place, entry, mask=(place >= 0) & (last == 0))
        tl.store(found_order + base + place, order, mask=(place >= 0) & (last == 0))
        tl.debug_barrier()  # the next turn reads what other threads have stored
