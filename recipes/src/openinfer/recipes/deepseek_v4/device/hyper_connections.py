"""Hyper-connections: four residual streams, how a sublayer reads them, and how its output is mixed into them.

A token has 24 mixing numbers, the products of its four streams with a float32 matrix. The matrix is split into three
bf16 parts, which have 24 bits of mantissa together. The streams are bf16, so these products on the tensor cores are as
exact as products in float32.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import store_codes
from openinfer.kernels.device.norm import wait_ahead
from openinfer.kernels.device.push_sum import (
    calls_of,
    exchanged,
    load16,
    narrow,
    others_of,
    put16,
    sent,
    slot_of,
    times,
    wide,
)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _product(
    streams, fn, rows, inside, first, last, K, NUMBERS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    """Columns first .. last - 1 of streams [T, K] times fn [NUMBERS, K] for some rows: float32 [BT, 32], the sum of the
    squares in the last column."""
    number, column = tl.arange(0, 32), tl.arange(0, BK)
    left = streams + rows.to(tl.int64)[:, None] * K + column[None, :]
    right = fn + number[None, :] * K + column[:, None]
    known = (number < NUMBERS)[None, :]
    acc = tl.zeros((BT, 32), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    for k in range(first, last, BK):
        x = tl.load(left + k, mask=inside[:, None], other=0.0)
        rest = tl.load(right + k, mask=known, other=0.0)
        for _ in tl.static_range(3):
            part = rest.to(tl.bfloat16)
            acc = tl.dot(x, part, acc)
            rest -= part.to(tl.float32)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    return tl.where((number == 31)[None, :], squares[:, None], acc)


@triton.jit
def _sinkhorn(c, hc_eps, iters):
    """Sixteen logits, row by row, as rows and columns that sum to one."""
    exps = ()
    for j in tl.static_range(4):
        most = tl.maximum(tl.maximum(c[4 * j], c[4 * j + 1]), tl.maximum(c[4 * j + 2], c[4 * j + 3]))
        for k in tl.static_range(4):
            exps += (tl.exp(c[4 * j + k] - most),)
    c = exps
    rows = ()
    for j in tl.static_range(4):
        share = 1.0 / (c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3])
        for k in tl.static_range(4):
            rows += (c[4 * j + k] * share + hc_eps,)
    c = _columns(rows, hc_eps)
    for _ in range(1, iters):
        c = _columns(_rows(c, hc_eps), hc_eps)
    return c


@triton.jit
def _rows(c, hc_eps):
    found = ()
    for j in tl.static_range(4):
        share = 1.0 / (c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3] + hc_eps)
        for k in tl.static_range(4):
            found += (c[4 * j + k] * share,)
    return found


@triton.jit
def _columns(c, hc_eps):
    shares = ()
    for k in tl.static_range(4):
        shares += (1.0 / (c[k] + c[4 + k] + c[8 + k] + c[12 + k] + hc_eps),)
    found = ()
    for j in tl.static_range(4):
        for k in tl.static_range(4):
            found += (c[4 * j + k] * shares[k],)
    return found


@triton.jit
def hc_numbers(
    partial, streams, fn, tokens, K, NUMBERS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """partial float32 [SPLIT, T, 32] = the products of streams [T, K] with fn, by parts of K. BK divides K.
    Grid (SPLIT, cdiv(T, BT))."""
    part = tl.program_id(0)
    row, number = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, 32)
    inside = row < tokens
    steps = tl.cdiv(K // BK, SPLIT)
    first = part * steps * BK
    last = tl.minimum(first + steps * BK, K)
    wait_ahead(EARLY)
    value = _product(streams, fn, row, inside, first, last, K, NUMBERS, BT, BK)
    place = partial + (part.to(tl.int64) * tokens + row)[:, None] * 32 + number[None, :]
    tl.store(place, value, mask=inside[:, None])


@triton.jit
def _number(total, n: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 32) == n, total, 0.0), 0)


@triton.jit
def hc_collapse(
    out, codes, scales, mix, streams, partial, base, scale, norm_weight, tokens, width, eps, hc_eps, iters,
    BLOCKS: tl.constexpr, NORM: tl.constexpr, CODED: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, 1), or (T, 2) where there is a mix. The first program of a token: out[t] = the sum of streams[t] [4,
    width], each times its number, rounded; with NORM its RMS norm, and that as codes and scales if CODED (store_codes).
    width <= BLOCKS * 128. The second program, which nothing waits for: mix float32 [T, 20]."""
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    part, number = tl.arange(0, SPLIT), tl.arange(0, 32)
    found = tl.load(partial + (part[:, None] * tokens + token) * 32 + number[None, :])
    total = tl.sum(found, 0)
    unit = tl.rsqrt(_number(total, 31) / (4 * width) + eps)
    if tl.program_id(1) == 0:
        block = tl.arange(0, BLOCKS)
        column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = column < width
        place = streams + token * 4 * width + column
        value = tl.zeros((BLOCKS, 128), tl.float32)
        shrink = unit * tl.load(scale)
        for s in tl.static_range(4):
            x = tl.load(place + s * width, mask=inside, other=0.0).to(tl.float32)
            value += x * (_sigmoid(_number(total, s) * shrink + tl.load(base + s)) + hc_eps)
        dtype = out.dtype.element_ty
        value = value.to(dtype)
        if NORM:
            wide = value.to(tl.float32)
            normed = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / width + eps)
            value = (normed * tl.load(norm_weight + column, mask=inside, other=0.0)).to(dtype)
        tl.store(out + token * width + column, value, mask=inside)
        if CODED:
            store_codes(codes, scales, value.to(tl.float32), token, block, width)
    else:
        to, shrink = mix + token * 20, unit * tl.load(scale + 1)
        for s in tl.static_range(4):
            m = _number(total, 4 + s) * shrink + tl.load(base + 4 + s)
            tl.store(to + s, 2.0 * _sigmoid(m))
        shrink = unit * tl.load(scale + 2)
        c = ()
        for n in tl.static_range(16):
            c += (_number(total, 8 + n) * shrink + tl.load(base + 8 + n),)
        c = _sinkhorn(c, hc_eps, iters)
        for n in tl.static_range(16):
            tl.store(to + 4 + n, c[n])


