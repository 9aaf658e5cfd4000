"""A token's latent into its page, beside the norm of the query's low-rank vector; and the heads' queries, split."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.rounding import rotated


@triton.jit
def _normed(x, gain, width, eps):
    """x [1, N], zero from `width` on, over its root mean square and times its weight."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None] * gain


@triton.jit
def write_latents(
    qr, kv, qkv, q_norm, kv_norm, cos_sin, positions, token_slots, block_tables,
    width, qkv_stride, table_width, page_stride, eps,
    BLOCK: tl.constexpr, C: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 2): the query's `width` <= BLOCK columns, and the C + ROTARY of the cache."""
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
