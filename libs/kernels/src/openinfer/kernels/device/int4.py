"""Matrix products with INT4 weights: codes uint8 [N, K / 2] and words int32 [N, K / GROUP] (formats.int4)."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import operand_row, own_part, packed_operand
from openinfer.kernels.device.linear import finish


@triton.jit
def number(code):
    """128 + a code 0 to 15, in bfloat16: the code is the lowest bits of the significand of 128."""
    return (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_of(word):
    """The scale of a group."""
    return (word & -16).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_groups(
    of_codes, of_words, of_x, first, end, GROUP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):
    """float32 [BN, BM]: rows of an INT4 weight times columns of x, over the groups first..end. Differences of codes and
    zero points are exact in bfloat16. A group's sum is scaled in float32."""
    acc = tl.zeros((BN, BM), tl.float32)
    for group in range(first, end):
        codes = tl.load(of_codes + group * (GROUP // 2))
        word = tl.load(of_words + group)
        zero = number(word & 15)[:, None]
        low, high = tl.load(of_x + group * GROUP), tl.load(of_x + group * GROUP + 16)
        total = tl.dot(number(codes & 15) - zero, low)
        total = tl.dot(number(codes >> 4) - zero, high, total)
        acc += total * scale_of(word)[:, None]
    return acc


@triton.jit
def _sum_parts(out, partial, counter, acc, token, row, M, N, SPLIT: tl.constexpr, ADD: tl.constexpr):
    """Store acc [tokens, rows] of the weight; with several parts of K the last program stores the sum of all."""
    inside = (token < M)[:, None] & (row < N)[None, :]
    place = token.to(tl.int64)[:, None] * N + row[None, :]
    if SPLIT == 1:
        finish(out + place, acc, inside, ADD)
    else:
        size = M.to(tl.int64) * N
        tl.store(partial + tl.program_id(1) * size + place, acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        ours = counter + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ours, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros(acc.shape, tl.float32)
            for part in tl.static_range(SPLIT):  # .cg: not from this SM's first-level cache
                acc += tl.load(partial + part * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            finish(out + place, acc, inside, ADD)
            tl.store(ours, 0)


@triton.jit
def project_int4(
    out, x, weight, words, partial, counter, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight^T, or out += with ADD; BM tokens and BN rows of the weight at a time.

    The groups are split over SPLIT programs, and the last one to finish sums their parts in a fixed order. partial:
    float32 [SPLIT, M, N]; counter: int32 [cdiv(N, BN) * cdiv(M, BM)], zero before and after.
    Grid (cdiv(N, BN), SPLIT, cdiv(M, BM)).
    """
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    byte = tl.arange(0, GROUP // 2)
    column = byte // 16 * 32 + byte % 16
    near = tl.minimum(row, N - 1).to(tl.int64)
    of_codes = weight + near[:, None] * (K // 2) + byte[None, :]
    of_words = words + near * (K // GROUP)
    of_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * K + column[:, None]
    first, end = own_part(K // GROUP, SPLIT)
    acc = tl.trans(sum_of_groups(of_codes, of_words, of_x, first, end, GROUP, BN, BM))
    _sum_parts(out, partial, counter, acc, token, row, M, N, SPLIT, ADD)


CODES = tl.constexpr("""{
.reg .b32 t, a;
prmt.b32 t, $4, 0, $6;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 a, a, $5; mov.b32 {$0, $2}, a;
shr.u32 t, t, 4;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 a, a, $5; mov.b32 {$1, $3}, a;
}""")
"""Two bytes of a word as four bf16: 128 + code, less 128 + zero point."""


@triton.jit
def int4_operand(words, zeros, HALF: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Half of a group of 128 columns as a left operand [ROWS, 64] of bf16, less the zero points.

    words int32 [ROWS, 16], of rows in the order of formats.operand_row; zeros int32 of the same shape. Place 16q + 8h +
    2c + l is of word 4c + q, byte 2 HALF + l, its low or high half (h): column 32c + 16h + 4q + 2 HALF + l. PAIRS: by
    assembly on pairs of bf16, for sm_90 and up.
    """
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            CODES, "=h,=h,=h,=h,r,r,n", [words, (zeros | 0x4300) * 0x10001, 0x4342 if HALF else 0x4140],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        two, zero = words >> (16 * HALF), number(zeros)
        a, b = number(two & 15) - zero, number(two >> 4 & 15) - zero
        c, d = number(two >> 8 & 15) - zero, number(two >> 12 & 15) - zero
    return packed_operand(a, b, c, d, WARPS)


@triton.jit
def project_int4_packed(
    out, x, weight, words, partial, counter, M, N, K,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, ADD: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """project_int4 for groups of 128 columns, weight int32 [N, K / 8]: codes go from memory to the place in the operand
    that their own thread holds. WARPS: the launch's. Grid (cdiv(N, ROWS), SPLIT, cdiv(M, BM))."""
    on = tl.program_id(0) * ROWS
    row = on + tl.arange(0, ROWS)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    place = tl.arange(0, 64)
    column = 32 * (place // 2 % 4) + 16 * (place // 8 % 2) + 4 * (place // 16) + place % 2
    # Pairs of columns stay together, which is as little as can be copied in the background.
    column = tl.max_contiguous(tl.multiple_of(column, [2]), [2])
    of_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * K + column[:, None]
    packed = tl.minimum(on + operand_row(tl.arange(0, ROWS), WARPS), N - 1).to(tl.int64)
    groups = K // 128
    of_codes = weight + packed[:, None] * (K // 8) + tl.arange(0, 16)[None, :]
    of_zeros = words + packed * groups
    of_scales = words + tl.minimum(row, N - 1).to(tl.int64) * groups
    first, end = own_part(groups, SPLIT)
    acc = tl.zeros((ROWS, BM), tl.float32)
    for group in range(first, end):
        codes = tl.load(of_codes + group * 16)
        zeros = (tl.load(of_zeros + group) & 15)[:, None] + tl.zeros_like(codes)
        total = tl.dot(int4_operand(codes, zeros, 0, PAIRS, WARPS), tl.load(of_x + group * 128))
        total = tl.dot(int4_operand(codes, zeros, 1, PAIRS, WARPS), tl.load(of_x + group * 128 + 2), total)
        acc += total * scale_of(tl.load(of_scales + group))[:, None]
    _sum_parts(out, partial, counter, tl.trans(acc), token, row, M, N, SPLIT, ADD)


def widening(before, low, high, orders=("0x4140", "0x4342")):
    """Assembly that makes two pairs of bf16 of the low nibbles of a word ($4), and two of the high ones. `low` and
    `high` make a pair, not yet scaled, of bytes in t, taken from the word in these orders, also of what `before` makes
    of $5. The factor ($6) and the one rounding come after."""
    scaled = """
shl.b32 x, a, 16; and.b32 y, a, 0xFFFF0000; mov.b32 p, x; mov.b32 q, y;
mul.f32 p, p, $6; mul.f32 q, q, $6; cvt.rn.bf16x2.f32 $%d, q, p;"""
    halves = "".join(
        f"prmt.b32 t, $4, 0, {order}; {low}{scaled % n}{high}{scaled % (n + 2)}"
        for n, order in enumerate(orders)
    )
    return tl.constexpr(f"{{.reg .b32 t, a, b, l, h, x, y; .reg .f32 p, q; {before}{halves}}}")


WIDE = widening(
    "",
    "lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 a, a, $5;",
    "shr.u32 t, t, 4; lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 a, a, $5;",
)


@triton.jit
def load_words(weight, N, K, BN: tl.constexpr, RUN: tl.constexpr):
    """The row of each of BN, at most N - 1, int64 [BN, 1]; and words of RUN columns of these rows, int32 [BN, RUN / 8].
    A program is for BN rows and RUN columns."""
    row = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), N - 1).to(tl.int64)[:, None]
    word = tl.program_id(1) * (RUN // 8) + tl.arange(0, RUN // 8)[None, :]
    return row, tl.load(weight + row * (K // 8) + word)


@triton.jit
def pair(low, high):
    """Two float32 numbers rounded to bf16, in a word."""
    first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def store_pairs(out, a, b, c, d, N, K, BN: tl.constexpr, RUN: tl.constexpr):
    """Store the pairs of each word [BN, RUN / 8] in bf16 out [N, K]: a, b of its low nibbles, c, d of the high ones."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    number = tl.program_id(1) * (RUN // 4) + tl.arange(0, RUN // 4)[None, :]
    place = out.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64)[:, None] * (K // 2)
    place += number // 8 * 16 + number % 8
    inside = (row < N)[:, None] & (number >= 0)
    tl.store(place, tl.join(a, b).reshape(BN, RUN // 4), mask=inside)
    tl.store(place + 8, tl.join(c, d).reshape(BN, RUN // 4), mask=inside)


@triton.jit
def dequantize_int4(
    out, weight, words, N, K, BN: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr
):
    """out [N, K] = the values, rounded; weight int32 [N, K / 8]. PAIRS: as in int4_operand. Grid (cdiv(N, BN),
    K / RUN)."""
    GROUPS: tl.constexpr = max(1, RUN // GROUP)
    row, codes = load_words(weight, N, K, BN, RUN)
    group = tl.program_id(1) * RUN // GROUP + tl.arange(0, GROUPS)[None, :]
    word = tl.load(words + row * (K // GROUP) + group)
    word = tl.broadcast_to(word[:, :, None], (BN, GROUPS, RUN // 8 // GROUPS)).reshape(BN, RUN // 8)
    scale, zero = scale_of(word), word & 15
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            WIDE, "=r,=r,=r,=r,r,r,f", [codes, (zero | 0x4300) * 0x10001, scale],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b = _wide_pair(codes, zero, scale), _wide_pair(codes >> 16, zero, scale)
        c, d = _wide_pair(codes >> 4, zero, scale), _wide_pair(codes >> 20, zero, scale)
    store_pairs(out, a, b, c, d, N, K, BN, RUN)


@triton.jit
def _wide_pair(codes, zero, scale):
    """The values of a nibble, and of the one in the next byte."""
    low, high = (codes & 15) - zero, (codes >> 8 & 15) - zero
    return pair(low.to(tl.float32) * scale, high.to(tl.float32) * scale)
