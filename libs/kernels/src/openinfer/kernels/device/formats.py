"""Number formats in kernels: E8M0 scales, q8, and packed weights as the left operand of a bf16 product.

A packed weight is moved into bf16 bit by bit: its exponent and mantissa are put where bf16 has them. That is the value
times a power of two, also for the smallest values, which are subnormal there. One multiplication by another power of
two puts that right and includes the block's scale. All of it is exact.

A word of 32 bits has several columns of a row. The words of a row are taken 16 at a time: 128 columns of FP4 or 64 of
float8. Every number goes to a place in the tensor cores' operand that its own thread holds, so no weight moves between
threads. The columns of the other operand must be in the same order, `packed_column`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

NIBBLES = tl.constexpr("""{
.reg .b32 a, b;
shr.u32 b, $4, $6;
and.b32 a, b, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; mul.bf16x2 a, a, $5; mov.b32 {$0, $2}, a;
and.b32 a, b, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; mul.bf16x2 a, a, $5; mov.b32 {$1, $3}, a;
}""")
"""Two nibbles 16 bits apart at a time: sign to bit 15, the others to bits 8 to 6, by one multiplication."""

BYTES = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $4, 0, 0x1404; shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0; and.b32 a, a, 0x80008000; or.b32 a, a, b;
mul.bf16x2 a, a, $5; mov.b32 {$0, $1}, a;
prmt.b32 a, $4, 0, 0x3424; shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0; and.b32 a, a, 0x80008000; or.b32 a, a, b;
mul.bf16x2 a, a, $5; mov.b32 {$2, $3}, a;
}""")
"""Two bytes at a time: sign to bit 15, the others to bits 10 to 4."""


@triton.jit
def own_part(count, SPLIT: tl.constexpr):
    """The steps of `count` that this program has of those along axis 1, among SPLIT: range(first, end)."""
    steps = tl.cdiv(count, SPLIT)
    first = tl.program_id(1) * steps
    return first, tl.minimum(first + steps, count)


@triton.jit
def e8m0(byte):
    """2^(byte - 127) in float32."""
    exponent = byte.to(tl.int32)
    return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def q8_exponent(largest):
    """The E8M0 byte, as int32, of the scale 2^ceil(log2(largest / 448)); 448 = 1.75 * 2^8."""
    largest = tl.maximum(largest, 1e-4)
    return ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8


@triton.jit
def e4m3(value, exponent):
    """Float32 values as e4m3 codes; `exponent`: of q8_exponent."""
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (value * shrink).to(tl.float8e4nv)


@triton.jit
def q8_codes(value):
    """Float32 [..., 128] as e4m3 codes, a row with one scale [..., 1] of q8_exponent."""
    exponent = q8_exponent(tl.max(tl.abs(value), len(value.shape) - 1, keep_dims=True))
    return e4m3(value, exponent), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_codes(codes, scales, value, row, block, width):
    """Write float32 value [B, 128], some blocks of a row, through q8 as codes [T, width] and E8M0 bytes [T, cdiv(width,
    128)]. block [B]; columns from `width` on are zero."""
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    exponent = q8_exponent(tl.max(tl.abs(value), 1, keep_dims=True))
    tl.store(codes + row * width + column, e4m3(value, exponent), mask=column < width)
    of_scales = scales + row * tl.cdiv(width, 128) + block[:, None]
    tl.store(of_scales, exponent.to(tl.uint8), mask=block[:, None] * 128 < width)


@triton.jit
def q8(value):
    """Float32 [..., 128] rounded by q8_codes."""
    codes, scale = q8_codes(value)
    return codes.to(tl.float32) * scale


CODES = tl.constexpr("""{
.reg .b32 a;
prmt.b32 a, $1, $5, $9; lop3.b32 $0, a, $13, 0x80808080, 0xF8;
}""")
"""Four bytes, chosen from the eight of two words by four numbers of three bits, with the signs of four more."""


@triton.jit
def code_order(value):
    """value [B, 128] with its columns in the order of fp4_codes: place 32j + 16h + 4c + i is column 32c + 8j + 4h + i,
    nibble 4h + i of word 4c + j."""
    count: tl.constexpr = value.shape[0]
    value = tl.permute(tl.reshape(value, [count, 4, 4, 2, 4]), [0, 2, 3, 1, 4])
    return tl.reshape(value, [count, 128])


