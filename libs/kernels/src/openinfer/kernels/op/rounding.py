"""The rounding of values that published code does while it runs (coded, q8, q4), and the numbers of FP8 and FP4 codes.

Rounded values are returned as float32; a scale of q8 and q4 is a power of two, so their values are exact in bfloat16.
"""

from typing import Any, Literal

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1 by code; bit 3 is the sign."""

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = np.append(2.0 ** np.arange(-127.0, 128), np.nan).astype(np.float32)

SCALE_BLOCK = 128
"""Rows and columns of a float8 weight that share one scale."""

FP4_BLOCK = 32
"""Columns of an FP4 weight that share one scale."""

E4M3_MAX, E2M1_MAX, INT8_MAX = 448.0, 6.0, 127.0
CODED_LEAST = 1e-10
"""The least magnitude that `coded` scales to E4M3_MAX."""

Coding = Literal["block", "token", "tensor", "int8 token", "int8 tensor"]
"""How activations are quantised: to e4m3 with a scale for each SCALE_BLOCK columns of a token, with one for each token,
or with one that is known beforehand; to int8 with one of the latter two."""
BEFOREHAND = ("tensor", "int8 tensor")
"""The codings whose scale is known beforehand."""
Q8_LEAST, Q4_LEAST = 1e-4, 6 * 2.0**-126
"""The least magnitudes: a block whose largest magnitude is smaller is scaled as if it had this one."""


def e8m0(scales: Array) -> Array:
    """Bytes b as float32 2^(b - 127). 255 is NaN."""
    return np.asarray(_E8M0_VALUES[scales])


def unpack_fp4(packed: Array) -> Array:
    """uint8 [..., K / 2] as float32 [..., K]: the low nibble is the even column."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return np.asarray(FP4_VALUES[both.reshape(*packed.shape[:-1], -1)])


def _scale(x: Array, least: float, most: float) -> Array:
    """2^ceil(log2(max |x| / most)) over the last axis, kept."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(least)) / np.float32(most)
    mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.asarray(np.ldexp(np.float32(1), exponent - (mantissa == 0.5)), np.float32)


def coded(x: Array, coding: Coding | None, x_scale: Array | None = None) -> Array:
    """Float32 values of x [T, K] after they were quantised; x itself for None. Without x_scale [1], a scale makes the
    largest magnitude of its columns that of the largest code."""
    if coding is None:
        return x
    integers = coding.startswith("int8")
    wide, most = x.astype(np.float32, copy=False), np.float32(INT8_MAX if integers else E4M3_MAX)
    if coding in BEFOREHAND:
        assert x_scale is not None
        scale, inverse = x_scale, np.float32(1) / x_scale
    else:
        width = x.shape[1]
        block = SCALE_BLOCK if coding == "block" else width
        largest = np.maximum.reduceat(np.abs(wide), list(range(0, width, block)), axis=1)
        largest = np.repeat(np.maximum(largest, np.float32(CODED_LEAST)), block, axis=1)[:, :width]
        scale, inverse = largest / most, most / largest
    if integers:
        return np.asarray(np.clip(np.rint(wide * inverse), -most - 1, most) * scale)
    codes = np.clip(wide * inverse, -most, most).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(codes.astype(np.float32) * scale)


def q8_codes(x: Array) -> tuple[Array, Array]:
    """Float32 x [..., n] as e4m3 codes, and the E8M0 bytes [...] of their scales: one power of two for n elements."""
    scale = _scale(x, Q8_LEAST, E4M3_MAX)
    codes = np.clip(x / scale, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes, (np.frexp(scale[..., 0])[1] + 126).astype(np.uint8)


def q8_values(codes: Array, scales: Array) -> Array:
    """The values of q8_codes, float32 [..., n]."""
    return np.asarray(_E4M3_VALUES[codes.view(np.uint8)] * e8m0(scales)[..., None])


def q8(x: Array, block: int) -> Array:
    """Float32 x with every `block` consecutive elements of the last axis rounded to e4m3 with a power-of-two scale."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return q8_values(*q8_codes(blocks)).reshape(x.shape)


def q4(x: Array) -> Array:
    """Float32 x with every 32 consecutive elements of the last axis rounded to E2M1 (ties to the even code) with a
    power-of-two scale."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    scale = _scale(blocks, Q4_LEAST, E2M1_MAX)
    codes = np.clip(blocks / scale, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    return np.asarray((codes.astype(np.float32) * scale).reshape(x.shape))


def hadamard(x: Array) -> Array:
    """The normalised Walsh-Hadamard transform of the last axis (a power of two) in natural order, float32."""
    size, half = x.shape[-1], 1
    y = x
    while half < size:
        pairs = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        half *= 2
    return np.asarray(y * np.float32(size**-0.5), np.float32)
