"""Number formats of the checkpoint, and the rounding of values that the published code does while it runs (q8, q4).

Rounded values are returned as float32; a scale is always a power of two, so q8 and q4 values are exact in bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import ml_dtypes
import numpy as np

from openinfer.kernels.formats.int4 import int4_values, is_int4

Array = np.ndarray[Any, Any]

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1 by code; bit 3 is the sign."""

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = np.append(2.0 ** np.arange(-127.0, 128), np.nan).astype(np.float32)

SCALE_BLOCK = 128
"""Rows and columns of a float8 weight that share one scale."""

FP4_BLOCK = 32
"""Columns of an FP4 weight that share one scale."""

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_CACHED = 1 << 18
"""Values that are converted at once: a core's cache holds the arrays between the steps of a conversion."""
CODED_LEAST = 1e-10
"""The least magnitude that `coded` scales to E4M3_MAX."""

Coding = Literal["block", "token", "tensor"]
"""How activations are quantised to e4m3: with a scale for each SCALE_BLOCK columns of a token, with one for each token,
or with one that is known beforehand."""
Q8_LEAST, Q4_LEAST = 1e-4, 6 * 2.0**-126
"""The least magnitudes: a block whose largest magnitude is smaller is scaled as if it had this one."""


def e8m0(scales: Array) -> Array:
    """Bytes b as float32 2^(b - 127). 255 is NaN."""
    return np.asarray(_E8M0_VALUES[scales])


def unpack_fp4(packed: Array) -> Array:
    """uint8 [..., K / 2] as float32 [..., K]: the low nibble is the even column."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return np.asarray(FP4_VALUES[both.reshape(*packed.shape[:-1], -1)])


def of_rows(weight: Any, scales: Any) -> bool:
    """Whether scales of a float8 weight [..., N, K] are of its rows, [..., N, 1], and not of blocks."""
    return bool(scales.shape[-2:] == (weight.shape[-2], 1) and weight.shape[-2] > 1 and not is_int4(scales))


def dequantized(weight: Array, scales: Array | None, *, parts: int = 1) -> Array:
    """A weight [..., N, K] (FP4: [..., N, K / 2]) as float32, exactly: contract.expect_weight where scales are float32
    or the words of INT4, contract.expect_packed where they are bytes. `parts`: projections stacked in N."""
    if scales is None:
        return weight.astype(np.float32, copy=False)
    if is_int4(scales):
        return int4_values(weight, scales)
    wide = scales if scales.dtype == np.float32 else e8m0(scales)
    if weight.dtype == np.uint8:
        values = unpack_fp4(weight)
        return np.asarray(values * np.repeat(wide, values.shape[-1] // scales.shape[-1], axis=-1))
    if of_rows(weight, scales):
        return np.asarray(weight.astype(np.float32) * wide)
    n, k = weight.shape[-2:]
    columns = np.repeat(wide, SCALE_BLOCK, axis=-1)[..., :k]
    each, rows = scales.shape[-2] // parts, n // parts
    stacked = [
        np.repeat(columns[..., part * each : (part + 1) * each, :], SCALE_BLOCK, axis=-2)[..., :rows, :]
        for part in range(parts)
    ]
    return np.asarray(weight.astype(np.float32) * np.concatenate(stacked, axis=-2))


def halves(weight: Array, scales: Array | None) -> tuple[Array, Array]:
    """The gate's and the up projection's half of a weight [..., 2 I, H], each as float32 [..., I, H]."""
    wide, inter = dequantized(weight, scales, parts=2), weight.shape[-2] // 2
    return wide[..., :inter, :], wide[..., inter:, :]


def _scale(x: Array, least: float, most: float) -> Array:
    """2^ceil(log2(max |x| / most)) over the last axis, kept."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(least)) / np.float32(most)
    mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.asarray(np.ldexp(np.float32(1), exponent - (mantissa == 0.5)), np.float32)


