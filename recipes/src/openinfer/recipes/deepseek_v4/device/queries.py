"""Norms of the low-rank query and of the key-value vector, which goes into its page."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import store_codes
from openinfer.kernels.device.norm import start_next, wait_ahead
from openinfer.kernels.device.rounding import q8_plain, rotated


@triton.jit
def _normed(x, gain, width, eps, dtype: tl.constexpr):
    """x [1, N], zero from `width` on, over its root mean square and times its weight: rounded, in float32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    return (x * scale * gain).to(dtype).to(tl.float32)


@triton.jit
def _write_query(
    to, scales, token, source, gain, width, eps, BLOCK: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr
):
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    weight = tl.load(gain + column, mask=inside, other=0.0)
    start_next(EARLY)
    x = tl.load(source + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = _normed(x, weight, width, eps, source.dtype.element_ty)
    if CODED:
        blocks = tl.arange(0, BLOCK // 128)
        store_codes(to, scales, tl.reshape(y, (BLOCK // 128, 128)), token, blocks, width)
    else:
        tl.store(to + token * width + column, y.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _write_key(
    to, source, gain, cos_sin, position, eps, D: tl.constexpr, ROTARY: tl.constexpr, QUANTIZED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)[None, :]
    weight = tl.load(gain + column)
    start_next(EARLY)
    x = tl.load(source + column, cache_modifier=".cg").to(tl.float32)
    y = _normed(x, weight, D, eps, source.dtype.element_ty)
    y = rotated(y, cos_sin, position, 1.0, D, ROTARY).to(to.dtype.element_ty).to(tl.float32)
    if QUANTIZED:
        y = q8_plain(y, ROTARY)
    tl.store(to + column, y.to(to.dtype.element_ty))


@triton.jit
def q_kv_write(
    out, scales, kv, qkv, q_norm, kv_norm, cos_sin, positions, token_slots, block_tables,
    width, table_width, page_stride, eps,
    BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, CODED: tl.constexpr,
    QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 2): the query's `width` <= BLOCK columns, which go to `out` (CODED: by store_codes), and the
    key-value vector's D. PAGE 0: kv has no pages. All but qkv is read before the wait."""
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * (width + D)
    if tl.program_id(1) == 0:
        _write_query(out, scales, token, source, q_norm, width, eps, BLOCK, CODED, EARLY)
    else:
        slot = tl.load(token_slots + token, cache_modifier=".cg").to(tl.int64)
        if slot == 0:
            start_next(EARLY)
            return
        position = tl.load(positions + token, cache_modifier=".cg")
        if PAGE:
            of_page = block_tables + slot * table_width + position // PAGE
            page = tl.load(of_page, cache_modifier=".cg").to(tl.int64)
            to = kv + page * page_stride + position % PAGE * D
        else:
            to = kv + token * D
        _write_key(to, source + width, kv_norm, cos_sin, position, eps, D, ROTARY, QUANTIZED, EARLY)


@triton.jit
def place_vectors(
    x, kv, positions, token_slots, block_tables, table_width, page_stride, D: tl.constexpr, PAGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,)."""
    wait_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots + token).to(tl.int64)
    if slot == 0:
        return
    position, column = tl.load(positions + token), tl.arange(0, D)
    page = tl.load(block_tables + slot * table_width + position // PAGE).to(tl.int64)
    tl.store(kv + page * page_stride + position % PAGE * D + column, tl.load(x + token * D + column))
