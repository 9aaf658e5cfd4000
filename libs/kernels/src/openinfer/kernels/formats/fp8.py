"""FP8 weights with float32 scales: of blocks of 128 x 128 numbers, or of rows. And FP8 and FP4 weights with scales of
E8M0, which are exponents: byte b is 2^(b - 127)."""

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from openinfer.kernels.formats.groups import CodedForm
from openinfer.kernels.op.rounding import E4M3_MAX, FP4_BLOCK, SCALE_BLOCK, Array, Coding, e8m0, unpack_fp4
from openinfer.tensor import float8_e4m3fn, float32, uint8

_CACHED = 1 << 18
"""Values that are converted at once: a core's cache holds the arrays between the steps of a conversion."""


@dataclass(frozen=True, slots=True)
class Fp8(CodedForm):
    """float8_e4m3fn [..., N, K] and float32 scales: `by_row` [..., N, 1], else [..., parts * ceil(N / parts / 128),
    ceil(K / 128)], where blocks begin anew at each of the `parts` projections that are stacked in N."""

    by_row: bool

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Fp8":
        """The form of these tensors or arrays, if they are of no other format."""
        rows = weight.shape[-2]
        return cls(rows > 1 and scales.shape[-2:] == (rows, 1))

    def __str__(self) -> str:
        return f"FP8 with scales of {'rows' if self.by_row else 'blocks'}"

    def code(self) -> tuple[np.dtype[Any], int]:
        return float8_e4m3fn, 1

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        rows = (shape[-2], 1) if self.by_row else scale_shape(shape, parts)
        return (*shape[:-2], *rows), float32

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        wide = scales if self.by_row else of_blocks(scales, weight.shape, parts)
        return np.asarray(weight.astype(np.float32) * wide)

    def allows(self, coding: Coding | None) -> bool:
        return coding is None or coding in (("token", "tensor") if self.by_row else ("block",))


def scale_shape(shape: tuple[int, ...], parts: int) -> tuple[int, int]:
    """The scales of blocks of a weight [..., N, K]."""
    n, k = shape[-2:]
    return parts * -(-n // parts // SCALE_BLOCK), -(-k // SCALE_BLOCK)


def of_blocks(scales: Array, shape: tuple[int, ...], parts: int) -> Array:
    """The scale of each number of a weight [..., N, K], from those of blocks."""
    n, k = shape[-2:]
    columns = np.repeat(scales, SCALE_BLOCK, axis=-1)[..., :k]
    each, rows = scales.shape[-2] // parts, n // parts
    stacked = [
        np.repeat(columns[..., part * each : (part + 1) * each, :], SCALE_BLOCK, axis=-2)[..., :rows, :]
        for part in range(parts)
    ]
    return np.concatenate(stacked, axis=-2)


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


FP8_SCALE_MOST, FP4_SCALE_MOST = 134, 128
"""The largest bytes of scales that kernels take."""


@dataclass(frozen=True, slots=True)
class Mx(CodedForm):
    """uint8 scales, at most FP8_SCALE_MOST or FP4_SCALE_MOST; codes are numbers, no NaN. `fp4`: uint8 [..., N, K / 2],
    column 2i in the low nibble of byte i, with scales [..., N, K / 32]. Else float8_e4m3fn with scales of blocks as
    fp8.Fp8 has them. Products of float8 codes take an FP4 block whose byte is below 102 for zero: it holds less than
    2^-22."""

    fp4: bool

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Mx | None":
        """The form of these tensors or arrays, None for another format's."""
        return cls(weight.dtype == uint8) if scales.dtype == uint8 else None

    def __str__(self) -> str:
        return f"FP{4 if self.fp4 else 8} with E8M0 scales"

    def code(self) -> tuple[np.dtype[Any], int]:
        return (uint8, 2) if self.fp4 else (float8_e4m3fn, 1)

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        n, k = shape[-2:]
        return (*shape[:-2], *((n, k // FP4_BLOCK) if self.fp4 else scale_shape(shape, parts))), uint8

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        if self.fp4:
            return np.asarray(unpack_fp4(weight) * np.repeat(e8m0(scales), FP4_BLOCK, axis=-1))
        return np.asarray(weight.astype(np.float32) * of_blocks(e8m0(scales), weight.shape, parts))
