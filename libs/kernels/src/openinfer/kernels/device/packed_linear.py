"""Linear layers of few tokens with packed or bf16 weights, and what is around them: codes, the clamped gate, norms."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import (
    e8m0,
    float8_operand,
    operand_row,
    own_part,
    packed_column,
    store_codes,
)
from openinfer.kernels.device.norm import start_next, wait_ahead
from openinfer.kernels.device.packed_experts import clamped_product


@triton.jit
def _finish(out, value, row, token, n, M, N, GROUP_ROWS):
    """Store [rows, tokens] of a group's n rows at out [M, N]."""
    inside = (row < GROUP_ROWS)[:, None] & (token < M)[None, :]
    place = out + token.to(tl.int64)[None, :] * N + (n + row)[:, None]
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def project_few(
    out, x, weight, scales, partial, counter, M, N, K, K_WORDS, GROUP_ROWS, x_stride, scale_blocks,
    BM: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
    FLOAT8: tl.constexpr, SCALE_ROWS: tl.constexpr, PAIRS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, N]: rows g GROUP_ROWS .. of weight [N, K] times columns g K .. of x [M, ...], whose rows are x_stride
    apart. The weights are the left operand; K is split over SPLIT programs, and the last one to finish sums their parts
    in a fixed order.

    FLOAT8: weight is int32 [N, K_WORDS], K_WORDS = K / 4 and a multiple of 16, scales uint8 [cdiv(N, SCALE_ROWS),
    scale_blocks] (E8M0); BK is 64. Else bf16, and BK divides K. BM tokens and ROWS rows at a time; WARPS: the launch's.
    HELD: the turns of every program where its whole part of a FLOAT8 weight is read before the wait, else 0.
    partial: float32 [SPLIT, M, N]; counter: int32 [programs / SPLIT], zero before and after.
    Grid (cdiv(GROUP_ROWS, ROWS), SPLIT, groups * cdiv(M, BM)).
    """
    tiles = tl.cdiv(M, BM)
    group = tl.program_id(2) // tiles
    token = tl.program_id(2) % tiles * BM + tl.arange(0, BM)
    on = tl.program_id(0) * ROWS
    n = group * GROUP_ROWS
    used = (token < M)[None, :]
    of_x = x + token.to(tl.int64)[None, :] * x_stride + group * K
    column = tl.arange(0, BK)
    first, last = own_part(K // BK, SPLIT)
    acc, held, values = tl.zeros((ROWS, BM), tl.float32), (), ()
    if HELD == 0:
        wait_ahead(EARLY)
    if FLOAT8:
        # Pairs of columns stay together, which is as little as can be copied in the background.
        column = tl.max_contiguous(tl.multiple_of(packed_column(column, False), [2]), [2])
        of_x += column[:, None]
        row = n + tl.minimum(on + operand_row(tl.arange(0, ROWS), WARPS), GROUP_ROWS - 1)
        of_words = weight + row.to(tl.int64)[:, None] * K_WORDS + tl.arange(0, 16)[None, :]
        of_blocks = scales + row // SCALE_ROWS * scale_blocks
        if HELD:
            for turn in tl.static_range(HELD):
                k = first + turn
                held += ((tl.load(of_words + k * 16), tl.load(of_blocks + k // 2)),)
            wait_ahead(EARLY)
            for turn in tl.static_range(HELD):
                values += (tl.load(of_x + (first + turn) * 64, mask=used, other=0.0),)
            for turn in tl.static_range(HELD):
                words = held[turn][0]
                exponents = held[turn][1].to(tl.int32)[:, None] + tl.zeros_like(words)
                acc = tl.dot(float8_operand(words, exponents, PAIRS, WARPS), values[turn], acc)
        else:
            for k in range(first, last):
                words = tl.load(of_words + k * 16)
                exponents = tl.load(of_blocks + k // 2).to(tl.int32)[:, None] + tl.zeros_like(words)
                value = tl.load(of_x + k * 64, mask=used, other=0.0)
                acc = tl.dot(float8_operand(words, exponents, PAIRS, WARPS), value, acc)
    else:
        of_x += column[:, None]
        row = n + tl.minimum(on + tl.arange(0, ROWS), GROUP_ROWS - 1)
        of_weight = weight + row.to(tl.int64)[:, None] * K + column[None, :]
        for k in range(first, last):
            value = tl.load(of_x + k * BK, mask=used, other=0.0)
            acc = tl.dot(tl.load(of_weight + k * BK), value, acc)
    _sum(out, partial, counter, acc, on, token, n, M, N, GROUP_ROWS, ROWS, SPLIT)


@triton.jit
def _sum(out, partial, counter, acc, on, token, n, M, N, GROUP_ROWS, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Store acc [ROWS, tokens], of a group's rows `on` and up; or this program's part of it, which the last of SPLIT
    programs adds up. partial, counter and grid as in project_few."""
    row = on + tl.arange(0, ROWS)
    if SPLIT == 1:
        _finish(out, acc, row, token, n, M, N, GROUP_ROWS)
    else:
        size = M.to(tl.int64) * N
        inside = (row < GROUP_ROWS)[:, None] & (token < M)[None, :]
        place = partial + token.to(tl.int64)[None, :] * N + (n + row)[:, None]
        tl.store(place + tl.program_id(1) * size, acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        ours = counter + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ours, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros(acc.shape, tl.float32)
            for s in tl.static_range(SPLIT):  # .cg: not from this SM's first-level cache
                acc += tl.load(place + s * size, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(out, acc, row, token, n, M, N, GROUP_ROWS)
            tl.store(ours, 0)


@triton.jit
def project_codes(
    out, x, x_scales, weight, scales, partial, counter, M, N, K, K_BLOCKS,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x @ weight^T of e4m3 codes: x [M, K] with x_scales [M, K_BLOCKS], weight [N, K] with scales [cdiv(N,
    128), K_BLOCKS], both uint8 (E8M0); K = 128 K_BLOCKS, and ROWS divides 128. The tensor cores add up float8 products
    with some 14 bits. So each block of 128 columns has a sum of its own, which is scaled and added in float32. The rest
    is as in project_few. Grid (cdiv(N, ROWS), SPLIT, cdiv(M, BM))."""
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    on = tl.program_id(0) * ROWS
    used = (token < M)[None, :]
    column = tl.arange(0, 128)
    of_x = x + token.to(tl.int64)[None, :] * K + column[:, None]
    of_token = tl.minimum(token, M - 1) * K_BLOCKS
    row = tl.minimum(on + tl.arange(0, ROWS), N - 1)
    of_weight = weight + row.to(tl.int64)[:, None] * K + column[None, :]
    of_blocks = scales + on // 128 * K_BLOCKS
    first, last = own_part(K_BLOCKS, SPLIT)
    acc, held, values = tl.zeros((ROWS, BM), tl.float32), (), ()
    if HELD:
        for turn in tl.static_range(HELD):
            k = first + turn
            held += ((tl.load(of_weight + k * 128), tl.load(of_blocks + k)),)
        wait_ahead(EARLY)
        for turn in tl.static_range(HELD):
            k = first + turn
            values += ((tl.load(of_x + k * 128, mask=used, other=0.0), tl.load(x_scales + k + of_token)),)
        for turn in tl.static_range(HELD):
            scale = e8m0(values[turn][1]) * e8m0(held[turn][1])
            acc += tl.dot(held[turn][0], values[turn][0]) * scale[None, :]
    else:
        wait_ahead(EARLY)
        block = tl.load(of_blocks + tl.minimum(first, K_BLOCKS - 1))
        for k in range(first, last):
            next_block = tl.load(of_blocks + tl.minimum(k + 1, last - 1))
            byte = tl.load(
                x_scales + k + of_token
            )  # near, but for a token's first; a turn ahead takes registers
            value = tl.load(of_x + k * 128, mask=used, other=0.0)
            acc += tl.dot(tl.load(of_weight + k * 128), value) * (e8m0(byte) * e8m0(block))[None, :]
            block = next_block
    _sum(out, partial, counter, acc, on, token, 0, M, N, N, ROWS, SPLIT)


@triton.jit
def code_rows(codes, scales, x, width, x_stride, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    """codes and scales = x, whose rows are x_stride apart, through q8 as store_codes writes it, BLOCKS * 128 columns a
    program. Grid (T, cdiv(width, BLOCKS * 128))."""
    start_next(EARLY)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0, cache_modifier=".cg")
    value = value.to(tl.float32)
    store_codes(codes, scales, value, row, block, width)


@triton.jit
def widen_rows(out, codes, scales, width, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    """out [T, width] = the values of codes and scales, BLOCKS * 128 columns a program. Grid as of code_rows."""
    wait_ahead(EARLY)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    of_scales = scales + row * tl.cdiv(width, 128) + block[:, None]
    scale = e8m0(tl.load(of_scales, mask=block[:, None] * 128 < width, other=0))
    value = tl.load(codes + row * width + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def float_scales(out, x_out, scales, x_scales, count, tokens, blocks, BLOCK: tl.constexpr):
    """out = the values of `count` E8M0 bytes, and x_out [blocks, tokens] those of x_scales [tokens, blocks], in
    float32. Grid (cdiv(count, BLOCK) + cdiv(tokens * blocks, BLOCK),)."""
    first = tl.cdiv(count, BLOCK)
    program, place = tl.program_id(0), tl.arange(0, BLOCK)
    if program < first:
        place += program * BLOCK
        inside = place < count
        tl.store(out + place, e8m0(tl.load(scales + place, mask=inside, other=0)), mask=inside)
    else:
        place += (program - first) * BLOCK
        inside = place < tokens * blocks
        byte = tl.load(x_scales + place % tokens * blocks + place // tokens, mask=inside, other=0)
        tl.store(x_out + place, e8m0(byte), mask=inside)


@triton.jit
def dequantize(out, weight, scales, first, N, K, scale_blocks, BN: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """out [N, K] = rows `first` and up of a float8 weight as bf16, exactly; scales uint8, scale_blocks for each
    SCALE_ROWS rows. Grid (cdiv(N, BN), cdiv(K, 128))."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    whole = first + row
    scale = e8m0(
        tl.load(scales + whole // SCALE_ROWS * scale_blocks + tl.program_id(1), mask=row < N, other=0)
    )
    inside = (row < N)[:, None] & (column < K)[None, :]
    source = whole.to(tl.int64)[:, None] * K + column[None, :]
    value = tl.load(weight + source, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def clamped_gate(
    out, scales, both, limit, width, BLOCKS: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr
):
    """out[t] = silu(min(g, limit)) * clamp(u, -limit, limit), with both[t] = [g, u] of `width` columns each; rounded,
    and codes with CODED (store_codes). Grid (T, cdiv(width, BLOCKS * 128))."""
    start_next(EARLY)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    of_gate = both + 2 * row * width + column
    gate = tl.load(of_gate, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(of_gate + width, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = clamped_product(gate, up, limit).to(both.dtype.element_ty)
    if CODED:
        store_codes(out, scales, value.to(tl.float32), row, block, width)
    else:
        tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def norm_rows(
    out, scales, x, norm_weight, width, eps, BLOCKS: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr
):
    """out[t] = norm_weight * x[t] / rms(x[t]), rounded once, and codes with CODED (store_codes). width <= BLOCKS * 128.
    Grid (T,)."""
    wait_ahead(EARLY)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    wide = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / width + eps)
    value = (unit * tl.load(norm_weight + column, mask=inside, other=0.0)).to(x.dtype.element_ty)
    if CODED:
        store_codes(out, scales, value.to(tl.float32), row, block, width)
    else:
        tl.store(out + row * width + column, value, mask=inside)
