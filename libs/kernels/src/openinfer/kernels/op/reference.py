"""Arithmetic that the numpy references share."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROW_TILE = 8


def f32(x: Array) -> Array:
    """`x` in float32 (itself if it is already)."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Float32 values after one rounding to `dtype`: where a published model stores an intermediate."""
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


def matmul_nt(x: Array, weight: Array) -> Array:
    """x[M, K] @ weight[N, K]^T in float32, with each row's result independent of the other rows and of M.

    BLAS picks kernels by shape, so rows go through products of one fixed shape, ROW_TILE rows at a time. The weight is
    the left operand, because BLAS takes less time for a tall one.
    """
    x, weight = f32(x), f32(weight)
    out = np.empty((x.shape[0], weight.shape[0]), np.float32)
    tile = np.zeros((ROW_TILE, x.shape[1]), np.float32)
    for start in range(0, x.shape[0], ROW_TILE):
        rows = x[start : start + ROW_TILE]
        tile[: len(rows)] = rows
        out[start : start + len(rows)] = (weight @ tile.T).T[: len(rows)]
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / rms(x) over the last axis, in float32 values of x's dtype; x of any float dtype.

    A float32 weight multiplies before the one rounding; a weight of x's dtype multiplies x / rms(x) rounded, and the
    product is rounded again. (Of a float32 x nothing is rounded.)
    """
    wide = f32(x)
    scale = np.float32(1.0) / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(eps))
    unit = wide * scale if weight.dtype == np.float32 else rounded(wide * scale, x.dtype)
    return rounded(unit * f32(weight), x.dtype)


def normed(x: Array, weight: Array | None, eps: float | None) -> Array:
    """rms_norm of x; x itself without a weight."""
    return x if weight is None or eps is None else rms_norm(x, weight, eps)


def silu(x: Array) -> Array:
    """x * sigmoid(x), in float32, without overflow for large negative x."""
    return np.asarray(x * np.float32(0.5) * (np.float32(1) + np.tanh(x * np.float32(0.5))), np.float32)
