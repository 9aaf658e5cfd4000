"""Arithmetic that the numpy references share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from openinfer.kernels.op.cores import HOST_WAY, together

Array = np.ndarray[Any, Any]

ROW_TILE = 8
FEW_ROWS = 6
"""Up to so many rows are multiplied one by one: BLAS takes as long for two rows as for eight."""
WEIGHT_BYTES = 1 << 19
"""Of a weight that several rows are multiplied with while it is in a core's cache."""
SHARE = 1 << 19
"""The least products of a row and a weight's numbers for each core: to wake one takes as long as to read 2 MB."""
MANY_ROWS = 64
"""From so many rows on, cores divide the rows of all of an op, not only each product's columns."""
_kept = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialised memory of this thread, which the next call with this name gives out again. New memory of this size
    comes page by page from the system, which takes five times as long as to fill it."""
    nbytes = math.prod(shape) * dtype.itemsize
    found: Array | None = getattr(_kept, name, None)
    if found is None or found.nbytes < nbytes:
        found = np.empty(nbytes + nbytes // 4, np.uint8)
        setattr(_kept, name, found)
    return found[:nbytes].view(dtype).reshape(shape)


def over_rows(count: int, part: Callable[[slice], None]) -> None:
    """Call `part` for slices of `count` rows that do not depend on each other: all at once, or divided among the
    threads of HOST_WAY."""
    threads = HOST_WAY.get().threads
    if threads == 1 or count < MANY_ROWS:
        part(slice(0, count))
    else:
        size = -(-count // (threads * ROW_TILE)) * ROW_TILE
        together([partial(part, slice(start, start + size)) for start in range(0, count, size)])


def f32(x: Array) -> Array:
    """`x` in float32 (itself if it is already)."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Float32 values after one rounding to `dtype`: where a published model stores an intermediate."""
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


def matmul_nt(x: Array, weight: Array) -> Array:
    """x[M, K] @ weight[N, K]^T in float32. Where HOST_WAY says batch_invariant, each row's result is independent of the
    other rows and of M."""
    x, weight = f32(x), f32(weight)
    way, out = HOST_WAY.get(), np.empty((x.shape[0], weight.shape[0]), np.float32)
    product = _by_tiles if way.batch_invariant else _by_rows if len(x) <= FEW_ROWS else _at_once
    # Where a weight is cut may change the last bits of its results.
    rows = ROW_TILE if way.batch_invariant else len(x)
    cores = min(way.threads, rows * weight.size // SHARE)
    if cores < 2:
        product(x, weight, out)
    else:
        size = -(-len(weight) // cores)
        parts = [slice(start, start + size) for start in range(0, len(weight), size)]
        together([partial(product, x, weight[part], out[:, part]) for part in parts])
    return out


def _by_tiles(x: Array, weight: Array, out: Array) -> None:
    """BLAS picks kernels by shape, so rows go through products of one fixed shape, ROW_TILE rows at a time. The weight
    is the left operand, because BLAS takes less time for a tall one."""
    tile = np.zeros((ROW_TILE, x.shape[1]), np.float32)
    for start in range(0, x.shape[0], ROW_TILE):
        rows = x[start : start + ROW_TILE]
        tile[: len(rows)] = rows
        out[start : start + len(rows)] = (weight @ tile.T).T[: len(rows)]


def _by_rows(x: Array, weight: Array, out: Array) -> None:
    size = max(1, len(weight) if len(x) == 1 else WEIGHT_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), size):
        for row, result in zip(x, out, strict=True):
            np.matmul(weight[start : start + size], row, out=result[start : start + size])


def _at_once(x: Array, weight: Array, out: Array) -> None:
    np.matmul(x, weight.T, out=out)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / rms(x) over the last axis, in float32 values of x's dtype; x of any float dtype.

    A float32 weight multiplies before the one rounding; a weight of x's dtype multiplies x / rms(x) rounded, and the
    product is rounded again. (Of a float32 x nothing is rounded.)
    """
    wide = f32(x)
    squares = np.add.reduce(wide * wide, axis=-1, keepdims=True)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps))
    unit = wide * scale if weight.dtype == np.float32 else rounded(wide * scale, x.dtype)
    return rounded(unit * f32(weight), x.dtype)


def rotated_pairs(x: Array, cos_sin: Array, positions: Array, *, back: bool = False) -> Array:
    """Float32 x [T, ..., d] with its last r channels rotated in pairs (2i, 2i + 1) at `positions` [T]; `back`: by minus
    the positions. cos_sin [P, 2, r / 2]."""
    half = cos_sin.shape[2]
    spread = (len(positions), *(1,) * (x.ndim - 2), half)
    cos, sin = (cos_sin[positions, n].reshape(spread) for n in (0, 1))
    sin = -sin if back else sin
    out, even, odd = x.copy(), x[..., -2 * half :: 2], x[..., 1 - 2 * half :: 2]
    out[..., -2 * half :: 2], out[..., 1 - 2 * half :: 2] = even * cos - odd * sin, odd * cos + even * sin
    return out


def normed(x: Array, weight: Array | None, eps: float | None) -> Array:
    """rms_norm of x; x itself without a weight."""
    return x if weight is None or eps is None else rms_norm(x, weight, eps)


def silu(x: Array) -> Array:
    """x * sigmoid(x), in float32, without overflow for large negative x."""
    half = x * np.float32(0.5)
    gate = np.tanh(half)
    gate += np.float32(1)  # in place: new memory takes longer than the arithmetic
    return np.asarray(np.multiply(gate, half, out=gate), np.float32)