@triton.jit
def hc_post(streams, y, mix, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """streams[t, k] = post_k * y[t] + sum over j of C[j, k] * streams[t, j], in place. Grid (T, cdiv(width, BLOCK))."""
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = streams + token * 4 * width + column
    added = tl.load(y + token * width + column, mask=inside, other=0.0).to(tl.float32)
    old = ()
    for j in tl.static_range(4):
        old += (tl.load(place + j * width, mask=inside, other=0.0).to(tl.float32),)
    for k in tl.static_range(4):
        total = added * tl.load(mix + token * 20 + k)
        for j in tl.static_range(4):
            total += old[j] * tl.load(mix + token * 20 + 4 + 4 * j + k)
        tl.store(place + k * width, total.to(streams.dtype.element_ty), mask=inside)


@triton.jit
def hc_post_ranks(
    streams, y, mix, peers, rank, first,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, BASE: tl.constexpr, COUNTS: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """hc_post of the sum of the y of all ranks, rounded. A row here is one of the PARTS of a token, of WIDTH columns;
    programs, peers and counts are those of push_sum."""
    wait_ahead(EARLY)
    index = tl.arange(0, WIDTH // 8).to(tl.int64)
    inside = tl.full([WIDTH // 8], 1, tl.int32)
    none = tl.zeros([WIDTH // 8], tl.int32)
    program = tl.program_id(0)
    count = calls_of(peers, program, RANKS, COUNTS)
    call = tl.load(count, cache_modifier=".cg")
    own, others = tl.load(peers + rank), others_of(peers, rank, RANKS)
    lost = tl.load(peers + RANKS) + tl.zeros([WIDTH // 8], tl.int64)
    row = (first + program).to(tl.int64)
    token, part = row // PARTS, row % PARTS
    a, b, c, d = load16(y.to(tl.int64) + row * (WIDTH * 2) + index * 16, inside)
    place = streams.to(tl.int64) + (token * (4 * PARTS) + part) * (WIDTH * 2) + index * 16
    old = ()
    for j in tl.static_range(4):
        old += (load16(place + j * (PARTS * WIDTH * 2), inside),)
    m = ()
    for i in tl.static_range(20):
        m += (tl.load(mix + token * 20 + i),)
    slot = slot_of(call, program, index, BASE, RANKS, SLOT, WIDTH)
    mine = (sent(a), sent(b), sent(c), sent(d))
    s = exchanged(mine, (none, none, none, none), own, others, rank, lost, slot, inside, RANKS, SLOT)
    added = wide(narrow(s))
    for k in tl.static_range(4):
        total = times(added, m[k])
        for j in tl.static_range(4):
            total = plus_times(total, old[j], m[4 + 4 * j + k])
        a, b, c, d = narrow(total)
        put16(place + k * (PARTS * WIDTH * 2), inside, a, b, c, d)
    tl.store(count, call + 1)


@triton.jit
def plus_times(s, words, factor):
    """Eight float32 plus the bf16 of four words times a number."""
    v = times(wide(words), factor)
    return (
        s[0] + v[0], s[1] + v[1], s[2] + v[2], s[3] + v[3], s[4] + v[4], s[5] + v[5], s[6] + v[6], s[7] + v[7]
    )  # fmt: skip


@triton.jit
def spread(
    streams, x, width, STREAMS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """streams[t, s] = x[t], or += if ADD. Grid (T, cdiv(width, BLOCK))."""
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + token * width + column, mask=inside, other=0.0)
    for s in tl.static_range(STREAMS):
        place = streams + (token * STREAMS + s) * width + column
        new = value
        if ADD:
            old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            new = (old + value.to(tl.float32)).to(value.dtype)
        tl.store(place, new, mask=inside)


@triton.jit
def mean_streams(
    out, streams, width, stride, STREAMS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr
):
    """out[t] = the mean of streams[t] [STREAMS, width]; rows of out are `stride` apart. width <= BLOCKS * 128.
    Grid (T,)."""
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    total = tl.zeros((BLOCKS, 128), tl.float32)
    for s in tl.static_range(STREAMS):
        total += tl.load(streams + (token * STREAMS + s) * width + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * stride + column, (total / STREAMS).to(out.dtype.element_ty), mask=inside)
