"""A mixture of experts: the rows of each expert, and their products with the experts' weights.

A pair is a token and one of its CHOSEN experts, number token * CHOSEN + choice. Pairs are sorted by expert: expert e
has order[starts[e]] to order[starts[e + 1]]. The number of pairs of an expert is data. Expert e gets the tiles from
starts[e] // BM + e on, which may be one more than its pairs fill; a tile without pairs ends at once. If there are fewer
pairs than such tiles, each place in the order has a tile (FEW). A tile inside the BM places of another then ends at
once. EARLY: as for norm.wait_ahead in products, as for norm.start_next elsewhere.

IDS: few pairs are not sorted. `order` and `starts` are both the expert ids of the pairs then, at most IDS (a power of
two). Each pair has a tile, and its number is its place. 1: all are of one token, whose experts are different.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import float8_operand, operand_row, word_column, word_place
from openinfer.kernels.device.int4 import sum_of_groups
from openinfer.kernels.device.linear import add_product
from openinfer.kernels.device.norm import gated, start_next, wait_ahead


@triton.jit
def sort_expert(order, starts, expert_ids, expert, experts, pairs, BLOCK: tl.constexpr):
    """Stable counting sort of pairs: writes the pairs of one expert after those of all smaller ids.

    Program `experts` only writes the final offset. Pairs with id -1 are dropped."""
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        given = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
        before += ((given >= 0) & (given < expert)).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    if expert < experts:
        for start in range(0, pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            mine = (tl.load(expert_ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
            rank = tl.cumsum(mine, 0)
            tl.store(order + place + rank - 1, pair, mask=mine != 0)
            place += tl.sum(mine, 0)


@triton.jit
def sort_pairs(order, starts, expert_ids, pairs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """sort_expert, a program an expert. Grid (experts + 1,)."""
    start_next(EARLY)
    sort_expert(order, starts, expert_ids, tl.program_id(0), tl.num_programs(0) - 1, pairs, BLOCK)


@triton.jit
def tile_of(
    tile, starts, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, FEW: tl.constexpr,
    IDS: tl.constexpr = 0,
):  # fmt: skip
    """(expert, begin, end) of a tile: its first place in the order, and the place after the expert's last. With IDS
    both are counted among the pairs of the expert.

    A tile without work has begin >= end."""
    if IDS == 1:
        mine = tl.load(starts + tile)
        return mine, mine * 0, (mine >= 0).to(tl.int32)
    if IDS:
        pair, mine = tl.arange(0, IDS), tl.load(starts + tile)
        given = tl.load(starts + pair, mask=pair < tl.num_programs(1), other=-1)
        same = given == mine
        before = tl.sum((same & (pair < tile)).to(tl.int32), 0)
        works = (mine >= 0) & (before % BM == 0)
        return mine, before, tl.where(works, tl.sum(same.to(tl.int32), 0), 0)
    expert = tl.arange(0, E_BLOCK)
    start = tl.load(starts + expert, mask=expert < EXPERTS, other=1 << 30)
    if FEW:
        owner = tl.sum((start <= tile).to(tl.int32), 0) - 1
        first = tl.load(starts + owner)
        begin = tl.where((tile - first) % BM == 0, tile, 1 << 30)
    else:
        owner = tl.sum((start // BM + expert <= tile).to(tl.int32), 0) - 1
        first = tl.load(starts + owner)
        begin = first + (tile - first // BM - owner) * BM
    return owner, begin, tl.load(starts + owner + 1)


@triton.jit
def pairs_of(order, expert, rm, end, CHOSEN: tl.constexpr, FIRST: tl.constexpr, IDS: tl.constexpr):
    """Of a tile's places rm: whether they are before its `end`, and the rows of x that they read and of `out` that they
    write. From tokens to places if FIRST, else from places to pairs."""
    inside, place = rm < end, tl.minimum(rm, end - 1)
    if IDS == 1:
        place = rm * 0 + tl.program_id(1)
        pair = place
    elif IDS:
        one = tl.arange(0, IDS)
        given = tl.load(order + one, mask=one < tl.num_programs(1), other=-1)
        same = given == expert
        found = same[None, :] & (tl.cumsum(same.to(tl.int32), 0)[None, :] == place[:, None] + 1)
        pair = tl.sum(tl.where(found, one[None, :], 0), 1)
        place = pair
    else:
        pair = tl.load(order + place)
    source, target = place, pair
    if FIRST:
        source, target = pair // CHOSEN, place
    return inside, source, target


@triton.jit
def store_rows(out, acc, target, rn, inside, N, BITS: tl.constexpr = 0):
    """out [.., N]: the rows `target` become acc [BM, BN], in the columns rn; with BITS in the order of word_column."""
    column = rn
    if BITS:
        column = rn // 128 * 128 + word_place(rn, BITS)
    to = out + target.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rn < N)[None, :])


@triton.jit
def arrange_rows(out, x, numbers, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = x, whose rows have `numbers` in all, each 128 in the order of word_column. Grid (cdiv(numbers, BLOCK),)."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < numbers
    value = tl.load(x + number // 128 * 128 + word_column(number % 128, BITS), mask=inside)
    tl.store(out + number, value, mask=inside)


@triton.jit
def columns_of_x(BITS: tl.constexpr, ARRANGED: tl.constexpr):
    """Where a row of x has the columns of the first operand of 128."""
    place = tl.arange(0, 64)
    if ARRANGED:
        return place
    # Pairs of columns stay together, which is as little as can be copied in the background.
    return tl.max_contiguous(tl.multiple_of(word_column(place, BITS), [2]), [2])


@triton.jit
def experts_product(
    out, x, weight, scales, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FIRST: tl.constexpr, SCALED: tl.constexpr, TALL: tl.constexpr, FEW: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Products of pairs with the weights of their experts. Grid (cdiv(N, BN), tiles).

    FIRST: from tokens x [T, K] to hidden rows out [pairs, N] in sorted order, the gated product with weight
    [EXPERTS, 2 N, K]. Else from hidden rows x [pairs, K] to out [pairs, N] in the order of pairs, with weight
    [EXPERTS, N, K]. TALL: the weights are the tall operand, for tiles of few rows. SCALED: as in linear.py.
    """
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    on = tl.program_id(0) * BN
    rn, rm, rk = on + tl.arange(0, BN), begin + tl.arange(0, BM), tl.arange(0, BK)
    inside, source, target = pairs_of(order, expert, rm, end, CHOSEN, FIRST, IDS)
    of_expert = weight + expert.to(tl.int64) * rows * N * K
    of_rows = tl.minimum(rn, N - 1) * K
    up = of_expert + N.to(tl.int64) * K
    blocks = tl.cdiv(N, 128) * tl.cdiv(K, 128)
    of_blocks = scales + expert * rows * blocks + on // 128 * tl.cdiv(K, 128)
    of_x = source.to(tl.int64) * K
    if TALL:
        acc = tl.zeros((BN, BM), tl.float32)
        acc_up = tl.zeros((BN, BM), tl.float32)
        for k in range(0, K, BK):
            value = tl.load(x + of_x[None, :] + (k + rk)[:, None])
            place = of_rows[:, None] + (k + rk)[None, :]
            of_k = of_blocks + k // 128
            acc = add_product(acc, tl.load(of_expert + place), value, of_k, SCALED)
            if FIRST:
                acc_up = add_product(acc_up, tl.load(up + place), value, of_k + blocks, SCALED)
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
        acc_up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            value = tl.load(x + of_x[:, None] + (k + rk)[None, :])
            place = of_rows[None, :] + (k + rk)[:, None]
            acc = tl.dot(value, tl.load(of_expert + place), acc)
            if FIRST:
                acc_up = tl.dot(value, tl.load(up + place), acc_up)
    if FIRST:
        acc = gated(acc, acc_up, out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N)