@triton.jit
def _chosen(low, high, select, sign, PAIRS: tl.constexpr):
    """Float8 [R, 16, 4] from int32 [R, 16] each: as CODES."""
    shape: tl.constexpr = (low.shape[0], 16, 4)
    low, high = tl.broadcast_to(low[:, :, None], shape), tl.broadcast_to(high[:, :, None], shape)
    select, sign = tl.broadcast_to(select[:, :, None], shape), tl.broadcast_to(sign[:, :, None], shape)
    byte = tl.broadcast_to(tl.arange(0, 4)[None, None, :], shape)
    if PAIRS:  # `byte` is not read: it keeps the compiler from doing this before the broadcast
        return tl.inline_asm_elementwise(
            CODES, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [low, high, select, sign, byte],
            dtype=tl.float8e5, is_pure=True, pack=4,
        )  # fmt: skip
    place = (select >> (4 * byte)) & 7
    code = (tl.where(place < 4, low, high) >> (8 * (place & 3))) & 127
    return (code | ((sign >> (8 * byte)) & 128)).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def _bytes(a, b, ORDER: tl.constexpr, PAIRS: tl.constexpr):
    """The bytes a0 b0 a1 b1 (ORDER 0x5140) or a2 b2 a3 b3 (0x7362) of int32 words."""
    if PAIRS:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, ORDER], dtype=tl.int32, is_pure=True, pack=1
        )
    if ORDER == 0x7362:
        a, b = a >> 16, b >> 16
    return (a & 255) | ((b & 255) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)


