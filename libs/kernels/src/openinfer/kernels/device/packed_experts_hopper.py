"""coded_product of packed_experts.py for FP4, in Gluon.

The next block of columns is unpacked while the tensor cores multiply one. Triton does not arrange that where each
product is scaled for itself. A block of 128 columns is 16 words a row, four scales a row, and BM rows of x with a
scale each; STAGES blocks are in flight in shared memory.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from openinfer.kernels.device.gluon_names import load_elements

SHIFT = gl.constexpr(2.0**-12)
"""FP4_SHIFT of packed_experts.py."""


@gluon.jit
def _bytes(a, b, ORDER: gl.constexpr):
    """The bytes a0 b0 a1 b1 (ORDER 0x5140) or a2 b2 a3 b3 (0x7362) of int32 words."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, ORDER], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _chosen(low, high, select):
    """Four bytes of the eight of two words, by four numbers of three bits."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, select], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _codes(words, exponents):
    """The codes of fp4_codes, four to a word: int32 [R, 16] of nibbles 0 to 3 of each word and of 4 to 7, without
    signs, and words with the signs."""
    used = exponents >= 102
    low = gl.where(used, exponents * 0x04040400 + 0x706E6C00, 0)
    high = gl.where(used, exponents * 0x04040404 + 0x78767474, 0)
    select, left = words & 0x77777777, words << 4
    first, second = _chosen(low, high, select), _chosen(low, high, select >> 16)
    return first, _bytes(left, words, 0x5140), second, _bytes(left, words, 0x7362)


@gluon.jit
def _numbers(word, sign):
    """[R, W] words with these signs as float8 [R, W, 4], where they are."""
    SHAPE: gl.constexpr = [word.shape[0], word.shape[1], 4]
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $5, 0x80808080, 0xF8;", "=r,r,r,r,r,r,r,r,r",
        [gl.expand_dims(word, 2).broadcast_to(SHAPE), gl.expand_dims(sign, 2).broadcast_to(SHAPE)],
        dtype=gl.float8e5, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _operand(first, first_sign, second, second_sign, OPERAND: gl.constexpr):
    """The registers of `_codes` as a left operand [R, 128], in the order of code_order."""
    ROWS: gl.constexpr = first.shape[0]
    x = gl.join(_numbers(first, first_sign), _numbers(second, second_sign))
    x = gl.permute(gl.reshape(x, [ROWS, 4, 4, 4, 2]), [0, 2, 4, 1, 3])  # from row, c, j, i, h
    return gl.convert_layout(gl.reshape(x, [ROWS, 128]), OPERAND, assert_trivial=True)


@gluon.jit
def _tile(tile, starts, EXPERTS: gl.constexpr, E_BLOCK: gl.constexpr, BM: gl.constexpr):
    """tile_of (kernels.device.experts), not FEW."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    expert = gl.arange(0, E_BLOCK, LANES)
    start = gl.load(starts + expert, mask=expert < EXPERTS, other=1 << 30)
    owner = gl.sum((start // BM + expert <= tile).to(gl.int32), 0) - 1
    first = gl.load(starts + owner)
    begin = first + (tile - first // BM - owner) * BM
    return owner, begin, gl.load(starts + owner + 1)


@gluon.jit
def _copy(k, into, stages, sources, used, K_BLOCKS, STRIDE):
    """Ask for block k into stage `into`, if there is such a block: words, exponents, values and their scales."""
    words, exponents, values, value_scales = stages
    of_words, of_scales, of_x, of_x_scales = sources
    if k < K_BLOCKS:
        load_elements(words.index(into), of_words + k * 16)
        load_elements(exponents.index(into), of_scales + k)
        load_elements(values.index(into), of_x + k * 128, mask=used)
        load_elements(value_scales.index(into), of_x_scales + k * STRIDE)
    async_copy.commit_group()


@gluon.jit
def _unpacked(words, exponents, HELD: gl.constexpr):
    """_codes of a stage."""
    byte = (gl.arange(0, 16, gl.SliceLayout(0, HELD)) // 4 * 8)[None, :]
    exponent = (exponents.load(gl.SliceLayout(1, HELD))[:, None] >> byte) & 255
    return _codes(words.load(HELD), exponent)


@gluon.jit
def _sums(
    of_words, of_scales, of_x, used, of_x_scales, K_BLOCKS, STRIDE, ROWS: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The products [ROWS, BM] in float32."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [8, 0, 0]],
        [[0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [64, 0, 0]], [], [ROWS, 16, 4],
    )  # fmt: skip
    HELD: gl.constexpr = gl.SliceLayout(2, WORDS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    exponents = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    values = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], gl.NVMMASharedLayout(128, 8, 2))
    value_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BM], FLAT)
    stages, sources = (words, exponents, values, value_scales), (of_words, of_scales, of_x, of_x_scales)
    for k in gl.static_range(STAGES - 1):
        _copy(k, k, stages, sources, used, K_BLOCKS, STRIDE)
    async_copy.wait_group(STAGES - 2)
    a, b, c, d = _unpacked(words.index(0), exponents.index(0), HELD)
    acc = gl.zeros([ROWS, BM], gl.float32, MMA)
    zero = gl.zeros([ROWS, BM], gl.float32, MMA)
    for k in range(K_BLOCKS):
        stage = k % STAGES
        operand = _operand(a, b, c, d, OPERAND)
        product = warpgroup_mma(
            operand, values.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        ahead = k + STAGES - 1
        _copy(ahead, ahead % STAGES, stages, sources, used, K_BLOCKS, STRIDE)
        async_copy.wait_group(STAGES - 2)
        following = (k + 1) % STAGES  # after the last block what is there is unpacked for nothing
        scale = value_scales.index(stage).load(gl.SliceLayout(0, MMA))
        a, b, c, d = _unpacked(words.index(following), exponents.index(following), HELD)
        # Pass the unpacked registers to the wait as dependencies: otherwise ptxas delays unpacking until the product is
        # done. Signs must come after the wait, because the product's operand must not be written before.
        product, a, b, c, d = warpgroup_mma_wait(0, deps=(product, a, b, c, d))
        acc += product * scale[None, :]
    async_copy.wait_group(0)
    return acc * SHIFT


@gluon.jit
def fp4_product(
    out, x, x_scales, weight, scales, order, starts, N, K, K_WORDS, K_BLOCKS, STRIDE,
    CHOSEN: gl.constexpr, EXPERTS: gl.constexpr, E_BLOCK: gl.constexpr, BM: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """coded_product of FP4, with scales int32 [EXPERTS, N, K_BLOCKS], four bytes each, and 128 rows at a time; eight
    warps. Grid (N // 128, tiles)."""
    ROWS: gl.constexpr = 128
    COPY_WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    TALL: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1])
    expert, begin, end = _tile(gl.program_id(1), starts, EXPERTS, E_BLOCK, BM)
    if begin < end:
        on = gl.program_id(0) * ROWS
        place = begin + gl.arange(0, BM, gl.SliceLayout(1, COPY_X))
        scale_place = begin + gl.arange(0, BM, LINE)
        inside = place < end
        source, scale_source = gl.where(inside, place, begin), gl.minimum(scale_place, end - 1)
        if FIRST:
            source = gl.load(order + source) // CHOSEN
            scale_source = gl.load(order + scale_source) // CHOSEN
        column = gl.arange(0, 128, gl.SliceLayout(0, COPY_X))
        of_x = x + source.to(gl.int64)[:, None] * K + column[None, :]
        rows = expert.to(gl.int64) * N + on
        row = rows + gl.arange(0, ROWS, gl.SliceLayout(1, COPY_WORDS))
        of_words = weight + row[:, None] * K_WORDS + gl.arange(0, 16, gl.SliceLayout(0, COPY_WORDS))[None, :]
        of_scales = scales + (rows + gl.arange(0, ROWS, LINE)) * K_BLOCKS
        used = inside[:, None] & (column >= 0)[None, :]
        acc = _sums(
            of_words, of_scales, of_x, used, x_scales + scale_source, K_BLOCKS, STRIDE, ROWS, BM, STAGES
        )
        target = begin + gl.arange(0, BM, gl.SliceLayout(0, TALL))
        written = target < end
        if not FIRST:
            target = gl.load(order + target, mask=written, other=0)
        line = on + gl.arange(0, ROWS, gl.SliceLayout(1, TALL))
        to = out + target.to(gl.int64)[None, :] * N + line[:, None]
        result = gl.convert_layout(acc.to(out.dtype.element_ty), TALL)
        gl.store(to, result, mask=written[None, :] & (line < N)[:, None])
