"""Matrix products out[M, N] = x[M, K] @ weight[N, K]^T: bf16 in, float32 accumulation, one rounding.

ADD: out += the product (a residual stream). GATED: weight is [2 N, K], a gate's rows and an up projection's, and
out = silu(gate) * up. K is a multiple of BK; M and N are anything: rows past the end are clamped when read (which costs
nothing) and masked when written.

SCALED: weight is float8. 1: with a float32 scale for each block of 128 x 128, scales [cdiv(N, 128), cdiv(K, 128)] or
twice that (GATED). BN divides 128; the products of a block's numbers are scaled in float32. 2: with a scale for each
row, scales [N] or [2 N] (GATED), which multiplies the row's sum.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import gated, start_next, weighted


@triton.jit
def finish(out, value, mask, ADD: tl.constexpr):
    """Store float32 `value` at `out`, added to what is there if ADD."""
    if ADD:
        value += tl.load(out, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _unit(x, gain, scale, NORM: tl.constexpr):
    """Values of x in float32, normalised by `scale` if NORM."""
    value = tl.load(x).to(tl.float32)
    if NORM:
        value = weighted(value * scale, tl.load(gain), x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _scaled(value, scale, SCALED: tl.constexpr):
    """`value` times the scales at `scale`, if they are of blocks."""
    if SCALED == 1:
        value *= tl.load(scale)
    return value


@triton.jit
def add_product(acc, weight, x, scale, SCALED: tl.constexpr):
    """acc + weight @ x; if SCALED is 1, of float8 weights of one block, whose scale is at `scale`."""
    if SCALED == 1:
        acc += tl.dot(weight.to(x.dtype), x) * tl.load(scale)
    else:
        acc = tl.dot(weight.to(x.dtype), x, acc)
    return acc


@triton.jit
def _of_rows(total, scales, row, N, SCALED: tl.constexpr):
    """Sums [.., BN] of rows of the weight, times their scales if SCALED is 2."""
    if SCALED == 2:
        total *= tl.load(scales + row, mask=row < N, other=0.0)
    return total


@triton.jit
def dequantize_rows(out, weight, scales, N, K, BN: tl.constexpr):
    """out [N, K] = the values of a float8 weight with a scale for each row, rounded. Grid (cdiv(N, BN),
    cdiv(K, 128))."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    scale = tl.load(scales + row, mask=row < N, other=0.0)
    inside = (row < N)[:, None] & (column < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    value = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize(out, weight, scales, part, N, K, BN: tl.constexpr):
    """out [N, K] = the values of a float8 weight, rounded; every `part` rows the blocks begin anew. Grid (cdiv(N, BN),
    cdiv(K, 128))."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    block = row // part * tl.cdiv(part, 128) + row % part // 128
    scale = tl.load(scales + block * tl.cdiv(K, 128) + tl.program_id(1), mask=row < N, other=0.0)
    inside = (row < N)[:, None] & (column < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    value = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemv(
    out, x, gain, weight, scales, N, K, eps,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """M = 1, on the CUDA cores: BN rows of the weights a program, the first columns read before the wait
    (norm.start_next). Grid (cdiv(N, BN),).

    NORM: 0, or a power of two >= K: then x is normalised first; every program does that for itself, while its first
    weights are on their way. CODED: x is codes of float8, whose scale [1] is at `gain`; SCALED is 2.
    """
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    first = weight + tl.minimum(rn, N - 1).to(tl.int64)[:, None] * K
    up_first = first + N.to(tl.int64) * K
    row = first + rk[None, :]
    up_row = up_first + rk[None, :]
    early = tl.load(row)
    if GATED:
        early_up = tl.load(up_row)
    start_next(EARLY)
    scale = 1.0
    if NORM:
        whole = tl.arange(0, NORM)
        all_x = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(all_x * all_x, 0) / K + eps)
    of_blocks = scales + tl.program_id(0) * BN // 128 * tl.cdiv(K, 128)
    of_up_blocks = of_blocks + tl.cdiv(N, 128) * tl.cdiv(K, 128)
    value = _unit(x + rk, gain + rk, scale, NORM)
    acc = early.to(tl.float32) * _scaled(value, of_blocks + rk // 128, SCALED)[None, :]
    if GATED:
        up = early_up.to(tl.float32) * _scaled(value, of_up_blocks + rk // 128, SCALED)[None, :]
    for k in tl.range(BK, K, BK, num_stages=STAGES):
        value = _unit(x + k + rk, gain + k + rk, scale, NORM)
        acc += tl.load(row + k).to(tl.float32) * _scaled(value, of_blocks + (k + rk) // 128, SCALED)[None, :]
        if GATED:
            up_value = _scaled(value, of_up_blocks + (k + rk) // 128, SCALED)
            up += tl.load(up_row + k).to(tl.float32) * up_value[None, :]
    total = _of_rows(tl.sum(acc, 1), scales, rn, N, SCALED)
    if CODED:
        total *= tl.load(gain)
    if GATED:
        of_up = _of_rows(tl.sum(up, 1), scales + N, rn, N, SCALED)
        if CODED:
            of_up *= tl.load(gain)
        total = gated(total, of_up, out.dtype.element_ty)
    finish(out + rn, total, rn < N, ADD)


@triton.jit
def gemv_scaled(
    out, x, gain, weight, scales, N, K, eps,
    BN: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """gemv of float8 weights, for a K of whole blocks, BLOCKS of them at a time: a thread reads a scale once, not with
    every weight. CODED: x is codes of float8, with the scales of its blocks at `gain`. Grid (cdiv(N, BN),)."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    block, column = tl.arange(0, BLOCKS), tl.arange(0, 128)
    place = block[:, None] * 128 + column[None, :]
    row = weight + tl.minimum(rn, N - 1).to(tl.int64)[None, :, None] * K + place[:, None, :]
    up_row = row + N.to(tl.int64) * K
    of_blocks = scales + tl.program_id(0) * BN // 128 * (K // 128) + block
    of_up_blocks = of_blocks + tl.cdiv(N, 128) * (K // 128)
    scale = 1.0
    if NORM:
        whole = tl.arange(0, NORM)
        all_x = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(all_x * all_x, 0) / K + eps)
    # In this order a thread has several rows, and the same x for them.
    acc = tl.zeros((BLOCKS, BN, 128), tl.float32)
    up = tl.zeros((BLOCKS, BN, 128), tl.float32)
    for k in tl.range(0, K, BLOCKS * 128, num_stages=STAGES):
        value = _unit(x + k + place, gain + k + place, scale, NORM)
        if CODED:
            value *= tl.load(gain + k // 128 + block)[:, None]
        of_row = value * tl.load(of_blocks + k // 128)[:, None]
        acc += tl.load(row + k).to(tl.float32) * of_row[:, None, :]
        if GATED:
            of_row = value * tl.load(of_up_blocks + k // 128)[:, None]
            up += tl.load(up_row + k).to(tl.float32) * of_row[:, None, :]
    total = tl.sum(tl.sum(acc, 2), 0)
    if GATED:
        total = gated(total, tl.sum(tl.sum(up, 2), 0), out.dtype.element_ty)
    finish(out + rn, total, rn < N, ADD)


@triton.jit
def _store_small(out, acc, up, rm, rn, M, N, ADD: tl.constexpr, GATED: tl.constexpr):
    value = acc
    if GATED:
        value = gated(acc, up, out.dtype.element_ty)
    finish(out + rm[:, None] * N + rn[None, :], value, (rm < M)[:, None] & (rn < N)[None, :], ADD)


@triton.jit
def finish_small(
    out, acc, up, partial, counter, tile, part, rm, rn, M, N,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a program's sums [BM, BN], or the last of SPLIT programs those of all parts. See gemm_small."""
    if SPLIT == 1:
        _store_small(out, acc, up, rm, rn, M, N, ADD, GATED)
    else:
        halves: tl.constexpr = 2 if GATED else 1
        place = partial + rm[:, None] * N + rn[None, :]
        inside = (rm < M)[:, None] & (rn < N)[None, :]
        tl.store(place + (part * halves) * BM * N, acc, mask=inside)
        if GATED:
            tl.store(place + (part * halves + 1) * BM * N, up, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
            for s in tl.static_range(SPLIT):  # .cg: not from this SM's first-level cache
                acc += tl.load(place + (s * halves) * BM * N, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(
                        place + (s * halves + 1) * BM * N, mask=inside, other=0.0, cache_modifier=".cg"
                    )
            _store_small(out, acc, up, rm, rn, M, N, ADD, GATED)
            tl.store(counter + tile, 0)


@triton.jit
def gemm_small(
    out, x, weight, scales, partial, counter, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """M <= BM: the weights are the tall operand of the tensor cores. K is split over SPLIT programs, and the last
    program to finish sums their parts in a fixed order. Grid (cdiv(N, BN), SPLIT).

    partial: float32 [SPLIT, 2 if GATED else 1, BM, N]; counter: int32 [cdiv(N, BN)], zero before and after.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rn = tile * BN + tl.arange(0, BN)
    rm = tl.arange(0, BM)
    rk = tl.arange(0, BK)
    row = weight + tl.minimum(rn, N - 1).to(tl.int64)[:, None] * K
    up_row = row + N.to(tl.int64) * K
    steps = tl.cdiv(K // BK, SPLIT)
    first = part * steps * BK
    row += rk[None, :]
    up_row += rk[None, :]
    column = x + tl.minimum(rm, M - 1)[None, :] * K + rk[:, None]
    of_blocks = scales + tile * BN // 128 * tl.cdiv(K, 128)
    of_up_blocks = of_blocks + tl.cdiv(N, 128) * tl.cdiv(K, 128)
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for k in range(first, tl.minimum(first + steps * BK, K), BK):
        value = tl.load(column + k)
        acc = add_product(acc, tl.load(row + k), value, of_blocks + k // 128, SCALED)
        if GATED:
            up = add_product(up, tl.load(up_row + k), value, of_up_blocks + k // 128, SCALED)
    acc = tl.trans(acc)
    up = tl.trans(up)
    if SCALED == 2:
        acc *= tl.load(scales + rn, mask=rn < N, other=0.0)[None, :]
        up *= tl.load(scales + N * (1 if GATED else 0) + rn, mask=rn < N, other=0.0)[None, :]
    finish_small(out, acc, up, partial, counter, tile, part, rm, rn, M, N, BM, BN, SPLIT, ADD, GATED)


@triton.jit
def _tile(index, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of the index-th tile; GROUP row tiles go together, so that a wave shares weights in L2."""
    rows = tl.cdiv(M, BM)
    group = GROUP * tl.cdiv(N, BN)
    first = (index // group) * GROUP
    size = tl.minimum(rows - first, GROUP)
    return (first + (index % group) % size) * BM, ((index % group) // size) * BN


@triton.jit
def gemm(
    out, x, weight, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Any M, through pointers. Grid (cdiv(M, BM) * cdiv(N, BN),)."""
    om, on = _tile(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = om + tl.arange(0, BM)
    rn = on + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    left = x + tl.minimum(rm, M - 1).to(tl.int64)[:, None] * K + rk[None, :]
    right = weight + tl.minimum(rn, N - 1).to(tl.int64)[None, :] * K + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(tl.load(left + k), tl.load(right + k), acc)
    place = out + rm.to(tl.int64)[:, None] * N + rn[None, :]
    finish(place, acc, (rm < M)[:, None] & (rn < N)[None, :], ADD)


@triton.jit
def gemm_tma(
    out, old, x, weight, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Any M, through tensor maps of out [BM, BN], x [BM, BK] and weight [BN, BK]; persistent: grid (min(SMs, tiles),).

    old: out as a pointer. ADD reads its addend through this pointer, because a map would cost a tile of shared memory.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        om, on = _tile(index, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(x.load([om, k]), weight.load([on, k]).T, acc)
        if ADD:
            rm = om + tl.arange(0, BM)
            rn = on + tl.arange(0, BN)
            place = old + rm.to(tl.int64)[:, None] * N + rn[None, :]
            acc += tl.load(place, mask=(rm < M)[:, None] & (rn < N)[None, :], other=0.0).to(tl.float32)
        out.store([om, on], acc.to(out.dtype))
