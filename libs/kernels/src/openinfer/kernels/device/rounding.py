"""Rotations and the roundings of values that the published code does while it runs, in float32."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.formats import q8


@triton.jit
def rotated(x, cos_sin, position, sign, D: tl.constexpr, ROTARY: tl.constexpr):
    """x [N, D] with its last ROTARY channels rotated in pairs (2i, 2i + 1) at one position, or at positions [N, 1];
    sign -1: back."""
    pair = tl.arange(0, D // 2)[None, :] - (D - ROTARY) // 2
    angle = cos_sin + position.to(tl.int64) * ROTARY + pair
    cos = tl.load(angle, mask=pair >= 0, other=1.0)
    sin = tl.load(angle + ROTARY // 2, mask=pair >= 0, other=0.0) * sign
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
    MAGIC: tl.constexpr = 12582912.0
    blocks = tl.reshape(x, (N, D // 32, 32))
    largest = tl.maximum(tl.max(tl.abs(blocks), 2, keep_dims=True), 7.052966104933725e-38)  # 6 * 2^-126
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    # At most 6: 0, 0.5, 1, 1.5, 2, 3, 4, 6 are to be left. A sum with 1.5 * 2^23 steps has no fraction of a step.
    small = blocks * shrink
    magic = tl.where(tl.abs(small) < 2, 0.5 * MAGIC, tl.where(tl.abs(small) < 4, MAGIC, 2 * MAGIC))
    return tl.reshape((small + magic - magic) * scale, (N, D))


@triton.jit
def _odd(x):
    """Whether a number below 2^16 has an odd number of ones: 0 or 1."""
    x ^= x >> 8
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return x & 1


@triton.jit
def hadamard(x, D: tl.constexpr):
    """x [N, D] of a dtype that products take, times the normalised Walsh-Hadamard matrix: float32. N >= 16."""
    row = tl.arange(0, D)[:, None, None]
    high, low = tl.arange(0, D // 8)[None, :, None] * 8, tl.arange(0, 8)[None, None, :]
    odd = _odd(row & high) ^ _odd(row & low)  # of row & (high + low), for the work of few columns
    signs = tl.where(odd == 0, 1.0, -1.0).to(x.dtype)
    return tl.dot(x, tl.reshape(signs, (D, D))) * (D**-0.5)


@triton.jit
def hadamard_row(x, D: tl.constexpr):
    """x [1, D], D at most 1,024, times the normalised Walsh-Hadamard matrix, by sums and differences: a product's code
    would take longer to fetch than to run. The bit of the index that is transformed last is the highest one."""
    size: tl.constexpr = D
    for step in tl.static_range(10):
        if (1 << step) < size:
            even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (1, 0)), (1, D))
    return x * (D**-0.5)


@triton.jit
def ordered(x):
    """Float32 numbers as int32 of the same order; both zeros are 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
