"""Matrix products with FP4 weights (formats.fp4).

A code's bits are put where bfloat16 has them, which is the value times 2^-126, and a scale's so that it is times 2^126.
All of it is exact but the product of a sum with the row's factor.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import columns_of_x, pairs_of, store_rows, tile_of
from openinfer.kernels.device.formats import _number, operand_row, own_part, packed_operand, word_column
from openinfer.kernels.device.int4 import _sum_parts, load_words, pair, store_pairs, widening
from openinfer.kernels.device.norm import gated, wait_ahead

_SCALES = """and.b32 l, $5, 0xFF; mad.lo.u32 l, l, 0x00100010, 0x6F806F80;
shr.u32 h, $5, 8; and.b32 h, h, 0xFF; mad.lo.u32 h, h, 0x00100010, 0x6F806F80;"""
_NEAR = "and.b32 a, t, 0x83C7; mul.lo.u32 a, a, 0x10040; and.b32 a, a, 0x81C081C0;"
_FAR = """shr.u32 a, t, 10; and.b32 a, a, 0x1B; shl.b32 b, t, 3; mad.lo.u32 a, a, 0x10840000, b;
and.b32 a, a, 0x81C081C0;"""
"""Of four numbers in t, which is half a word, the first and the third, and the others."""
CODES = tl.constexpr(f"""{{
.reg .b32 t, a, b, l, h;
{_SCALES} prmt.b32 t, $4, 0, $6;
{_NEAR} mul.bf16x2 a, a, l; mov.b32 {{$0, $2}}, a;
{_FAR} mul.bf16x2 a, a, h; mov.b32 {{$1, $3}}, a;
}}""")
"""Half of a word as four bf16, times the scales of their 16 columns."""


@triton.jit
def _row_words(K):
    """Words of a row's scales and factor."""
    return tl.cdiv(K, 256) * 4 + 4


@triton.jit
def _placed(words, NIBBLE: tl.constexpr):
    """One of four numbers in the low half of a word, its bits where bfloat16 has them."""
    if NIBBLE == 3:
        return (words >> 10 & 27) * 0x1084 & 0x81C0
    return words << (6 - 3 * NIBBLE) & 0x81C0


@triton.jit
def _halves(scales):
    """Two scales, in float32."""
    near, far = ((scales & 255) << 4) + 0x6F80, ((scales >> 8 & 255) << 4) + 0x6F80
    return (near << 16).to(tl.float32, bitcast=True), (far << 16).to(tl.float32, bitcast=True)