@triton.jit
def _float8_product(of_words, x, more_x, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Float32 [BN, BM]: 128 columns of float8, each 64 in 16 words a row, times columns of x."""
    words, more = tl.load(of_words), tl.load(of_words + 16)
    one = tl.full(words.shape, 127, tl.int32)  # the byte of a scale of 1
    total = tl.dot(float8_operand(words, one, PAIRS, WARPS), x)
    return tl.dot(float8_operand(more, one, PAIRS, WARPS), more_x, total)


@triton.jit
def experts_product_float8(
    out, x, weight, scales, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, ARRANGED: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts_product of SCALED weights: int32 [EXPERTS, N, K / 4], or 2 N rows if FIRST, whose codes go from memory to
    the place in the operand that their own thread holds. K is a multiple of 128, and BN divides it. ARRANGED: x has
    each 128 columns in the order of word_column, and if FIRST so has `out`; many rows are copied faster so. WARPS: the
    launch's. Grid (cdiv(N, BN), tiles)."""
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    on = tl.program_id(0) * BN
    rn, rm = on + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside, source, target = pairs_of(order, expert, rm, end, CHOSEN, FIRST, IDS)
    packed = tl.minimum(on + operand_row(tl.arange(0, BN), WARPS), N - 1)
    of_words = (
        weight + (expert.to(tl.int64) * rows * N + packed)[:, None] * (K // 4) + tl.arange(0, 16)[None, :]
    )
    up = of_words + N.to(tl.int64) * (K // 4)
    blocks = tl.cdiv(N, 128) * (K // 128)
    of_blocks = scales + expert * rows * blocks + on // 128 * (K // 128)
    of_x = x + source.to(tl.int64)[None, :] * K + columns_of_x(8, ARRANGED)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    for k in range(K // 128):
        low, high = tl.load(of_x + k * 128), tl.load(of_x + k * 128 + 64)
        total = _float8_product(of_words + k * 32, low, high, PAIRS, WARPS)
        acc += total * tl.load(of_blocks + k)
        if FIRST:
            total = _float8_product(up + k * 32, low, high, PAIRS, WARPS)
            acc_up += total * tl.load(of_blocks + blocks + k)
    acc = tl.trans(acc)
    if FIRST:
        acc = gated(acc, tl.trans(acc_up), out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N, 8 if FIRST and ARRANGED else 0)


@triton.jit
def experts_rows(
    out, x, weight, scales, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, FEW: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts_product of SCALED weights for very few pairs: a program loads all BK >= K columns of its rows at once,
    and multiplies them with one pair after the other, without the tensor cores. BN divides 128."""
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    RUN: tl.constexpr = min(BK, 128)  # columns of a scale
    on = tl.program_id(0) * BN
    rn, block = on + tl.arange(0, BN), tl.arange(0, BK // RUN)
    column = block[:, None] * RUN + tl.arange(0, RUN)[None, :]
    real = column < K
    of_expert = weight + expert.to(tl.int64) * rows * N * K
    place = tl.minimum(rn, N - 1)[:, None, None] * K + column[None, :, :]
    blocks = tl.cdiv(N, 128) * tl.cdiv(K, 128)
    of_blocks = scales + expert * rows * blocks + on // 128 * tl.cdiv(K, 128) + block
    gate = tl.load(of_expert + place, mask=real[None, :, :], other=0.0)
    of_gate = tl.load(of_blocks, mask=block * RUN < K, other=0.0)
    if FIRST:
        up = tl.load(of_expert + N.to(tl.int64) * K + place, mask=real[None, :, :], other=0.0)
        of_up = tl.load(of_blocks + blocks, mask=block * RUN < K, other=0.0)
    _, sources, targets = pairs_of(order, expert, begin + tl.arange(0, BM), end, CHOSEN, FIRST, IDS)
    for n in range(tl.minimum(BM, end - begin)):
        this = tl.arange(0, BM) == n
        source, target = tl.sum(tl.where(this, sources, 0), 0), tl.sum(tl.where(this, targets, 0), 0)
        row = tl.load(x + source.to(tl.int64) * K + column, mask=real, other=0.0).to(tl.float32)[None, :, :]
        acc = tl.sum(tl.sum(gate.to(tl.float32) * row, 2) * of_gate[None, :], 1)
        if FIRST:
            acc_up = tl.sum(tl.sum(up.to(tl.float32) * row, 2) * of_up[None, :], 1)
            acc = gated(acc, acc_up, out.dtype.element_ty)
        tl.store(out + target.to(tl.int64) * N + rn, acc.to(out.dtype.element_ty), mask=rn < N)


@triton.jit
def _store_sum(place, total, inside, ADDS: tl.constexpr):
    """Store the rounded total, or its sum with what is there."""
    dtype = place.dtype.element_ty
    value = total.to(dtype)
    if ADDS:
        old = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        value = (old.to(tl.float32) + value.to(tl.float32)).to(dtype)
    tl.store(place, value, mask=inside)


@triton.jit
def add_chosen(
    x, results, expert_ids, expert_weights, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x[t] += (ADDS; else =) the sum of a token's results [pairs, width], weighted, in the order of its choices;
    results of no expert are not read. Grid (T, cdiv(width, BLOCK))."""
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        chosen = tl.load(expert_ids + pair, cache_modifier=".cg") >= 0
        share = tl.load(expert_weights + pair, cache_modifier=".cg").to(tl.float32)
        result = tl.load(
            results + pair * width + column, mask=inside & chosen, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        total += tl.where(chosen, share, 0.0) * result
    _store_sum(x + token * width + column, total, inside, ADDS)


@triton.jit
def experts_sums(
    x, hidden, weight, scales, expert_ids, expert_weights, N, K,
    CHOSEN: tl.constexpr, CHOICES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr,
    ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The second product and add_chosen in one, for very few tokens: from hidden [pairs, K] in the order of pairs to x
    [T, N]. A program loads BN rows of all experts of its token at once, all BK >= K columns, and multiplies without the
    tensor cores. SCALED: as in linear.py; BN divides 128. CHOICES: CHOSEN or more, a power of two. Grid
    (cdiv(N, BN), T). All but hidden and x is read before the wait: the kernel ahead has let this one start when the
    choices were known."""
    RUN: tl.constexpr = min(BK, 128)  # columns of a scale
    on, choice = tl.program_id(0) * BN, tl.arange(0, CHOICES)
    rn, block = on + tl.arange(0, BN), tl.arange(0, BK // RUN)
    pair = tl.program_id(1) * CHOSEN + choice
    real = choice < CHOSEN
    expert = tl.load(expert_ids + pair, mask=real, other=-1, cache_modifier=".cg").to(tl.int64)
    share = tl.load(expert_weights + pair, mask=expert >= 0, other=0.0, cache_modifier=".cg").to(tl.float32)
    column = block[:, None] * RUN + tl.arange(0, RUN)[None, :]
    inside = (expert >= 0)[:, None, None] & (column < K)[None, :, :]
    if SCALED:
        of_blocks = scales + (expert * tl.cdiv(N, 128) + on // 128) * tl.cdiv(K, 128)
        known = (expert >= 0)[:, None] & (block * RUN < K)[None, :]
        scale = tl.load(of_blocks[:, None] + block[None, :], mask=known, other=0.0)
    of_rows = weight + (expert[:, None] * N + tl.minimum(rn, N - 1)[None, :]) * K
    of_pairs = hidden + pair.to(tl.int64) * K
    value = tl.load(
        of_rows[:, :, None, None] + column[None, None, :, :], mask=inside[:, None, :, :], other=0.0
    )
    start_next(EARLY)
    value = value.to(tl.float32)
    of_pairs = of_pairs[:, None, None] + column[None, :, :]
    row = tl.load(of_pairs, mask=inside, other=0.0).to(tl.float32)
    part = tl.sum(value * row[:, None, :, :], 3)
    if SCALED:
        part *= scale[:, None, :]
    result = tl.sum(part, 2).to(hidden.dtype.element_ty).to(tl.float32)
    total = tl.sum(result * share[:, None], 0)
    _store_sum(x + tl.program_id(1).to(tl.int64) * N + rn, total, rn < N, ADDS)


@triton.jit
def experts_product_int4(
    out, x, weight, words, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, FIRST: tl.constexpr, FEW: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts_product with codes uint8 [EXPERTS, N, K / 2], or 2 N rows if FIRST, and words int32 [.., K / GROUP].
    Grid (cdiv(N, BN), tiles)."""
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    rn, rm = tl.program_id(0) * BN + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside, source, target = pairs_of(order, expert, rm, end, CHOSEN, FIRST, IDS)
    byte = tl.arange(0, GROUP // 2)
    column = byte // 16 * 32 + byte % 16
    row = expert.to(tl.int64) * rows * N + tl.minimum(rn, N - 1)
    of_codes = weight + row[:, None] * (K // 2) + byte[None, :]
    of_words = words + row * (K // GROUP)
    of_x = x + source.to(tl.int64)[None, :] * K + column[:, None]
    acc = tl.trans(sum_of_groups(of_codes, of_words, of_x, 0, K // GROUP, GROUP, BN, BM))
    if FIRST:
        half = N.to(tl.int64)
        of_codes += half * (K // 2)
        of_words += half * (K // GROUP)
        up = sum_of_groups(of_codes, of_words, of_x, 0, K // GROUP, GROUP, BN, BM)
        acc = gated(acc, tl.trans(up), out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N)
