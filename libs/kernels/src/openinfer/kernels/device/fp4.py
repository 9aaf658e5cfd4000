"""Matrix products with FP4 weights (formats.fp4): codes in the order of INT4's, and for each 32 columns a word with the
scales of both halves.

A code's bits are put where bfloat16 has them, which is the value times 2^-126. Scales are kept times 2^110 and factors
of rows times 2^16, so a product with the scale and one of the sum put that right. All of it is exact but the last.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import columns_of_x, pairs_of, store_rows, tile_of
from openinfer.kernels.device.formats import _number, operand_row, own_part, packed_operand, word_column
from openinfer.kernels.device.int4 import _sum_parts, load_words, pair, store_pairs, widening
from openinfer.kernels.device.norm import gated

CODES = tl.constexpr("""{
.reg .b32 t, a, l, h;
prmt.b32 l, $5, 0, 0x1010; prmt.b32 h, $5, 0, 0x3232; prmt.b32 t, $4, 0, $6;
and.b32 a, t, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; mul.bf16x2 a, a, l; mov.b32 {$0, $2}, a;
and.b32 a, t, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; mul.bf16x2 a, a, h; mov.b32 {$1, $3}, a;
}""")
"""Two bytes of a word as four bf16: sign to bit 15, the others to bits 8 to 6; times the scales of their halves."""


@triton.jit
def _value(nibble, scale):
    return _number((nibble & 7) << 6 | (nibble & 8) << 12, scale)


@triton.jit
def _halves(scales):
    """The scales of low and high halves, in float32."""
    return (scales << 16).to(tl.float32, bitcast=True), (scales & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _operand(words, scales, HALF: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Half of 128 columns as a left operand [ROWS, 64], in the order of int4.int4_operand. words, scales: int32
    [ROWS, 16]. PAIRS: by assembly on pairs of bf16, for sm_90 and up."""
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            CODES, "=h,=h,=h,=h,r,r,n", [words, scales, 0x4342 if HALF else 0x4140],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = _halves(scales)
        two = words >> (16 * HALF)
        a, b = _value(two, low), _value(two >> 4, high)
        c, d = _value(two >> 8, low), _value(two >> 12, high)
    return packed_operand(a, b, c, d, WARPS)


@triton.jit
def _add_block(
    acc, of_codes, of_scales, low, high, ROWS: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr
):
    """acc float32 [ROWS, BM] + rows of the weight times columns of x, of 128 columns: low and high have those of both
    halves of the operand. of_codes [ROWS, 16]; of_scales [ROWS, 4]: four times as many would be copied otherwise."""
    words, scales = tl.load(of_codes), tl.load(of_scales)
    scales = tl.broadcast_to(scales[:, :, None], (ROWS, 4, 4)).reshape(ROWS, 16)
    acc = tl.dot(_operand(words, scales, 0, PAIRS, WARPS), low, acc)
    return tl.dot(_operand(words, scales, 1, PAIRS, WARPS), high, acc)


