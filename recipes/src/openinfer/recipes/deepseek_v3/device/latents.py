"""A token's latent into its page, beside the norm of the query's low-rank vector and an indexer's key; the heads'
queries, split; and attention to the latents of a context, or to those that an indexer chose: a latent is key and value
of all heads, beside a rotated key.

A program of attention has BM heads of a token, so that a latent is read once for them. The blocks of BN positions are
dealt to the token's parts in turn. The softmax is online, in base 2 and float32; `scale` holds log2(e). The C numbers
are taken in four quarters, because a thread then has few rows of each, and few addresses.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.rounding import rotated

LOW = tl.constexpr(-1.0e30)
"""A hidden score. exp2 of its distance to a real score is 0; exp2 of its distance to itself is 1 and not NaN."""


@triton.jit
def _normed(x, gain, width, eps):
    """x [1, N], zero from `width` on, over its root mean square and times its weight."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None] * gain


@triton.jit
def write_latents(
    qr, kv, qkv, q_norm, kv_norm, cos_sin, positions, token_slots, block_tables, index_key, index_norm, index_pages,
    width, qkv_stride, key_stride, table_width, page_stride, key_page_stride, eps, key_eps,
    BLOCK: tl.constexpr, C: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 2): the query's `width` <= BLOCK columns, and the cache's C + ROTARY; 3: an indexer's KEY, too."""
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * qkv_stride
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)[None, :]
        inside = column < width
        x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        y = _normed(x, tl.load(q_norm + column, mask=inside, other=0.0), width, eps)
        tl.store(qr + token * width + column, y.to(qr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(token_slots + token).to(tl.int64)
        if slot == 0:
            return
        position = tl.load(positions + token)
        page = tl.load(block_tables + slot * table_width + position // PAGE).to(tl.int64)
        if KEY > 0:  # noqa: SIM102 - tl.arange(0, 0) is none
            if tl.program_id(1) == 2:
                each = tl.arange(0, KEY)[None, :]
                x = tl.load(index_key + token * key_stride + each).to(tl.float32)
                x -= tl.sum(x, 1)[:, None] / KEY
                x = _normed(x, tl.load(index_norm + each), KEY, key_eps) + tl.load(index_norm + KEY + each)
                x = rotated(x, cos_sin, position, 1.0, KEY, ROTARY)
                to = index_pages + page * key_page_stride + position % PAGE * KEY
                tl.store(to + each, x.to(to.dtype.element_ty))
                return
        to = kv + page * page_stride + position % PAGE * (C + ROTARY)
        number, turn = tl.arange(0, C)[None, :], tl.arange(0, ROTARY)[None, :]
        latent = tl.load(source + width + number).to(tl.float32)
        latent = _normed(latent, tl.load(kv_norm + number), C, eps)
        tl.store(to + number, latent.to(to.dtype.element_ty))
        key = rotated(
            tl.load(source + width + C + turn).to(tl.float32), cos_sin, position, 1.0, ROTARY, ROTARY
        )
        tl.store(to + C + turn, key.to(to.dtype.element_ty))


@triton.jit
def split_queries(
    plain, turned, q, cos_sin, positions, heads,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token; PLAIN <= BLOCK. Grid (tokens, cdiv(heads, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column, turn = tl.arange(0, BLOCK)[None, :], tl.arange(0, ROTARY)[None, :]
    row, real = token * heads + head, head < heads
    source, inside = q + row * (PLAIN + ROTARY), real & (column < PLAIN)
    tl.store(plain + row * PLAIN + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)
    x = tl.load(source + PLAIN + turn, mask=real, other=0.0).to(tl.float32)
    y = rotated(x, cos_sin, tl.load(positions + token), 1.0, ROTARY, ROTARY)
    tl.store(turned + row * ROTARY + turn, y.to(turned.dtype.element_ty), mask=real)


@triton.jit
def latent_attend(
    out, q, turned, kv, selected, block_tables, partial, weight, positions, token_slots, heads, table_width,
    page_stride, scale,
    C: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, ROTARY: tl.constexpr, PAGE_BITS: tl.constexpr,
    BM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, tokens, cdiv(heads, BM)). A page has 2^PAGE_BITS positions of C + ROTARY numbers. MOST: the columns
    of `selected`; 0: all positions are seen. With SPLITS > 1 it writes what `merge_latents` reads, in float32: partial
    [tokens, SPLITS, heads, C], weight the same less C."""
    QUARTER: tl.constexpr = C // 4
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, i = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BN)
    slot = tl.load(token_slots + token).to(tl.int64)
    end = tl.load(positions + token) + 1
    if MOST > 0:
        end = tl.minimum(end, MOST)
    column, turn = tl.arange(0, QUARTER)[None, :], tl.arange(0, ROTARY)[None, :]
    inside, row = (head < heads)[:, None], token * heads + head[:, None]
    place = row * C + column
    if slot == 0:
        if SPLITS == 1:
            for quarter in tl.static_range(4):
                zero = tl.zeros((BM, QUARTER), out.dtype.element_ty)
                tl.store(out + place + quarter * QUARTER, zero, mask=inside)
        return
    if part * BN >= end:
        return
    qs = ()
    for quarter in tl.static_range(4):
        qs += (tl.load(q + place + quarter * QUARTER, mask=inside, other=0.0),)
    rotary = tl.load(turned + row * ROTARY + turn, mask=inside, other=0.0)
    m = tl.full((BM,), LOW, tl.float32)
    l, none = tl.zeros((BM,), tl.float32), tl.zeros((BM, QUARTER), tl.float32)
    acc = (none, none, none, none)
    for first in range(part * BN, end, SPLITS * BN):
        number = first + i
        live = number < end
        if MOST > 0:
            number = tl.load(selected + token * MOST + number, mask=live, other=0)
        page = tl.load(block_tables + slot * table_width + (number >> PAGE_BITS), mask=live, other=0).to(
            tl.int64
        )
        at = page * page_stride + (number & ((1 << PAGE_BITS) - 1)) * (C + ROTARY)
        key, real = (kv + at)[:, None] + column, live[:, None]  # what was never written may be NaN
        keys, new = (), ()
        for quarter in tl.static_range(4):
            keys += (tl.load(key + quarter * QUARTER, mask=real, other=0.0),)
        kr = tl.load((kv + at)[:, None] + C + turn, mask=real, other=0.0)
        score = tl.dot(qs[0], tl.trans(keys[0]))
        for quarter in tl.static_range(1, 4):
            score = tl.dot(qs[quarter], tl.trans(keys[quarter]), score)
        score = tl.dot(rotary, tl.trans(kr), score) * scale
        score = tl.where(live[None, :], score, LOW)
        top = tl.maximum(m, tl.max(score, 1))
        p = tl.exp2(score - top[:, None])
        decay = tl.exp2(m - top)
        for quarter in tl.static_range(4):
            new += (tl.dot(p.to(kv.dtype.element_ty), keys[quarter], acc[quarter] * decay[:, None]),)
        acc = new
        l = l * decay + tl.sum(p, 1)
        m = top
    to = out + place
    if SPLITS > 1:
        own = (token * SPLITS + part) * heads + head
        tl.store(weight + own, m + tl.log2(l), mask=head < heads)
        to = partial + own[:, None] * C + column
    less = (1.0 / l)[:, None]
    for quarter in tl.static_range(4):
        tl.store(to + quarter * QUARTER, (acc[quarter] * less).to(to.dtype.element_ty), mask=inside)


@triton.jit
def merge_latents(
    out, partial, weight, positions, token_slots, heads,
    C: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A quarter of a head's numbers from its parts; PARTS: a power of two, at least SPLITS. Grid (tokens, heads, 4)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, column = tl.arange(0, PARTS), (tl.program_id(2) * (C // 4) + tl.arange(0, C // 4))[None, :]
    real = (part < SPLITS) & (part * BN <= tl.load(positions + token)) & (tl.load(token_slots + token) != 0)
    own = (token * SPLITS + part) * heads + head
    logs = tl.load(weight + own, mask=real, other=LOW)
    parts = tl.load(partial + own[:, None] * C + column, mask=real[:, None], other=0.0)
    share = tl.exp2(logs - tl.max(logs, 0))
    share = tl.where(real, share / tl.sum(share, 0), 0.0)
    o = tl.sum(share[:, None] * parts, 0)[None, :]
    tl.store(out + (token * heads + head) * C + column, o.to(out.dtype.element_ty))
