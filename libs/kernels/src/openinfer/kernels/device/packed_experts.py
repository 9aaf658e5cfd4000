"""A mixture of clamped gated MLPs: the pairs of each expert, and their products with packed weights.

A pair is a token and one of its CHOSEN experts, number token * CHOSEN + choice. Pairs are sorted by expert: expert e
has order[starts[e]] to order[starts[e + 1]]; places are positions in this order. The number of pairs of an expert is
data. Expert e gets the tiles from starts[e] // BM + e on, which may be one more than its pairs fill; a tile without
pairs ends at once. If there are fewer pairs than such tiles, each place has a tile (FEW). A tile inside the BM places
of another then ends at once. EARLY: as for norm.wait_ahead, and for norm.start_next in add_chosen.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import sort_expert, tile_of
from openinfer.kernels.device.formats import (
    code_order,
    e8m0,
    float8_operand,
    fp4_codes,
    fp4_operand,
    operand_row,
    packed_order,
    q8,
    q8_codes,
)
from openinfer.kernels.device.norm import start_next, wait_ahead

BF16 = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
FP4 = tl.constexpr(2)
FP4_SHIFT = tl.constexpr(2.0**-12)
"""The factor that corrects products of fp4_codes, which are too large by its inverse."""


@triton.jit
def _arrange_codes(out, scales, number, code, scale, numbers, K_BLOCKS, STRIDE, KIND: tl.constexpr):
    """arrange of e4m3 codes [B, 128] with scales float32 [B, 1]."""
    row = tl.arange(0, code.shape[0])
    if KIND == FP4:
        code = code_order(code)
    block = (number // 128 + row)[:, None]
    of_scales = scales + block % K_BLOCKS * STRIDE + block // K_BLOCKS
    tl.store(of_scales, scale, mask=block * 128 < numbers)
    place = number + row[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + place, code, mask=place < numbers)


@triton.jit
def arrange(out, scales, number, value, numbers, K_BLOCKS, STRIDE, KIND: tl.constexpr, CODES: tl.constexpr):
    """Write values [B, 128], of which the first is the number-th of `numbers`, as the products read them. CODES: as
    e4m3 codes with a scale for each 128, scales [K_BLOCKS, STRIDE], in the order of code_order for FP4; else in the
    order of packed_column, but for BF16."""
    if CODES:
        code, scale = q8_codes(value.to(tl.float32))
        _arrange_codes(out, scales, number, code, scale, numbers, K_BLOCKS, STRIDE, KIND)
    else:
        if KIND != BF16:
            value = packed_order(value, KIND == FP4)
        row = tl.arange(0, value.shape[0])
        place = number + row[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(out + place, value, mask=place < numbers)


@triton.jit
def sort_pairs(
    order, starts, arranged, scales, expert_ids, x, x_scales, pairs, numbers, K_BLOCKS, STRIDE,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr, KIND: tl.constexpr, CODED: tl.constexpr,
    CODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs 0 to EXPERTS: sort_expert. The programs after these write x, COPY of its `numbers` each, to `arranged`
    and `scales`, as `arrange` does. CODED: x is codes, with x_scales uint8 (E8M0) for each 128."""
    wait_ahead(EARLY)
    expert = tl.program_id(0)
    if expert > EXPERTS:
        first = (expert - EXPERTS - 1).to(tl.int64) * COPY
        number = first + tl.arange(0, COPY // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        value = tl.load(x + number, mask=number < numbers, other=0.0)
        if CODED:
            block = (first // 128 + tl.arange(0, COPY // 128))[:, None]
            scale = e8m0(tl.load(x_scales + block, mask=block * 128 < numbers, other=0))
            if CODES:
                _arrange_codes(arranged, scales, first, value, scale, numbers, K_BLOCKS, STRIDE, KIND)
            else:
                wide = (value.to(tl.float32) * scale).to(arranged.dtype.element_ty)
                arrange(arranged, scales, first, wide, numbers, K_BLOCKS, STRIDE, KIND, False)
        else:
            arrange(arranged, scales, first, value, numbers, K_BLOCKS, STRIDE, KIND, CODES)
    else:
        sort_expert(order, starts, expert_ids, expert, EXPERTS, pairs, BLOCK)


@triton.jit
def _places(order, begin, end, BM: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr):
    """A tile's places, whether they are before its `end`, and the rows of x that they read and of `out` that they
    write: from tokens to places if FIRST, else from places to pairs."""
    place = begin + tl.arange(0, BM)
    inside = place < end
    pair = tl.load(order + place, mask=inside, other=0)
    source, target = tl.where(inside, place, begin), pair
    if FIRST:
        source, target = pair // CHOSEN, place
    return place, inside, source, target


@triton.jit
def experts_product(
    out, x, weight, scales, order, starts, N, K, K_WORDS, K_BLOCKS,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, WARPS: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
    FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Products of pairs with the weights of their experts, ROWS rows of the weights and BM places at a time.

    FIRST: from tokens x [T, K] to out [places, N]; else from x [places, K] to out [pairs, N]. N is a multiple of ROWS,
    K of 128; K_BLOCKS = K / 128. Grid (N // ROWS, tiles). KIND: weight is
    - BF16 [EXPERTS, N, K]; scales and K_WORDS unused, BK divides K;
    - FLOAT8 int32 [EXPERTS, N, K_WORDS], scales uint8 [EXPERTS, N / 128, K_BLOCKS]; K_WORDS = K / 4, ROWS divides 128;
    - FP4 int32 [EXPERTS, N, K_WORDS], scales int32 [EXPERTS, N, K_BLOCKS], four bytes each; K_WORDS = K / 8.
    Columns of x are in the order of packed_column, but for BF16. WARPS: of the launch.
    """
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW)
    if begin >= end:
        return
    on = tl.program_id(0) * ROWS
    _, inside, source, target = _places(order, begin, end, BM, CHOSEN, FIRST)
    of_x = x + source.to(tl.int64)[None, :] * K
    used = inside[None, :]
    acc = tl.zeros((ROWS, BM), tl.float32)
    if KIND == BF16:
        column = tl.arange(0, BK)
        row = expert.to(tl.int64) * N + on + tl.arange(0, ROWS)
        of_weight = weight + row[:, None] * K + column[None, :]
        of_x += column[:, None]
        for k in range(0, K, BK):
            acc = tl.dot(tl.load(of_weight + k), tl.load(of_x + k, mask=used, other=0.0), acc)
    else:
        word = tl.arange(0, 16)
        row = expert.to(tl.int64) * N + on + operand_row(tl.arange(0, ROWS), WARPS)
        of_words = weight + row[:, None] * K_WORDS + word[None, :]
        of_x += tl.arange(0, 64)[:, None]
        if KIND == FP4:
            of_scales = scales + row * K_BLOCKS
            byte = (word // 4 * 8)[None, :]
            for k in range(K_BLOCKS):
                words = tl.load(of_words + k * 16)
                exponents = (tl.load(of_scales + k)[:, None] >> byte) & 255
                value = tl.load(of_x + k * 128, mask=used, other=0.0)
                acc = tl.dot(fp4_operand(words, exponents, 0, PAIRS, WARPS), value, acc)
                value = tl.load(of_x + k * 128 + 64, mask=used, other=0.0)
                acc = tl.dot(fp4_operand(words, exponents, 1, PAIRS, WARPS), value, acc)
        else:
            of_blocks = scales + (expert * (N // 128) + on // 128) * K_BLOCKS
            for k in range(2 * K_BLOCKS):
                words = tl.load(of_words + k * 16)
                exponents = tl.load(of_blocks + k // 2).to(tl.int32) + tl.zeros_like(words)
                value = tl.load(of_x + k * 64, mask=used, other=0.0)
                acc = tl.dot(float8_operand(words, exponents, PAIRS, WARPS), value, acc)
    to = out + target.to(tl.int64)[None, :] * N + (on + tl.arange(0, ROWS))[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _add_fp4(
    acc, of_x, of_x_scales, used, of_words, of_scales, K_BLOCKS, STRIDE, TURN: tl.constexpr, PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """acc + the products of coded_product with FP4. Scales of x are read a turn ahead, because they do not come by the
    queue of copies and the product would wait for them."""
    ROWS: tl.constexpr = acc.shape[0]
    scale = tl.load(of_x_scales)
    scale_after = tl.load(of_x_scales + (TURN - 1) * STRIDE)
    for k in range(0, K_BLOCKS, TURN):
        ahead = tl.minimum(k + TURN, K_BLOCKS - TURN)
        next_scale = tl.load(of_x_scales + ahead * STRIDE)
        exponents = tl.load(of_scales + k * 4)
        words = tl.load(of_words + k * 16)
        value = tl.load(of_x + k * 128, mask=used, other=0.0)
        if TURN == 1:
            acc += tl.dot(fp4_codes(words, exponents, PAIRS, WARPS), value) * scale[None, :]
        else:
            next_after = tl.load(of_x_scales + (ahead + 1) * STRIDE)
            exponents, after = tl.split(tl.permute(tl.reshape(exponents, (ROWS, 2, 4)), (0, 2, 1)))
            words_after = tl.load(of_words + k * 16 + 16)
            value_after = tl.load(of_x + k * 128 + 128, mask=used, other=0.0)
            acc += tl.dot(fp4_codes(words, exponents, PAIRS, WARPS), value) * scale[None, :]
            acc += tl.dot(fp4_codes(words_after, after, PAIRS, WARPS), value_after) * scale_after[None, :]
            scale_after = next_after
        scale = next_scale
    return acc * FP4_SHIFT


@triton.jit
def _add_float8(acc, of_x, of_x_scales, used, of_weight, of_blocks, K_BLOCKS, STRIDE):
    """acc + the products of coded_product with float8 weights; scales as in _add_fp4."""
    scale = tl.load(of_x_scales) * e8m0(tl.load(of_blocks))
    for k in range(K_BLOCKS):
        ahead = tl.minimum(k + 1, K_BLOCKS - 1)
        next_scale = tl.load(of_x_scales + ahead * STRIDE)
        next_block = tl.load(of_blocks + ahead)
        value = tl.load(of_x + k * 128, mask=used, other=0.0)
        acc += tl.dot(tl.load(of_weight + k * 128), value) * scale[None, :]
        scale = next_scale * e8m0(next_block)
    return acc


@triton.jit
def coded_product(
    out, x, x_scales, weight, scales, order, starts, N, K, K_WORDS, K_BLOCKS, STRIDE,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    WARPS: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, FEW: tl.constexpr,
    TURN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts_product of float8 codes: x e4m3 with x_scales float32 [K_BLOCKS, STRIDE], a scale for each 128 columns
    of a token or place; what is after the last place is read, but not used.

    FLOAT8 weights are e4m3 [EXPERTS, N, K], FP4 scales uint8 [EXPERTS, N, 4 K_BLOCKS] (a block below 2^-25 counts as
    zero, fp4_codes). TURN: 1 block of 128 columns at a time, or 2 for FP4 with an even K_BLOCKS. The tensor cores
    add up float8 products with some 14 bits. So each block of 128 columns has a sum of its own, which is scaled and
    added in float32.
    """
    wait_ahead(EARLY)
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW)
    if begin >= end:
        return
    on = tl.program_id(0) * ROWS
    place, inside, source, target = _places(order, begin, end, BM, CHOSEN, FIRST)
    of_x_scales = x_scales + (source if FIRST else place)
    of_x = x + source.to(tl.int64)[None, :] * K + tl.arange(0, 128)[:, None]
    used = inside[None, :]
    acc = tl.zeros((ROWS, BM), tl.float32)
    if KIND == FP4:
        row = expert.to(tl.int64) * N + on + operand_row(tl.arange(0, ROWS), WARPS)
        of_words = weight + row[:, None] * K_WORDS + tl.arange(0, 16)[None, :]
        of_scales = scales + row[:, None] * (K_BLOCKS * 4) + tl.arange(0, 4 * TURN)[None, :]
        acc = _add_fp4(
            acc, of_x, of_x_scales, used, of_words, of_scales, K_BLOCKS, STRIDE, TURN, PAIRS, WARPS
        )
    else:
        row = expert.to(tl.int64) * N + on + tl.arange(0, ROWS)
        of_weight = weight + row[:, None] * K + tl.arange(0, 128)[None, :]
        of_blocks = scales + (expert * (N // 128) + on // 128) * K_BLOCKS
        acc = _add_float8(acc, of_x, of_x_scales, used, of_weight, of_blocks, K_BLOCKS, STRIDE)
    to = out + target.to(tl.int64)[None, :] * N + (on + tl.arange(0, ROWS))[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def activate(
    hidden, scales, both, order, starts, expert_weights, limit, width, STRIDE,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, QUANTIZED: tl.constexpr,
    CODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """hidden[place] = silu(min(g, limit)) * clamp(u, -limit, limit) * the pair's weight.

    both[place] = [g, u] has `width` columns each. A program takes BLOCKS * 128 columns and writes them like `arrange`.
    Grid (pairs, cdiv(width, BLOCKS * 128))."""
    wait_ahead(EARLY)
    place = tl.program_id(0)
    if place >= tl.load(starts + EXPERTS):
        return
    first = tl.program_id(1) * BLOCKS * 128
    column = first + tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    row = place.to(tl.int64) * width
    gate = tl.load(both + 2 * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + 2 * row + width + column, mask=inside, other=0.0).to(tl.float32)
    value = clamped_product(gate, up, limit) * tl.load(expert_weights + tl.load(order + place))
    value = value.to(both.dtype.element_ty)
    if QUANTIZED and not CODES:
        value = q8(value.to(tl.float32)).to(both.dtype.element_ty)
    arrange(hidden, scales, row + first, value, row + width, width // 128, STRIDE, KIND, CODES)


@triton.jit
def clamped_product(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32."""
    gate = tl.minimum(gate, limit)
    small = tl.exp2(tl.abs(gate) * -1.4426950408889634)  # never overflows
    silu = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small)
    return silu * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def add_chosen(
    out, shared, results, expert_ids, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of a token's results [pairs, width], in the order of its choices, and
    shared[t]; results of no expert are not read, and the others alone are read after the wait. Grid (T, cdiv(width,
    BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, chosen = column < width, ()
    for choice in tl.static_range(CHOSEN):
        chosen += (tl.load(expert_ids + token * CHOSEN + choice, cache_modifier=".cg") >= 0,)
    more = tl.load(shared + token * width + column, mask=inside, other=0.0, cache_modifier=".cg")
    start_next(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        place = results + (token * CHOSEN + choice) * width + column
        value = tl.load(place, mask=inside & chosen[choice], other=0.0, cache_modifier=".cg")
        total += value.to(tl.float32)
    total += more.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
