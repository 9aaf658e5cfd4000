"""Rotations and the roundings of values that the published code does while it runs, in float32."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.recipes.deepseek_v4.device.formats import q8


@triton.jit
def rotated(x, cos_sin, position, sign, D: tl.constexpr, ROTARY: tl.constexpr):
    """x [N, D] with its last ROTARY channels rotated in pairs (2i, 2i + 1) at one position; sign -1: back."""
    pair = tl.arange(0, D // 2) - (D - ROTARY) // 2
    angle = cos_sin + position.to(tl.int64) * ROTARY + pair
    cos = tl.load(angle, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(angle + ROTARY // 2, mask=pair >= 0, other=0.0)[None, :] * sign
    even, odd = tl.split(tl.reshape(x, (x.shape[0], D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (x.shape[0], D))


@triton.jit
def q8_blocks(x, BLOCK: tl.constexpr):
    """x [N, D] through q8, BLOCK consecutive channels at a time."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(q8(tl.reshape(x, (N, D // BLOCK, BLOCK))), (N, D))


@triton.jit
def q8_plain(x, ROTARY: tl.constexpr):
    """x [N, D] with all but the last ROTARY channels through q8, 64 at a time."""
    rotary = tl.arange(0, x.shape[1]) >= x.shape[1] - ROTARY
    return tl.where(rotary[None, :], x, q8_blocks(x, 64))


@triton.jit
def q4(x):
    """x [N, D]: 32 consecutive channels at a time rounded to E2M1, ties to the even code, with one scale of
    2^ceil(log2(max / 6)); 6 = 1.5 * 2^2."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2^23: what is added to it has no fraction left
    blocks = tl.reshape(x, (N, D // 32, 32))
    largest = tl.maximum(tl.max(tl.abs(blocks), 2, keep_dims=True), 7.052966104933725e-38)  # 6 * 2^-126
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    size = tl.abs(blocks) * shrink  # at most 6: 0, 0.5, 1, 1.5, 2, 3, 4, 6 are to be left
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    size = (size * tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5)) + MAGIC - MAGIC) * step
    return tl.reshape(tl.where(blocks < 0, -size, size) * scale, (N, D))


@triton.jit
def hadamard(x, D: tl.constexpr):
    """x [N, D] of a dtype that products take, times the normalised Walsh-Hadamard matrix: float32. N >= 16."""
    both = tl.arange(0, D)[:, None] & tl.arange(0, D)[None, :]
    both ^= both >> 8
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    signs = tl.where(both & 1 == 0, 1.0, -1.0).to(x.dtype)
    return tl.dot(x, signs) * (D**-0.5)
