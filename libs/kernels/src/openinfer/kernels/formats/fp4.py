"""FP4 weights (E2M1): NVFP4, MXFP4.

NVFP4 has a float8_e4m3fn scale for each 16 columns, and a float32 factor of the whole tensor, which multiplies
(modelopt's `weight_scale_2`) or divides (`weight_global_scale` of compressed-tensors). MXFP4 has an E8M0 exponent for
each 32 columns (byte b is 2^(b - 127)). Checkpoints have two codes in a byte, column 2i in the low nibble of byte i:
`weight` of modelopt and quark, `weight_packed` of compressed-tensors. What they publish for activations in FP4 is
ignored: activations stay plain.

Here both have one form. codes: uint8 [..., N, K / 2], whose pairs of bytes have the columns that INT4's have
(formats.int4). Of a pair's four codes, from the lowest bits on, the first three have their lower bits in three bits of
the pair each, and their signs in bits 9, 12 and 15: where bfloat16 has them after a shift. The fourth has what is left,
its lower bits in bits 14, 10 and 11, and its sign in bit 13.

scales: uint8 [..., N, fp4_row(K)], a byte for each 16 columns, and zeros up to a multiple of 16 bytes; then the row's
factor in float32, because stacked projections have factors of their own, and zeros. Byte 8 e + m is a scale of
(1 + m / 8) 2^(e - 30). A row's largest scale has e = 31, so a smaller one than 2^-31 of it, or zero, counts as that.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.formats.groups import CodedForm, Grouped, Stored, WeightPart, finite
from openinfer.kernels.formats.int4 import of_rows, unpack
from openinfer.kernels.op.rounding import FP4_BLOCK, FP4_VALUES, Array, e8m0
from openinfer.tensor import float8_e4m3fn, float32, uint8

NVFP4_BLOCK = 16
"""Columns of NVFP4 that share one scale."""
FP4_TAIL = 16
"""Bytes with a row's factor, so that rows begin at a multiple of 16 bytes and can be copied in bulk."""


def _in_pairs() -> Array:
    """For each pair of bytes of INT4's order the pair here."""
    pair = np.arange(1 << 16, dtype=np.uint32)
    spread = sum((pair >> 4 * i & 7) << 3 * i | (pair >> 4 * i + 3 & 1) << 3 * i + 9 for i in range(3))
    last = pair >> 12
    return np.asarray(spread | (last & 1) << 14 | (last >> 1 & 3) << 10 | last >> 3 << 13).astype(np.uint16)


_PAIRS = _in_pairs()
_OF_PAIRS = np.argsort(_PAIRS).astype(np.uint16)


def fp4_row(k: int) -> int:
    """Bytes of the scales and the factor of a row of k columns."""
    return -(-k // (16 * NVFP4_BLOCK)) * 16 + FP4_TAIL


@dataclass(frozen=True, slots=True)
class Fp4(CodedForm):
    """FP4: codes and scales as above."""

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Fp4 | None":
        """The form of these tensors or arrays, None for another format's."""
        fits = weight.dtype == scales.dtype == uint8 and scales.shape[-1] == fp4_row(2 * weight.shape[-1])
        return cls() if fits else None

    def __str__(self) -> str:
        return "FP4"

    def code(self) -> tuple[np.dtype[Any], int]:
        return uint8, 2

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return (*shape[:-1], fp4_row(shape[-1])), uint8

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        codes = unpack(_OF_PAIRS[np.ascontiguousarray(weight).view(np.uint16)].view(np.uint8))
        found = scales[..., : codes.shape[-1] // NVFP4_BLOCK].astype(np.int32)
        factors = np.ascontiguousarray(scales[..., -FP4_TAIL : 4 - FP4_TAIL]).view(np.float32)
        wide = np.ldexp(1 + (found & 7) / 8, (found >> 3) - 30).astype(np.float32)
        return np.asarray(FP4_VALUES[codes] * np.repeat(wide, NVFP4_BLOCK, axis=-1) * factors)


def fp4_pairs(packed: Array) -> Array:
    """The codes in the order above of codes in INT4's order, uint8 [..., N, K / 2]."""
    return np.asarray(_PAIRS[np.ascontiguousarray(packed).view(np.uint16)].view(np.uint8))


def fp4_scales(scales: Array, factors: Array | float) -> Array:
    """The bytes of scales [..., N, K / 16] and of the factors of rows [..., N, 1]. Raises ValueError for scales that
    are negative, not finite or have more digits than float8, and for factors that are not above zero."""
    wide, rows = finite(scales), finite(np.asarray(factors, np.float32))
    if (wide < 0).any():
        raise ValueError("a scale is negative")
    if not (rows > 0).all():
        raise ValueError(f"the scale of the tensor is {rows.min()}; it must be above zero")
    bits = wide.view(np.int32)
    if (bits & 0xFFFFF).any():
        raise ValueError("a scale has more digits than float8")
    largest = bits.max(axis=-1, keepdims=True) >> 23
    found = np.zeros((*wide.shape[:-1], fp4_row(NVFP4_BLOCK * wide.shape[-1])), np.uint8)
    found[..., : wide.shape[-1]] = np.maximum((bits >> 20) - 8 * (largest - 31), 0)
    factor = np.where(largest > 0, np.ldexp(rows, largest - 128), np.float32(0))
    found[..., -FP4_TAIL : 4 - FP4_TAIL] = finite(factor).view(np.uint8)
    return found


def nvfp4_packing(style: str) -> Grouped:
    """How checkpoints of "modelopt" and "compressed-tensors" store NVFP4."""
    scales = Stored(".weight_scale", 1, NVFP4_BLOCK, float8_e4m3fn)
    if style == "modelopt":
        factor, codes = Stored(".weight_scale_2", None, None, float32), Stored(".weight", 1, 2, uint8)
        ignored = (".input_scale",)
        return Grouped("NVFP4", Fp4(), codes, (scales, factor), _ordered, _multiplied, ignored=ignored)
    factor, codes = Stored(".weight_global_scale", None, None, float32), Stored(".weight_packed", 1, 2, uint8)
    ignored = (".input_global_scale",)
    return Grouped("NVFP4", Fp4(), codes, (scales, factor), _ordered, _divided, ignored=ignored)


def mxfp4_packing(codes: str) -> Grouped:
    """How checkpoints store MXFP4, whose codes are in the tensor `codes`."""
    scales = Stored(".weight_scale", 1, FP4_BLOCK, uint8)
    return Grouped("MXFP4", Fp4(), Stored(codes, 1, 2, uint8), (scales,), _ordered, _exponents)


def _ordered(codes: Array) -> Array:
    return fp4_pairs(of_rows(np.ascontiguousarray(codes).view(np.int32)))


def _multiplied(part: WeightPart, scales: Array, factor: Array) -> Array:
    return fp4_scales(scales, factor.reshape(1))


def _divided(part: WeightPart, scales: Array, divisor: Array) -> Array:
    with np.errstate(divide="ignore"):
        return fp4_scales(scales, np.float32(1) / divisor.astype(np.float32).reshape(1))


def _exponents(part: WeightPart, scales: Array) -> Array:
    return fp4_scales(np.repeat(e8m0(scales), FP4_BLOCK // NVFP4_BLOCK, axis=-1), 1.0)