@triton.jit
def fp4_codes(words, exponents, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """128 columns of FP4 as a left operand [ROWS, 128] of e5m2, in the order of code_order; times 2^12 (FP4_SHIFT).

    words int32 [ROWS, 16], of rows in the order of operand_row; exponents uint8 [ROWS, 4]: E8M0 bytes up to 128; a
    block whose byte is below 102 counts as zero. A number without its sign is one of eight bytes, which are those of
    scale 2^-12 with the exponent added: no byte overflows, and all are normal numbers.
    """
    ROWS: tl.constexpr = words.shape[0]
    scale = exponents.to(tl.int32)
    used = scale >= 102
    low = tl.where(used, scale * 0x04040400 + 0x706E6C00, 0)  # 0, 0.5, 1, 1.5
    high = tl.where(used, scale * 0x04040404 + 0x78767474, 0)  # 2, 3, 4, 6
    low = tl.reshape(tl.broadcast_to(low[:, :, None], (ROWS, 4, 4)), (ROWS, 16))
    high = tl.reshape(tl.broadcast_to(high[:, :, None], (ROWS, 4, 4)), (ROWS, 16))
    select, left = words & 0x77777777, words << 4
    x = tl.join(
        _chosen(low, high, select, _bytes(left, words, 0x5140, PAIRS), PAIRS),
        _chosen(low, high, select >> 16, _bytes(left, words, 0x7362, PAIRS), PAIRS),
    )  # [row, word, i, h]
    x = tl.reshape(x, [ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 4, 2])
    return tl.reshape(tl.permute(x, [0, 2, 1, 3, 5, 7, 4, 6]), [ROWS, 128])


@triton.jit
def packed_column(place, FP4: tl.constexpr):
    """The column that is the place-th of a packed left operand, of 128 columns (FP4) or 64 (float8).

    FP4: place 64m + 16q + 8h + 2c + l is nibble 4l + 2m + h of word 4c + q. float8: place 16q + 8h + 2c + l is byte
    2h + l of word 4c + q.
    """
    m, q, h, c, l = place // 64, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    if FP4:
        return 32 * c + 8 * q + 4 * l + 2 * m + h
    return 64 * m + 16 * c + 4 * q + 2 * h + l


@triton.jit
def packed_order(value, FP4: tl.constexpr):
    """value [B, 128] with its columns in the order of packed_column."""
    count: tl.constexpr = value.shape[0]
    if FP4:
        value = tl.permute(tl.reshape(value, [count, 4, 4, 2, 2, 2]), [0, 4, 2, 5, 1, 3])
    else:
        value = tl.permute(tl.reshape(value, [count, 2, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return tl.reshape(value, [count, 128])


@triton.jit
def word_column(place, BITS: tl.constexpr):
    """The column that is the place-th of 128 in two packed left operands: of float8 as packed_column says, or of 4 bits
    in the order of formats.int4, where place 64m + 16q + 8h + 2c + l is byte 2m + l of word 4c + q, its low or high
    half (h). 16: of float8 that becomes bf16 in device/experts_many.cu, as it says."""
    m, q, h, c, l = place // 64, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    if BITS == 8:
        return packed_column(place, False)
    if BITS == 16:
        return 64 * m + 16 * c + 4 * q + 2 * l + h
    return 32 * c + 16 * h + 4 * q + 2 * m + l


@triton.jit
def word_place(column, BITS: tl.constexpr):
    """The place of a column among those of its 128, in the order of word_column."""
    if BITS == 8:
        m, c, q, h = column // 64 % 2, column // 16 % 4, column // 4 % 4, column // 2 % 2
    else:
        c, h, q, m = column // 32 % 4, column // 16 % 2, column // 4 % 4, column // 2 % 2
    return 64 * m + 16 * q + 8 * h + 2 * c + column % 2


@triton.jit
def packed_operand(a, b, c, d, WARPS: tl.constexpr):
    """The four numbers of each word, [l = 0, h = 0], [0, 1], [1, 0], [1, 1], as a left operand."""
    rows: tl.constexpr = a.shape[0]
    x = tl.join(tl.join(a, c), tl.join(b, d))  # [row, word, l, h]
    x = tl.reshape(x, [rows // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
    return tl.reshape(tl.permute(x, [0, 2, 1, 3, 5, 7, 4, 6]), [rows, 64])


@triton.jit
def _number(bits, scale):
    """The bf16 number with these bits, times `scale`."""
    return (bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32) * scale).to(tl.bfloat16)


@triton.jit
def _fp4(words, scale, nibble: tl.constexpr):
    code = words >> (4 * nibble)
    return _number((code & 7) << 6 | (code & 8) << 12, scale)


@triton.jit
def _float8(words, scale, byte: tl.constexpr):
    code = words >> (8 * byte)
    return _number((code & 127) << 4 | (code & 128) << 8, scale)


@triton.jit
def fp4_operand(words, exponents, HALF: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Half of 128 columns of FP4 as a left operand [ROWS, 64]: places HALF * 64 and up of packed_column.

    words int32 [ROWS, 16], of rows in the order of operand_row; exponents int32 of the same shape: E8M0 bytes up to
    128. PAIRS: by assembly on pairs of bf16, for sm_90 and up.
    """
    if PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            NIBBLES, "=h,=h,=h,=h,r,r,n", [words, (exponents + 126) * 0x800080, HALF * 8],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        scale = ((exponents + 126) << 23).to(tl.float32, bitcast=True)
        a, b = _fp4(words, scale, 2 * HALF), _fp4(words, scale, 2 * HALF + 1)
        c, d = _fp4(words, scale, 2 * HALF + 4), _fp4(words, scale, 2 * HALF + 5)
    return packed_operand(a, b, c, d, WARPS)


@triton.jit
def float8_operand(words, exponents, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """64 columns of float8 as a left operand [ROWS, 64], in the order of packed_column; otherwise as fp4_operand, with
    E8M0 bytes up to 134."""
    if PAIRS:
        a, c, b, d = tl.inline_asm_elementwise(
            BYTES, "=h,=h,=h,=h,r,r", [words, (exponents + 120) * 0x800080],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        scale = ((exponents + 120) << 23).to(tl.float32, bitcast=True)
        a, c = _float8(words, scale, 0), _float8(words, scale, 1)
        b, d = _float8(words, scale, 2), _float8(words, scale, 3)
    return packed_operand(a, b, c, d, WARPS)


@triton.jit
def operand_row(place, WARPS: tl.constexpr):
    """The row of a tile that lies place-th among the words: a warp's lanes load rows 8w .. 8w + 7 of each 8 * WARPS,
    and hold rows 16w .. 16w + 15 of the operand."""
    within = place % (8 * WARPS)
    return place // (16 * WARPS) * (16 * WARPS) + within // 8 * 16 + place // (8 * WARPS) % 2 * 8 + within % 8