@triton.jit
def project_fp4(
    out, x, weight, scales, factors, partial, counter, M, N, K,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, ADD: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight^T, or out += with ADD; BM tokens and ROWS rows of the weight at a time.

    weight int32 [N, K / 8]; scales int32 [N, K / 32 + 1], whose last are the factors: float32. K is a multiple of 128.
    partial, counter: as for int4.project_int4. Grid (cdiv(N, ROWS), SPLIT, cdiv(M, BM)).
    """
    on = tl.program_id(0) * ROWS
    row = on + tl.arange(0, ROWS)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    # Pairs of columns stay together, which is as little as can be copied in the background.
    column = tl.max_contiguous(tl.multiple_of(word_column(tl.arange(0, 64), 4), [2]), [2])
    of_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * K + column[:, None]
    packed = tl.minimum(on + operand_row(tl.arange(0, ROWS), WARPS), N - 1).to(tl.int64)
    of_codes = weight + packed[:, None] * (K // 8) + tl.arange(0, 16)[None, :]
    of_scales = scales + packed[:, None] * (K // 32 + 4) + tl.arange(0, 4)[None, :]
    first, end = own_part(K // 128, SPLIT)
    acc = tl.zeros((ROWS, BM), tl.float32)
    for k in range(first, end):
        low, high = tl.load(of_x + k * 128), tl.load(of_x + k * 128 + 2)
        acc = _add_block(acc, of_codes + k * 16, of_scales + k * 4, low, high, ROWS, PAIRS, WARPS)
    acc *= tl.load(factors + tl.minimum(row, N - 1).to(tl.int64) * (K // 32 + 4))[:, None]
    _sum_parts(out, partial, counter, tl.trans(acc), token, row, M, N, SPLIT, ADD)


@triton.jit
def experts_product_fp4(
    out, x, weight, scales, factors, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, ARRANGED: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """experts.experts_product with the tensors of project_fp4, [EXPERTS, N or 2 N if FIRST, ..]. K is a multiple of
    128. ARRANGED: as in experts_product_float8. Grid (cdiv(N, BN), tiles)."""
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW, IDS)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    on = tl.program_id(0) * BN
    rn, rm = on + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside, source, target = pairs_of(order, expert, rm, end, CHOSEN, FIRST, IDS)
    base = expert.to(tl.int64) * rows * N
    row = base + tl.minimum(rn, N - 1)
    packed = base + tl.minimum(on + operand_row(tl.arange(0, BN), WARPS), N - 1)
    of_codes = weight + packed[:, None] * (K // 8) + tl.arange(0, 16)[None, :]
    stride = K // 32 + 4
    of_scales = scales + packed[:, None] * stride + tl.arange(0, 4)[None, :]
    half = N.to(tl.int64)
    of_x = x + source.to(tl.int64)[None, :] * K + columns_of_x(4, ARRANGED)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for k in range(K // 128):
        low, high = tl.load(of_x + k * 128), tl.load(of_x + k * 128 + (64 if ARRANGED else 2))
        acc = _add_block(acc, of_codes + k * 16, of_scales + k * 4, low, high, BN, PAIRS, WARPS)
        if FIRST:
            of_up, scales_up = of_codes + half * (K // 8) + k * 16, of_scales + half * stride + k * 4
            up = _add_block(up, of_up, scales_up, low, high, BN, PAIRS, WARPS)
    acc = tl.trans(acc * tl.load(factors + row * stride)[:, None])
    if FIRST:
        up = tl.trans(up * tl.load(factors + (row + half) * stride)[:, None])
        acc = gated(acc, up, out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N, 4 if FIRST and ARRANGED else 0)


_CODES = "mul.lo.u32 a, a, %s; and.b32 a, a, 0x81C081C0; mul.bf16x2 a, a, %s;"
WIDE = widening(
    "prmt.b32 l, $5, 0, 0x1010; prmt.b32 h, $5, 0, 0x3232;",
    "and.b32 a, t, 0x000F000F; " + _CODES % ("0x1040", "l"),
    "and.b32 a, t, 0x00F000F0; " + _CODES % ("0x0104", "h"),
)


@triton.jit
def _wide(nibble, scale, factor):
    """The value of a code in float32. The product with its scale is exact."""
    value = ((nibble & 7) << 22 | (nibble & 8) << 28).to(tl.float32, bitcast=True)
    return value * scale * factor


@triton.jit
def _wide_pair(codes, scale, factor):
    return pair(_wide(codes, scale, factor), _wide(codes >> 8, scale, factor))


@triton.jit
def dequantize_fp4(
    out, weight, scales, factors, N, K, BN: tl.constexpr, RUN: tl.constexpr, PAIRS: tl.constexpr
):
    """out [N, K] = the values, rounded; weight int32 [N, K / 8]. Grid (cdiv(N, BN), K / RUN)."""
    BLOCKS: tl.constexpr = RUN // 32
    row, codes = load_words(weight, N, K, BN, RUN)
    row *= K // 32 + 4
    word = tl.load(scales + row + tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :])
    word = tl.broadcast_to(word[:, :, None], (BN, BLOCKS, 4)).reshape(BN, RUN // 8)
    factor = tl.load(factors + row) + tl.zeros(codes.shape, tl.float32)
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            WIDE, "=r,=r,=r,=r,r,r,f", [codes, word, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = _halves(word)
        a, b = _wide_pair(codes, low, factor), _wide_pair(codes >> 16, low, factor)
        c, d = _wide_pair(codes >> 4, high, factor), _wide_pair(codes >> 20, high, factor)
    store_pairs(out, a, b, c, d, N, K, BN, RUN)