def coded(x: Array, coding: Coding | None, x_scale: Array | None = None) -> Array:
    """Float32 values of x [T, K] after they were quantised to e4m3; x itself for None. Without x_scale [1], a scale
    makes the largest magnitude of its columns E4M3_MAX."""
    if coding is None:
        return x
    wide, most = x.astype(np.float32, copy=False), np.float32(E4M3_MAX)
    if coding == "tensor":
        assert x_scale is not None
        scale, inverse = x_scale, np.float32(1) / x_scale
    else:
        width = x.shape[1]
        block = SCALE_BLOCK if coding == "block" else width
        largest = np.maximum.reduceat(np.abs(wide), list(range(0, width, block)), axis=1)
        largest = np.repeat(np.maximum(largest, np.float32(CODED_LEAST)), block, axis=1)[:, :width]
        scale, inverse = largest / most, most / largest
    codes = np.clip(wide * inverse, -most, most).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(codes.astype(np.float32) * scale)


def row_scales(weight: Array) -> Array:
    """float32 [N, 1]: scales that give the largest magnitude of each row E4M3_MAX; 1 for a row of zeros. Raises
    ValueError for values that are not finite."""
    wide = weight.astype(np.float32)
    return _scales_of(np.maximum(wide.max(axis=1, keepdims=True), -wide.min(axis=1, keepdims=True)))


def row_codes(weight: Array, *, columns: slice) -> Array:
    """Some columns of a weight as float8, by the scales of whole rows."""
    scales, part = row_scales(weight), weight[:, columns]
    codes, step = np.empty(part.shape, np.uint8), max(1, _CACHED // part.shape[1])
    for row in range(0, len(part), step):
        rows = slice(row, row + step)
        _e4m3_codes(part[rows].astype(np.float32) / scales[rows], codes[rows])
    return codes.view(ml_dtypes.float8_e4m3fn)


def block_scales(weight: Array) -> Array:
    """float32 scales of the blocks of a weight [..., N, K], all rows of which count: they give the largest magnitude of
    each block E4M3_MAX. Raises ValueError for values that are not finite."""
    rows = weight.reshape(-1, weight.shape[-1])
    height, width = (np.arange(0, size, SCALE_BLOCK) for size in rows.shape)
    wide = [np.abs(rows[row : row + SCALE_BLOCK].astype(np.float32)).max(axis=0) for row in height]
    return _scales_of(np.maximum.reduceat(np.array(wide), width, axis=1))


def block_codes(weight: Array) -> Array:
    """A weight as float8 [N, K], by the scales of blocks."""
    rows = weight.reshape(-1, weight.shape[-1])
    scales, codes = block_scales(rows), np.empty(rows.shape, np.uint8)
    for index, scale in enumerate(np.repeat(scales, SCALE_BLOCK, axis=1)[:, : rows.shape[1]]):
        block = slice(index * SCALE_BLOCK, (index + 1) * SCALE_BLOCK)
        _e4m3_codes(rows[block].astype(np.float32) / scale, codes[block])
    return codes.view(ml_dtypes.float8_e4m3fn)


def _scales_of(largest: Array) -> Array:
    if not np.isfinite(largest).all():
        raise ValueError("it has values that are not finite, which float8 cannot hold")
    return np.where(largest > 0, largest / np.float32(E4M3_MAX), np.float32(1))


def _e4m3_codes(values: Array, out: Array) -> None:
    """Round finite float32 to e4m3 codes, by a table of all bfloat16: several times as fast as a conversion of numpy.
    The last bit of a bfloat16 says whether bits were cut off, so ties are known."""
    bits = values.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    np.take(_e4m3_table(), upper, out=out, mode="clip")


@functools.cache
def _e4m3_table() -> Array:
    """The codes of all bfloat16, by their bits. The codes of NaN mean nothing."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    finite = np.clip(np.nan_to_num(values), -E4M3_MAX, E4M3_MAX)
    return np.asarray(finite.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


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
