"""FP4 weights (E2M1): NVFP4, MXFP4.

NVFP4 has a float8_e4m3fn scale for each 16 columns, and a float32 factor of the whole tensor, which multiplies
(modelopt's `weight_scale_2`) or divides (`weight_global_scale` of compressed-tensors). MXFP4 has an E8M0 exponent for
each 32 columns (byte b is 2^(b - 127)). Checkpoints have two codes in a byte, column 2i in the low nibble of byte i:
`weight` of modelopt and quark, `weight_packed` of compressed-tensors. What they publish for activations in FP4 is
ignored: activations stay plain.

Here both have one form. codes: uint8 [..., N, K / 2] in the order of INT4's (formats.int4). words: int32
[..., N, K / 32 + FP4_TAIL], for each 32 columns the scales of its two halves as bfloat16, the first in the low bits;
then the bits of the row's factor in float32, because stacked projections have factors of their own, and zeros. Scales,
which bfloat16 holds exactly, are kept times 2^SHIFT, and factors times 2^(126 - SHIFT), for device.fp4. That is 5 bits
a number, where files have 4.5 and 4.25, because kernels copy no less than a word in the background.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.formats.groups import CodedForm, Grouped, Stored, WeightPart, finite
from openinfer.kernels.formats.int4 import of_rows, unpack
from openinfer.kernels.op.rounding import FP4_BLOCK, FP4_VALUES, Array, e8m0
from openinfer.tensor import bfloat16, float8_e4m3fn, float32, int32, uint8

NVFP4_BLOCK = 16
"""Columns of NVFP4 that share one scale."""
SHIFT = 110
FP4_TAIL = 4
"""Words behind those of a row's columns: four, so that rows begin at a multiple of 16 bytes and can be copied in bulk,
where K is a multiple of 128."""


@dataclass(frozen=True, slots=True)
class Fp4(CodedForm):
    """FP4: codes and words as above."""

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Fp4 | None":
        """The form of these tensors or arrays, None for another format's."""
        words = 2 * weight.shape[-1] // FP4_BLOCK + FP4_TAIL
        fits = weight.dtype == uint8 and scales.dtype == int32 and scales.shape[-1] == words
        return cls() if fits else None

    def __str__(self) -> str:
        return "FP4"

    def code(self) -> tuple[np.dtype[Any], int]:
        return uint8, 2

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return (*shape[:-1], shape[-1] // FP4_BLOCK + FP4_TAIL), int32

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        halves = np.ascontiguousarray(scales[..., :-FP4_TAIL]).view(bfloat16).astype(np.float32)
        factors = np.ascontiguousarray(scales[..., -FP4_TAIL, None]).view(np.float32)
        wide = np.repeat(halves * np.float32(2.0**-SHIFT), FP4_BLOCK // 2, axis=-1)
        return np.asarray(FP4_VALUES[unpack(weight)] * wide * (factors * np.float32(2.0 ** (SHIFT - 126))))


def fp4_words(scales: Array, factors: Array | float) -> Array:
    """Words of scales [..., N, K / 16] and of the factors of rows [..., N, 1]. Raises ValueError for scales that are
    negative, not finite or too large, and for factors that are not above zero."""
    wide, rows = finite(scales), finite(np.asarray(factors, np.float32))
    if (wide < 0).any():
        raise ValueError("a scale is negative")
    if wide.max() > 2.0 ** (127 - SHIFT):
        raise ValueError(f"a scale is {wide.max()}; at most 2^{127 - SHIFT} is possible")
    if not (rows > 0).all():
        raise ValueError(f"the scale of the tensor is {rows.min()}; it must be above zero")
    words = np.zeros((*wide.shape[:-1], wide.shape[-1] // 2 + FP4_TAIL), np.int32)
    words[..., :-FP4_TAIL] = (wide * np.float32(2.0**SHIFT)).astype(bfloat16).view(np.int32)
    words[..., -FP4_TAIL, None] = (rows * np.float32(2.0 ** (126 - SHIFT))).view(np.int32)
    return words


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
    return of_rows(np.ascontiguousarray(codes).view(np.int32))


def _multiplied(part: WeightPart, scales: Array, factor: Array) -> Array:
    return fp4_words(scales, factor.reshape(1))


def _divided(part: WeightPart, scales: Array, divisor: Array) -> Array:
    with np.errstate(divide="ignore"):
        return fp4_words(scales, np.float32(1) / divisor.astype(np.float32).reshape(1))


def _exponents(part: WeightPart, scales: Array) -> Array:
    return fp4_words(np.repeat(e8m0(scales), FP4_BLOCK // NVFP4_BLOCK, axis=-1), 1.0)
