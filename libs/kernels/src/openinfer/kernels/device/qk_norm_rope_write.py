"""Norms of query and key heads, rotary embedding, and the write into the paged cache, in one pass."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def qk_norm_rope_write(
    q, kv, qkv, q_norm, k_norm, cos_sin, positions, token_slots, block_tables,
    heads, kv_heads, table_width, page_stride, eps,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's heads a program, each as its two halves. Grid (tokens, cdiv(heads + 2 kv_heads, HEADS)).

    Heads are numbered as in qkv: queries, keys, values. HALF_BLOCK: DIM / 2 or the next power of two.
    """
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + token)
    position = tl.load(positions + token)
    page = tl.load(block_tables + slot.to(tl.int64) * table_width + position // PAGE).to(tl.int64)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_BLOCK)
    is_q, is_k = (head < heads)[:, None], (head < heads + kv_heads)[:, None]
    inside = (head < heads + 2 * kv_heads)[:, None] & (column < HALF)[None, :]
    source = qkv + (token * (heads + 2 * kv_heads) + head[:, None]) * DIM + column[None, :]
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + HALF, mask=inside, other=0.0)

    dtype = qkv.dtype.element_ty
    gain = tl.where(is_q, q_norm, k_norm) + column[None, :]
    normed = inside & is_k
    gain_a = tl.load(gain, mask=normed, other=0.0).to(tl.float32)
    gain_b = tl.load(gain + HALF, mask=normed, other=0.0).to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    square = tl.sum(wide_a * wide_a + wide_b * wide_b, 1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]
    wide_a = ((wide_a * scale).to(dtype).to(tl.float32) * gain_a).to(dtype).to(tl.float32)
    wide_b = ((wide_b * scale).to(dtype).to(tl.float32) * gain_b).to(dtype).to(tl.float32)

    angle = cos_sin + position.to(tl.int64) * DIM + column
    cos = tl.load(angle, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=column < HALF, other=0.0)[None, :]
    a = tl.where(is_k, (wide_a * cos - wide_b * sin).to(dtype), a)
    b = tl.where(is_k, (wide_b * cos + wide_a * sin).to(dtype), b)

    to_q = q + (token * heads + head[:, None]) * DIM + column[None, :]
    tl.store(to_q, a, mask=inside & is_q)
    tl.store(to_q + HALF, b, mask=inside & is_q)
    # A page is [K heads | V heads, PAGE, DIM]; tokens of slot 0 are padding and write nowhere.
    cached = inside & (head >= heads)[:, None] & (slot != 0)
    to_kv = (
        kv + page * page_stride + ((head - heads)[:, None] * PAGE + position % PAGE) * DIM + column[None, :]
    )
    tl.store(to_kv, a, mask=cached)
    tl.store(to_kv + HALF, b, mask=cached)
