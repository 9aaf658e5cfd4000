"""Hyper-connections: four residual streams, how a sublayer reads them, and how its output is mixed into them.

A token has 24 mixing numbers, the products of its four streams with a float32 matrix. The matrix is split into three
bf16 parts, which have 24 bits of mantissa together. The streams are bf16, so these products on the tensor cores are as
exact as products in float32.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import store_codes
from openinfer.kernels.device.norm import start_next, wait_ahead
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
def _inverse(x):
    """1 / x for x > 0, by two instructions; a division takes eight."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _sigmoid(x):
    return _inverse(1.0 + tl.exp(-x))


@triton.jit
def _plus_product(acc, x, weight):
    """acc plus bf16 x times a float32 weight, of which each part has eight bits, cut off: conversions run at an eighth
    of the rate. fma, because by a plain sum one product would begin with the last, and they would not overlap."""
    for _ in tl.static_range(3):
        bits = weight.to(tl.int32, bitcast=True)
        part = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        acc = tl.fma(tl.dot(x, part), 1.0, acc)
        weight -= (bits & -65536).to(tl.float32, bitcast=True)
    return acc


@triton.jit
def _sinkhorn(c, hc_eps, iters):
    """Sixteen logits, row by row, as rows and columns that sum to one."""
    exps = ()
    for j in tl.static_range(4):
        most = tl.maximum(tl.maximum(c[4 * j], c[4 * j + 1]), tl.maximum(c[4 * j + 2], c[4 * j + 3]))
        for k in tl.static_range(4):
            exps += (tl.exp(c[4 * j + k] - most),)
    c, rows = _rows(exps, 0.0), ()
    for n in tl.static_range(16):
        rows += (c[n] + hc_eps,)
    c = _columns(rows, hc_eps)
    for _ in range(1, iters):
        c = _columns(_rows(c, hc_eps), hc_eps)
    return c


@triton.jit
def _rows(c, hc_eps):
    found = ()
    for j in tl.static_range(4):
        share = _inverse(c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3] + hc_eps)
        for k in tl.static_range(4):
            found += (c[4 * j + k] * share,)
    return found


@triton.jit
def _columns(c, hc_eps):
    shares = ()
    for k in tl.static_range(4):
        shares += (_inverse(c[k] + c[4 + k] + c[8 + k] + c[12 + k] + hc_eps),)
    found = ()
    for j in tl.static_range(4):
        for k in tl.static_range(4):
            found += (c[4 * j + k] * shares[k],)
    return found


@triton.jit
def _mixing(mix, token, hc_eps, iters):
    """The twenty numbers of hc_post from a token's logits: post, then C row by row."""
    post, c = (), ()
    for k in tl.static_range(4):
        post += (2.0 * _sigmoid(tl.load(mix + token * 20 + k, cache_modifier=".cg")),)
    for n in tl.static_range(16):
        c += (tl.load(mix + token * 20 + 4 + n, cache_modifier=".cg"),)
    return post + _sinkhorn(c, hc_eps, iters)


@triton.jit
def hc_numbers(
    partial, streams, fn, tokens, K,
    NUMBERS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """partial float32 [SPLIT, T, 32] = the products of streams [T, K] with fn [NUMBERS, K], by parts of STEPS * BK
    columns. BK divides K. Grid (SPLIT, cdiv(T, BT)). No kernel writes fn: few steps of it are read before the wait."""
    part = tl.program_id(0)
    row, number, column = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, 32), tl.arange(0, BK)
    first = part * STEPS * BK
    left = streams + row.to(tl.int64)[:, None] * K + first + column[None, :]
    right = fn + number[None, :] * K + first + column[:, None]
    inside, known = (row < tokens)[:, None], (number < NUMBERS)[None, :]
    acc = tl.zeros((BT, 32), tl.float32)
    if STEPS <= 2:
        weights = ()
        for step in tl.static_range(STEPS):
            here = known & (first + step * BK < K)
            weights += (tl.load(right + step * BK, mask=here, other=0.0),)
        wait_ahead(EARLY)
        for step in tl.static_range(STEPS):
            here = inside & (first + step * BK < K)
            x = tl.load(left + step * BK, mask=here, other=0.0, cache_modifier=".cg")
            acc = _plus_product(acc, x, weights[step])
    else:
        wait_ahead(EARLY)
        for k in range(0, tl.minimum(STEPS * BK, K - first), BK):
            x = tl.load(left + k, mask=inside, other=0.0)
            acc = _plus_product(acc, x, tl.load(right + k, mask=known, other=0.0))
    place = partial + (part.to(tl.int64) * tokens + row)[:, None] * 32 + number[None, :]
    tl.store(place, acc, mask=inside & known)


