"""A mixture of clamped gated MLPs: which pairs go to which expert, and their products with packed weights.

A pair is a token and one of its CHOSEN experts, number token * CHOSEN + choice. Pairs are sorted by expert: expert e
has order[starts[e]] to order[starts[e + 1]]; places are positions in this order. How many pairs an expert has is data:
it gets the tiles from starts[e] // BM + e on, which may be one more than they fill. Where pairs are fewer than that
makes tiles, there is a tile a place (FEW), and those inside another's BM places are empty. tiles int32 [number, 3]
says of each its expert, first place and the place after the expert's last; an empty tile's first place is -1.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.deepseek_v4.device.formats import (
    float8_operand,
    fp4_operand,
    operand_row,
    packed_order,
    q8,
)

BF16 = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
FP4 = tl.constexpr(2)


@triton.jit
def sort_pairs(
    order, starts, tiles, arranged, expert_ids, x, pairs, numbers, number_of_tiles, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr, BM: tl.constexpr, FEW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Program e < EXPERTS: the pairs of expert e, in their order, after those of the experts before it, and its tiles;
    program EXPERTS: the end, and the tiles of nobody. Pairs of no expert (id -1) are in nobody's range. The programs
    after these write x, COPY of its `numbers` each, to `arranged`, with the columns of each 128 in the order of
    packed_column."""
    expert = tl.program_id(0)
    if expert > EXPERTS:
        row = tl.arange(0, COPY // 128)[:, None]
        number = (expert - EXPERTS - 1).to(tl.int64) * COPY + row * 128 + tl.arange(0, 128)[None, :]
        value = tl.load(x + number, mask=number < numbers, other=0.0)
        tl.store(arranged + number, packed_order(value, KIND == FP4), mask=number < numbers)
    else:
        before = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            given = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
            before += ((given >= 0) & (given < expert)).to(tl.int32)
        first = tl.sum(before, 0)
        end = first
        tl.store(starts + expert, first)
        if expert < EXPERTS:
            for start in range(0, pairs, BLOCK):
                pair = start + tl.arange(0, BLOCK)
                mine = (tl.load(expert_ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
                rank = tl.cumsum(mine, 0)
                tl.store(order + end + rank - 1, pair, mask=mine != 0)
                end += tl.sum(mine, 0)
        if FEW:
            begin, stop, step = first, end, 1
        else:
            begin, stop, step = first // BM + expert, end // BM + expert + 1, BM
        if expert == EXPERTS:
            stop = number_of_tiles
        for start in range(begin, stop, 128):
            tile = start + tl.arange(0, 128)
            place = first + (tile - begin) * step
            used = (place < end) & ((place - first) % BM == 0)
            tl.store(tiles + tile * 3, expert + tl.zeros_like(tile), mask=tile < stop)
            tl.store(tiles + tile * 3 + 1, tl.where(used, place, -1), mask=tile < stop)
            tl.store(tiles + tile * 3 + 2, end + tl.zeros_like(tile), mask=tile < stop)


@triton.jit
def _rows_of(order, first, begin, end, CHOSEN: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Rows of x and of out for COUNT places from `first` on, and which of them are before `end`."""
    place = first + tl.arange(0, COUNT)
    inside = place < end
    pair = tl.load(order + place, mask=inside, other=0)
    source = tl.where(inside, place, begin)
    target = pair
    if FIRST:
        source = pair // CHOSEN
        target = place
    return source.to(tl.int64), target.to(tl.int64), inside


@triton.jit
def _store(out, acc, target, inside, on, N):
    to = out + target[None, :] * N + (on + tl.arange(0, acc.shape[0]))[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _fp4(of_words, of_scales, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """The left operand of 128 columns."""
    byte = (tl.arange(0, 16) // 4 * 8)[None, :]
    exponents = (tl.load(of_scales)[:, None] >> byte) & 255
    return fp4_operand(tl.load(of_words), exponents, PAIRS, WARPS)


@triton.jit
def _slim_product(
    out, x, of_words, of_scales, order, begin, end, on, N, K, K_BLOCKS,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, MORE: tl.constexpr, WARPS: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """experts_product of FP4 for a tile of at most SOME + MORE places."""
    source, target, inside = _rows_of(order, begin, begin, end, CHOSEN, FIRST, SOME)
    more_source, more_target, more_inside = _rows_of(order, begin + SOME, begin, end, CHOSEN, FIRST, MORE)
    column = tl.arange(0, 128)[:, None]
    of_x, of_more = x + source[None, :] * K + column, x + more_source[None, :] * K + column
    acc, more = tl.zeros((ROWS, SOME), tl.float32), tl.zeros((ROWS, MORE), tl.float32)
    for k in range(K_BLOCKS):
        left = _fp4(of_words + k * 16, of_scales + k, PAIRS, WARPS)
        acc = tl.dot(left, tl.load(of_x + k * 128, mask=inside[None, :], other=0.0), acc)
        more = tl.dot(left, tl.load(of_more + k * 128, mask=more_inside[None, :], other=0.0), more)
    _store(out, acc, target, inside, on, N)
    _store(out, more, more_target, more_inside, on, N)


@triton.jit
def experts_product(
    out, x, weight, scales, order, tiles, N, K, K_WORDS, K_BLOCKS,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
    KIND: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, UNROLL: tl.constexpr, SLIM: tl.constexpr,
):  # fmt: skip
    """Products of pairs with the weights of their experts, ROWS rows of the weights and BM places at a time.

    FIRST: from tokens x [T, K] to out [places, N]; else from x [places, K] to out [pairs, N]. N is a multiple of ROWS,
    K of 128; K_BLOCKS = K / 128. Grid (N // ROWS, tiles). KIND: weight is
    - BF16 [EXPERTS, N, K]; scales and K_WORDS unused, BK divides K;
    - FLOAT8 int32 [EXPERTS, N, K_WORDS], scales uint8 [EXPERTS, N / 128, K_BLOCKS]; K_WORDS = K / 4;
    - FP4 int32 [EXPERTS, N, K_WORDS], scales int32 [EXPERTS, N, K_BLOCKS], four bytes each; K_WORDS = K / 8.
    Columns of x are in the order of packed_column, but for BF16. WARPS: of the launch.
    UNROLL divides K_BLOCKS: so many times 128 columns are read at a time. SLIM, for FP4: a tile of at most three
    quarters of BM places multiplies no more than these.
    """
    tile = tiles + tl.program_id(1) * 3
    expert, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if begin < 0:
        return
    on = tl.program_id(0) * ROWS
    row = expert.to(tl.int64) * N + on + operand_row(tl.arange(0, ROWS), WARPS)
    of_words = weight + row[:, None] * K_WORDS + tl.arange(0, 16)[None, :]
    slim = False
    if SLIM:
        slim = end - begin <= 3 * BM // 4
    if slim:
        _slim_product(
            out, x, of_words, scales + row * K_BLOCKS, order, begin, end, on, N, K, K_BLOCKS,
            CHOSEN, ROWS, BM // 2, BM // 4, WARPS, PAIRS, FIRST,
        )  # fmt: skip
    else:
        source, target, inside = _rows_of(order, begin, begin, end, CHOSEN, FIRST, BM)
        of_x = x + source[None, :] * K
        used = inside[None, :]
        acc = tl.zeros((ROWS, BM), tl.float32)
        if KIND == FP4:
            of_x += tl.arange(0, 128)[:, None]
            of_scales = scales + row * K_BLOCKS
            for start in range(0, K_BLOCKS, UNROLL):
                for k in tl.static_range(UNROLL):
                    left = _fp4(of_words + (start + k) * 16, of_scales + (start + k), PAIRS, WARPS)
                    value = tl.load(of_x + (start + k) * 128, mask=used, other=0.0)
                    acc = tl.dot(left, value, acc)
        elif KIND == FLOAT8:
            of_x += tl.arange(0, 64)[:, None]
            of_blocks = scales + row // 128 * K_BLOCKS
            for start in range(0, 2 * K_BLOCKS, 2 * UNROLL):
                for k in tl.static_range(2 * UNROLL):
                    words = tl.load(of_words + (start + k) * 16)
                    exponents = tl.load(of_blocks + (start + k) // 2).to(tl.int32)[:, None]
                    left = float8_operand(words, exponents + tl.zeros_like(words), PAIRS, WARPS)
                    acc = tl.dot(left, tl.load(of_x + (start + k) * 64, mask=used, other=0.0), acc)
        else:
            column = tl.arange(0, BK)
            row = expert.to(tl.int64) * N + on + tl.arange(0, ROWS)
            of_weight = weight + row[:, None] * K + column[None, :]
            of_x += column[:, None]
            for k in range(0, K, BK):
                acc = tl.dot(tl.load(of_weight + k), tl.load(of_x + k, mask=used, other=0.0), acc)
        _store(out, acc, target, inside, on, N)


@triton.jit
def activate(
    hidden, both, order, starts, expert_weights, limit, width,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """hidden[place] = silu(min(g, limit)) * clamp(u, -limit, limit) * the pair's weight, with both[place] = [g, u] of
    `width` columns each, BLOCKS * 128 columns a program, in the order of packed_column, but for BF16.
    Grid (pairs, cdiv(width, BLOCKS * 128))."""
    place = tl.program_id(0)
    if place >= tl.load(starts + EXPERTS):
        return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    row = place.to(tl.int64) * width
    gate = tl.load(both + 2 * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + 2 * row + width + column, mask=inside, other=0.0).to(tl.float32)
    value = clamped_product(gate, up, limit) * tl.load(expert_weights + tl.load(order + place))
    dtype = hidden.dtype.element_ty
    value = value.to(dtype)
    if QUANTIZED:
        value = q8(value.to(tl.float32)).to(dtype)
    if KIND != BF16:
        value = packed_order(value, KIND == FP4)
    tl.store(hidden + row + column, value, mask=inside)


@triton.jit
def clamped_product(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32."""
    gate = tl.minimum(gate, limit)
    small = tl.exp2(tl.abs(gate) * -1.4426950408889634)  # never overflows
    silu = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small)
    return silu * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def add_chosen(out, shared, results, expert_ids, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = the sum of a token's results [pairs, width], in the order of its choices, and shared[t]; results of no
    expert are not read. Grid (T, cdiv(width, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        chosen = tl.load(expert_ids + pair) >= 0
        total += tl.load(results + pair * width + column, mask=inside & chosen, other=0.0).to(tl.float32)
    total += tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
