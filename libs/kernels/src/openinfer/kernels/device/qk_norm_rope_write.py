"""Norms of query and key heads, rotary embedding, and the write into the paged cache, in one pass."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import e4m3, q8_exponent
from openinfer.kernels.device.norm import start_next, weighted


@triton.jit
def qk_norm_rope_write(
    q, kv, kv_scales, qkv, q_norm, k_norm, cos_sin, positions, token_slots, block_tables,
    heads, kv_heads, table_width, page_stride, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's heads a program. Grid (tokens, cdiv(heads + 2 kv_heads, HEADS)).

    Heads are numbered queries, keys, values; in qkv each query head is followed by its gate if GATED. A head is taken
    in three parts: the two halves of the ROTARY elements that are rotated, and the rest. HALF_BLOCK, REST_BLOCK: their
    sizes or the next powers of two; REST_BLOCK is 0 where there is no rest. q_norm and k_norm may be None: no norms.
    kv_scales: the E8M0 bytes of an FP8 cache (see attention.py), or None. EARLY: whether this kernel starts before
    the one ahead has ended, and lets the next one do so (launch.Launch, `early`).
    """
    start_next(EARLY)
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + token)
    position = tl.load(positions + token)
    page = tl.load(block_tables + slot.to(tl.int64) * table_width + position // PAGE).to(tl.int64)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    is_q, is_k = head < heads, head < heads + kv_heads
    is_head = head < heads + 2 * kv_heads
    inside = is_head & (column < HALF)
    place, total = head, heads + 2 * kv_heads
    if GATED:
        place, total = head + tl.minimum(head, heads), total + heads
    source = qkv + (token * total + place) * DIM
    a = tl.load(source + column, mask=inside, other=0.0)
    b = tl.load(source + HALF + column, mask=inside, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    square = tl.sum(wide_a * wide_a + wide_b * wide_b, 1)
    if REST_BLOCK:
        rest_column = ROTARY + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = is_head & (rest_column < DIM)
        rest = tl.load(source + rest_column, mask=in_rest, other=0.0)
        wide_rest = rest.to(tl.float32)
        square += tl.sum(wide_rest * wide_rest, 1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]

    dtype = qkv.dtype.element_ty
    if q_norm is not None:
        gain = tl.where(is_q, q_norm, k_norm)
        normed = inside & is_k
        gain_a = tl.load(gain + column, mask=normed, other=0.0)
        gain_b = tl.load(gain + HALF + column, mask=normed, other=0.0)
        wide_a = weighted(wide_a * scale, gain_a, dtype).to(tl.float32)
        wide_b = weighted(wide_b * scale, gain_b, dtype).to(tl.float32)
    angle = cos_sin + position.to(tl.int64) * ROTARY + column
    cos = tl.load(angle, mask=column < HALF, other=0.0)
    sin = tl.load(angle + HALF, mask=column < HALF, other=0.0)
    a = tl.where(is_k, (wide_a * cos - wide_b * sin).to(dtype), a)
    b = tl.where(is_k, (wide_b * cos + wide_a * sin).to(dtype), b)

    # A page is [K heads | V heads, PAGE, DIM]; tokens of slot 0 are padding and write nowhere.
    to_q = q + (token * heads + head) * DIM
    to_kv = kv + page * page_stride + ((head - heads) * PAGE + position % PAGE) * DIM
    to_cache = (head >= heads) & (slot != 0)
    tl.store(to_q + column, a, mask=inside & is_q)
    tl.store(to_q + HALF + column, b, mask=inside & is_q)
    if kv_scales is None:
        tl.store(to_kv + column, a, mask=inside & to_cache)
        tl.store(to_kv + HALF + column, b, mask=inside & to_cache)
    if REST_BLOCK:
        if q_norm is not None:
            rest_gain = tl.load(gain + rest_column, mask=in_rest & is_k, other=0.0)
            rest = tl.where(is_k, weighted(wide_rest * scale, rest_gain, dtype), rest)
        tl.store(to_q + rest_column, rest, mask=in_rest & is_q)
        if kv_scales is None:
            tl.store(to_kv + rest_column, rest, mask=in_rest & to_cache)
    if kv_scales is not None:
        a, b = a.to(tl.float32), b.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)[:, None]
        if REST_BLOCK:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1)[:, None])
        exponent = q8_exponent(largest)
        to_scale = kv_scales + page * page_stride + (head - heads) * PAGE + position % PAGE
        tl.store(to_scale, exponent.to(tl.uint8), mask=is_head & to_cache)
        tl.store(to_kv + column, e4m3(a, exponent), mask=inside & to_cache)
        tl.store(to_kv + HALF + column, e4m3(b, exponent), mask=inside & to_cache)
        if REST_BLOCK:
            tl.store(to_kv + rest_column, e4m3(rest, exponent), mask=in_rest & to_cache)
