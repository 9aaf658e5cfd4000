"""Matrix products with FP4 weights (formats.fp4): codes in the order of INT4's, and for each 32 columns a word with the
scales of both halves.

A code's bits are put where bfloat16 has them, which is the value times 2^-126. Scales are kept times 2^110 and factors
of rows times 2^16, so a product with the scale and one of the sum put that right. All of it is exact but the last.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.experts import pairs_of, store_rows, tile_of
from openinfer.kernels.device.formats import _number, operand_row, packed_operand
from openinfer.kernels.device.int4 import _sum_parts
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
def _sum_of_blocks(
    of_codes, of_scales, of_x, first, end, ROWS: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, BM]: rows of the weight times columns of x, over 128 columns at a time, first..end of them."""
    acc = tl.zeros((ROWS, BM), tl.float32)
    for k in range(first, end):
        words, scales = tl.load(of_codes + k * 16), tl.load(of_scales + k * 4)
        acc = tl.dot(_operand(words, scales, 0, PAIRS, WARPS), tl.load(of_x + k * 128), acc)
        acc = tl.dot(_operand(words, scales, 1, PAIRS, WARPS), tl.load(of_x + k * 128 + 2), acc)
    return acc


@triton.jit
def _column(place):
    """The column that is the place-th of a left operand's first half."""
    return 32 * (place // 2 % 4) + 16 * (place // 8 % 2) + 4 * (place // 16) + place % 2


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
    column = tl.max_contiguous(tl.multiple_of(_column(tl.arange(0, 64)), [2]), [2])
    of_x = x + tl.minimum(token, M - 1).to(tl.int64)[None, :] * K + column[:, None]
    packed = tl.minimum(on + operand_row(tl.arange(0, ROWS), WARPS), N - 1).to(tl.int64)
    of_codes = weight + packed[:, None] * (K // 8) + tl.arange(0, 16)[None, :]
    of_scales = scales + packed[:, None] * (K // 32 + 4) + tl.arange(0, 16)[None, :] // 4
    count = K // 128
    steps = tl.cdiv(count, SPLIT)
    first = tl.program_id(1) * steps
    end = tl.minimum(first + steps, count)
    acc = _sum_of_blocks(of_codes, of_scales, of_x, first, end, ROWS, BM, PAIRS, WARPS)
    acc *= tl.load(factors + tl.minimum(row, N - 1).to(tl.int64) * (K // 32 + 4))[:, None]
    _sum_parts(out, partial, counter, tl.trans(acc), token, row, M, N, SPLIT, ADD)


@triton.jit
def experts_product_fp4(
    out, x, weight, scales, factors, order, starts, N, K,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """experts.experts_product with the tensors of project_fp4, [EXPERTS, N or 2 N if FIRST, ..]. K is a multiple of
    128. Grid (cdiv(N, BN), tiles)."""
    expert, begin, end = tile_of(tl.program_id(1), starts, EXPERTS, E_BLOCK, BM, FEW)
    if begin >= end:
        return
    rows: tl.constexpr = 2 if FIRST else 1
    on = tl.program_id(0) * BN
    rn, rm = on + tl.arange(0, BN), begin + tl.arange(0, BM)
    inside, pair, source = pairs_of(order, rm, end, CHOSEN, FIRST)
    base = expert.to(tl.int64) * rows * N
    row = base + tl.minimum(rn, N - 1)
    packed = base + tl.minimum(on + operand_row(tl.arange(0, BN), WARPS), N - 1)
    of_codes = weight + packed[:, None] * (K // 8) + tl.arange(0, 16)[None, :]
    stride = K // 32 + 4
    of_scales = scales + packed[:, None] * stride + tl.arange(0, 16)[None, :] // 4
    of_x = x + source.to(tl.int64)[None, :] * K + _column(tl.arange(0, 64))[:, None]
    acc = _sum_of_blocks(of_codes, of_scales, of_x, 0, K // 128, BN, BM, PAIRS, WARPS)
    acc = tl.trans(acc * tl.load(factors + row * stride)[:, None])
    target = pair
    if FIRST:
        half = N.to(tl.int64)
        of_codes += half * (K // 8)
        of_scales += half * stride
        up = _sum_of_blocks(of_codes, of_scales, of_x, 0, K // 128, BN, BM, PAIRS, WARPS)
        acc = gated(
            acc, tl.trans(up * tl.load(factors + (row + half) * stride)[:, None]), out.dtype.element_ty
        )
        target = rm
    store_rows(out, acc, target, rn, inside, N)


@triton.jit
def _wide(nibble, scale, factor):
    """The value of a code in float32. The product with its scale is exact."""
    value = ((nibble & 7) << 22 | (nibble & 8) << 28).to(tl.float32, bitcast=True)
    return value * scale * factor


@triton.jit
def dequantize_fp4(out, weight, scales, factors, N, K, BN: tl.constexpr, RUN: tl.constexpr):
    """out [N, K] = the values, rounded; weight uint8 [N, K / 2]. Grid (cdiv(N, BN), K / RUN)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)[:, None, None]
    block = (
        tl.program_id(1) * (RUN // 32) + tl.arange(0, RUN // 32)[None, :, None]
    )  # of 32 columns: 16 bytes, a word
    byte = tl.arange(0, 16)[None, None, :]
    near = tl.minimum(row, N - 1).to(tl.int64)
    codes = tl.load(weight + near * (K // 2) + block * 16 + byte).to(tl.int32)
    of_row = near * (K // 32 + 4)
    low, high = _halves(tl.load(scales + of_row + block))
    factor = tl.load(factors + of_row)
    place = out + near * K + block * 32 + byte
    inside = (row < N) & (byte >= 0)
    tl.store(place, _wide(codes, low, factor).to(out.dtype.element_ty), mask=inside)
    tl.store(place + 16, _wide(codes >> 4, high, factor).to(out.dtype.element_ty), mask=inside)
