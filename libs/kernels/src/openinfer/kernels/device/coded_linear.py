"""Products of float8 or int8 codes: activations are quantised, and weights are not unpacked.

BLOCKS: a scale is of 128 columns of a token, and of 128 x 128 numbers of the weight. Else it is of a token, and of a
row of the weight. The tensor cores add up float8 products with some 14 bits. So every 128 columns have a sum of their
own, which is added in float32.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import own_part
from openinfer.kernels.device.linear import finish
from openinfer.kernels.device.norm import gated, start_next, weighted


@triton.jit
def _code(value, codes):
    """Float32 values as the nearest codes that a tensor holds, e4m3 or int8; ties go to the even one."""
    if codes.dtype.element_ty.is_int():
        value = tl.clamp(value, -128.0, 127.0) + 12582912.0  # 1.5 * 2^23: a float32 near it has no fraction
        code = (value - 12582912.0).to(tl.int8)
    else:
        code = tl.clamp(value, -448.0, 448.0).to(tl.float8e4nv)
    return code


@triton.jit
def _coded(value, largest, codes):
    """Float32 values as codes, and their scale: scaled so that `largest` maps to the largest code."""
    largest = tl.maximum(largest, 1e-10)
    if codes.dtype.element_ty.is_int():
        most = tl.full(largest.shape, 127.0, tl.float32)
    else:
        most = tl.full(largest.shape, 448.0, tl.float32)
    return _code(value * tl.div_rn(most, largest), codes), tl.div_rn(largest, most)


@triton.jit
def _store_codes(
    codes, scales, value, x_scale, row, block, width, TOKENS, BLOCKS: tl.constexpr, STATIC: tl.constexpr
):
    """Store value [blocks, 128], columns of a row, as codes [T, width] and scales [blocks or 1, TOKENS]."""
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    largest = tl.max(tl.abs(value), 1, keep_dims=True)
    if STATIC:
        scale = tl.load(x_scale)
        code = _code(value * tl.div_rn(1.0, scale), codes)
        tl.store(scales + row, scale)
    elif BLOCKS:
        code, scale = _coded(value, largest, codes)
        tl.store(scales + block[:, None] * TOKENS + row, scale, mask=block[:, None] * 128 < width)
    else:
        code, scale = _coded(value, tl.max(largest, 0, keep_dims=True), codes)
        tl.store(scales + row + tl.zeros([1, 1], tl.int32), scale)
    tl.store(codes + row * width + column, code, mask=column < width)


@triton.jit
def code_rows(
    codes, scales, x, x_scale, width, TOKENS,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [T, width] as codes and scales, SIZE * 128 columns a program; all columns without BLOCKS. STATIC: the scale is
    x_scale. EARLY: as for norm.start_next. Grid (T, cdiv(width, SIZE * 128))."""
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    _store_codes(codes, scales, value, x_scale, row, block, width, TOKENS, BLOCKS, STATIC)


@triton.jit
def norm_codes(
    codes, scales, x, weight, x_scale, width, TOKENS, eps,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [T, width] / rms(x) weighted and rounded, as codes and scales; width <= SIZE * 128. EARLY: as for
    norm.start_next. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0)
    start_next(EARLY)
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    unit = value * tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / width + eps)
    value = weighted(unit, gain, x.dtype.element_ty).to(tl.float32)
    _store_codes(codes, scales, value, x_scale, row, block, width, TOKENS, BLOCKS, STATIC)


@triton.jit
def _columns(place, inside, EVEN: tl.constexpr):
    """128 columns, with zeros after the last one; EVEN: the last one ends a block."""
    return tl.load(place) if EVEN else tl.load(place, mask=inside, other=0.0)


@triton.jit
def _finish(out, acc, up, token, row, M, N, ADD: tl.constexpr, GATED: tl.constexpr):
    """Store acc [tokens, rows], of the gate and `up` if GATED."""
    place = out + token.to(tl.int64)[:, None] * N + row[None, :]
    inside = (token < M)[:, None] & (row < N)[None, :]
    if GATED:
        acc = gated(acc, up, out.dtype.element_ty)
    finish(place, acc, inside, ADD)