@triton.jit
def hc_collapse(
    out, codes, scales, mix, streams, partial, base, scale, norm_weight, tokens, width, eps, hc_eps,
    BLOCKS: tl.constexpr, NUMBERS: tl.constexpr, NORM: tl.constexpr, CODED: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of streams[t] [4, width], each times its number, rounded; with NORM its RMS norm, and that as
    codes and scales if CODED (store_codes). width <= BLOCKS * 128. mix float32 [T, 20] = the logits of the numbers that
    follow, if there are NUMBERS > 4. Grid (T,). hc_numbers, which alone is ahead, writes none of what is read before
    the wait, past the first-level cache (norm.wait_ahead)."""
    token = tl.program_id(0).to(tl.int64)
    block, part, number = tl.arange(0, BLOCKS), tl.arange(0, SPLIT), tl.arange(0, 32)
    known = number < NUMBERS
    gain = tl.load(scale + tl.minimum(number // 4, 2), mask=known, other=0.0)
    bias = tl.load(base + number, mask=known, other=0.0)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    old, squares = (), tl.zeros((BLOCKS, 128), tl.float32)
    for s in tl.static_range(4):
        place = streams + (token * 4 + s) * width + column
        x = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        squares += x * x
        old += (x,)
    if NORM:
        weight = tl.load(norm_weight + column, mask=inside, other=0.0)
    unit = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (4 * width) + eps)
    start_next(EARLY)
    of_parts = partial + (part[:, None] * tokens + token) * 32 + number[None, :]
    found = tl.load(of_parts, mask=known[None, :], other=0.0, cache_modifier=".cg")
    logits = tl.sum(found, 0) * (unit * gain) + bias
    numbers = _sigmoid(logits) + hc_eps
    value = tl.zeros((BLOCKS, 128), tl.float32)
    for s in tl.static_range(4):
        value += old[s] * tl.sum(tl.where(number == s, numbers, 0.0), 0)
    dtype = out.dtype.element_ty
    value = value.to(dtype)
    if NORM:
        wide = value.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / width + eps)
        value = (normed * weight).to(dtype)
    tl.store(out + token * width + column, value, mask=inside)
    if CODED:
        store_codes(codes, scales, value.to(tl.float32), token, block, width)
    if NUMBERS > 4:
        tl.store(mix + token * 20 + number - 4, logits, mask=known & (number >= 4))


@triton.jit
def hc_post(streams, y, mix, hc_eps, iters, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """streams[t, k] = post_k * y[t] + sum over j of C[j, k] * streams[t, j], in place. Grid (T, cdiv(width, BLOCK)).
    All but y is read before the wait, and the numbers are found then: only y may be of the kernels ahead. hc_numbers,
    which is behind, starts at once: no kernel writes what it reads before its wait."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = streams + token * 4 * width + column
    old = ()
    for j in tl.static_range(4):
        x = tl.load(place + j * width, mask=inside, other=0.0, cache_modifier=".cg")
        old += (x.to(tl.float32),)
    if EARLY:
        m = _mixing(mix, token, hc_eps, iters)
    start_next(EARLY)
    added = tl.load(y + token * width + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if not EARLY:
        m = _mixing(mix, token, hc_eps, iters)
    for k in tl.static_range(4):
        total = added * m[k]
        for j in tl.static_range(4):
            total += old[j] * m[4 + 4 * j + k]
        tl.store(place + k * width, total.to(streams.dtype.element_ty), mask=inside)


@triton.jit
def hc_post_ranks(
    streams, y, mix, hc_eps, iters, peers, rank, first,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr, BASE: tl.constexpr, COUNTS: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """hc_post of the sum of the y of all ranks, rounded. A row here is one of the PARTS of a token, of WIDTH columns;
    programs, peers and counts are those of push_sum."""
    index = tl.arange(0, WIDTH // 8).to(tl.int64)
    inside = tl.full([WIDTH // 8], 1, tl.int32)
    none = tl.zeros([WIDTH // 8], tl.int32)
    program = tl.program_id(0)
    own, others = tl.load(peers + rank), others_of(peers, rank, RANKS)
    lost = tl.load(peers + RANKS) + tl.zeros([WIDTH // 8], tl.int64)
    row = (first + program).to(tl.int64)
    token, part = row // PARTS, row % PARTS
    place = streams.to(tl.int64) + (token * (4 * PARTS) + part) * (WIDTH * 2) + index * 16
    old = ()
    for j in tl.static_range(4):
        old += (load16(place + j * (PARTS * WIDTH * 2), inside),)
    if EARLY:
        m = _mixing(mix, token, hc_eps, iters)
    wait_ahead(EARLY)
    count = calls_of(peers, program, RANKS, COUNTS)
    call = tl.load(count, cache_modifier=".cg")
    a, b, c, d = load16(y.to(tl.int64) + row * (WIDTH * 2) + index * 16, inside)
    if not EARLY:
        m = _mixing(mix, token, hc_eps, iters)
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