@triton.jit
def _operand(words, scales, HALF: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Half of 128 columns as a left operand [ROWS, 64], in the order of int4.int4_operand. words, scales: int32
    [ROWS, 16]. PAIRS: by assembly on pairs of bf16, for sm_90 and up."""
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            CODES, "=h,=h,=h,=h,r,r,n", [words, scales, 0x4432 if HALF else 0x4410],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = _halves(scales)
        four = words >> (16 * HALF)
        a, b = _number(_placed(four, 0), low), _number(_placed(four, 1), high)
        c, d = _number(_placed(four, 2), low), _number(_placed(four, 3), high)
    return packed_operand(a, b, c, d, WARPS)


@triton.jit
def _add_block(
    acc, of_codes, of_scales, low, high, ROWS: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr
):
    """acc float32 [ROWS, BM] + rows of the weight times columns of x, of 128 columns: low and high have those of both
    halves of the operand. of_codes [ROWS, 16]; of_scales [ROWS, 2]: more would be copied otherwise."""
    words, scales = tl.load(of_codes), tl.load(of_scales)
    scales = tl.broadcast_to(scales[:, :, None], (ROWS, 2, 8)).reshape(ROWS, 16)
    scales = scales >> (tl.arange(0, 16) // 4 % 2 * 16)[None, :]
    acc = tl.dot(_operand(words, scales, 0, PAIRS, WARPS), low, acc)
    return tl.dot(_operand(words, scales, 1, PAIRS, WARPS), high, acc)


@triton.jit
def project_fp4(
    out, x, weight, scales, factors, partial, counter, M, N, K,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, ADD: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight^T, or out += with ADD; BM tokens and ROWS rows of the weight at a time.

    weight int32 [N, K / 8]; scales int32 [N, _row_words(K)]; factors float32, in these rows. K is a multiple of 128.
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
    of_scales = scales + packed[:, None] * _row_words(K) + tl.arange(0, 2)[None, :]
    first, end = own_part(K // 128, SPLIT)
    acc = tl.zeros((ROWS, BM), tl.float32)
    for k in range(first, end):
        low, high = tl.load(of_x + k * 128), tl.load(of_x + k * 128 + 2)
        acc = _add_block(acc, of_codes + k * 16, of_scales + k * 2, low, high, ROWS, PAIRS, WARPS)
    acc *= tl.load(factors + tl.minimum(row, N - 1).to(tl.int64) * _row_words(K))[:, None]
    _sum_parts(out, partial, counter, tl.trans(acc), token, row, M, N, SPLIT, ADD)


@triton.jit
def experts_product_fp4(
    out, x, weight, scales, factors, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, ARRANGED: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr,
    IDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """experts.experts_product with the tensors of project_fp4, [EXPERTS, N or 2 N if FIRST, ..]. K is a multiple of
    128. ARRANGED: as in experts_product_float8. Grid (cdiv(N, BN), tiles)."""
    wait_ahead(EARLY)
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
    stride = _row_words(K)
    of_scales = scales + packed[:, None] * stride + tl.arange(0, 2)[None, :]
    half = N.to(tl.int64)
    of_x = x + source.to(tl.int64)[None, :] * K + columns_of_x(4, ARRANGED)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for k in range(K // 128):
        low, high = tl.load(of_x + k * 128), tl.load(of_x + k * 128 + (64 if ARRANGED else 2))
        acc = _add_block(acc, of_codes + k * 16, of_scales + k * 2, low, high, BN, PAIRS, WARPS)
        if FIRST:
            of_up, scales_up = of_codes + half * (K // 8) + k * 16, of_scales + half * stride + k * 2
            up = _add_block(up, of_up, scales_up, low, high, BN, PAIRS, WARPS)
    acc = tl.trans(acc * tl.load(factors + row * stride)[:, None])
    if FIRST:
        up = tl.trans(up * tl.load(factors + (row + half) * stride)[:, None])
        acc = gated(acc, up, out.dtype.element_ty)
    store_rows(out, acc, target, rn, inside, N, 4 if FIRST and ARRANGED else 0)


WIDE = widening(_SCALES, _NEAR + "mul.bf16x2 a, a, l;", _FAR + "mul.bf16x2 a, a, h;", ("0x4410", "0x4432"))


@triton.jit
def _wide_pair(words, scale, factor, NIBBLE: tl.constexpr):
    """Two values in float32. The product with their scale is exact."""
    low = (_placed(words, NIBBLE) << 16).to(tl.float32, bitcast=True)
    high = (_placed(words, NIBBLE + 2) << 16).to(tl.float32, bitcast=True)
    return pair(low * scale * factor, high * scale * factor)


@triton.jit
def dequantize_fp4(
    out, weight, scales, factors, N, K, BN: tl.constexpr, RUN: tl.constexpr, PAIRS: tl.constexpr
):
    """out [N, K] = the values, rounded; weight int32 [N, K / 8]. Grid (cdiv(N, BN), K / RUN)."""
    row, codes = load_words(weight, N, K, BN, RUN)
    row *= _row_words(K)
    run = (tl.program_id(1) * (RUN // 8) + tl.arange(0, RUN // 8)[None, :]) // 4
    word = tl.load(scales + row + run // 2) >> (run % 2 * 16)
    factor = tl.load(factors + row) + tl.zeros(codes.shape, tl.float32)
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            WIDE, "=r,=r,=r,=r,r,r,f", [codes, word, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = _halves(word)
        a, b = _wide_pair(codes, low, factor, 0), _wide_pair(codes >> 16, low, factor, 0)
        c, d = _wide_pair(codes, high, factor, 1), _wide_pair(codes >> 16, high, factor, 1)
    store_pairs(out, a, b, c, d, N, K, BN, RUN)