@triton.jit
def project_coded(
    out, x, x_scales, weight, scales, partial, counter, M, N, K, TOKENS,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x @ weight^T, or out += with ADD; GATED: weight [2 N, K] has a gate's rows and an up projection's.

    x: codes [M, K] with x_scales [cdiv(K, 128) or 1, TOKENS].
    weight: codes with scales [cdiv(N, 128), cdiv(K, 128)], twice that if GATED, or [N]. ROWS divides 128. EVEN: K is a
    multiple of 128. The blocks of K are split over SPLIT programs, and the last one to finish sums their parts in a
    fixed order. partial: float32 [SPLIT, 2 if GATED else 1, M, N]; counter: int32 [programs / SPLIT], zero before and
    after. Grid (cdiv(N, ROWS), SPLIT, cdiv(M, BM)).
    """
    on = tl.program_id(0) * ROWS
    row = on + tl.arange(0, ROWS)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    near = tl.minimum(token, M - 1)
    column = tl.arange(0, 128)
    of_x = x + near.to(tl.int64)[None, :] * K + column[:, None]
    of_weight = weight + tl.minimum(row, N - 1).to(tl.int64)[:, None] * K + column[None, :]
    of_up = of_weight + N.to(tl.int64) * K
    count = tl.cdiv(K, 128)
    of_blocks = scales + on // 128 * count
    of_up_blocks = of_blocks + tl.cdiv(N, 128) * count
    of_x_scales = x_scales + near
    first, last = own_part(count, SPLIT)
    acc = tl.zeros((ROWS, BM), tl.float32)
    up = tl.zeros((ROWS, BM), tl.float32)
    if BLOCKS:  # read a turn ahead, so that no product waits for a scale
        block = tl.load(of_blocks + tl.minimum(first, count - 1))
        up_block = block
        if GATED:
            up_block = tl.load(of_up_blocks + tl.minimum(first, count - 1))
        x_block = tl.load(of_x_scales + tl.minimum(first, count - 1) * TOKENS)
    for k in range(first, last):
        value = _columns(of_x + k * 128, (k * 128 + column < K)[:, None], EVEN)
        inside = (k * 128 + column < K)[None, :]
        product = tl.dot(_columns(of_weight + k * 128, inside, EVEN), value)
        if BLOCKS:
            product *= (x_block * block)[None, :]
        acc += product
        if GATED:
            product = tl.dot(_columns(of_up + k * 128, inside, EVEN), value)
            if BLOCKS:
                product *= (x_block * up_block)[None, :]
            up += product
        if BLOCKS:
            ahead = tl.minimum(k + 1, last - 1)
            block = tl.load(of_blocks + ahead)
            if GATED:
                up_block = tl.load(of_up_blocks + ahead)
            x_block = tl.load(of_x_scales + ahead * TOKENS)
    acc, up = tl.trans(acc), tl.trans(up)
    if not BLOCKS:
        of_token = tl.load(of_x_scales)[:, None]
        acc *= of_token * tl.load(scales + row, mask=row < N, other=0.0)[None, :]
        if GATED:
            up *= of_token * tl.load(scales + N + row, mask=row < N, other=0.0)[None, :]
    if SPLIT == 1:
        _finish(out, acc, up, token, row, M, N, ADD, GATED)
    else:
        size = M.to(tl.int64) * N
        halves: tl.constexpr = 2 if GATED else 1
        place = partial + token.to(tl.int64)[:, None] * N + row[None, :]
        inside = (token < M)[:, None] & (row < N)[None, :]
        ours = place + tl.program_id(1) * halves * size
        tl.store(ours, acc, mask=inside)
        if GATED:
            tl.store(ours + size, up, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrivals = counter + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros((BM, ROWS), tl.float32)
            up = tl.zeros((BM, ROWS), tl.float32)
            for part in tl.static_range(SPLIT):  # .cg: not from this SM's first-level cache
                theirs = place + part * halves * size
                acc += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(theirs + size, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(out, acc, up, token, row, M, N, ADD, GATED)
            tl.store(arrivals, 0)
