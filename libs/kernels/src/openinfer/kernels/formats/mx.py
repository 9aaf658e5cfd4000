"""FP8 and FP4 weights with scales of E8M0, which are exponents: byte b is 2^(b - 127)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.formats.fp8 import of_blocks, scale_shape
from openinfer.kernels.formats.groups import Coded
from openinfer.kernels.op.rounding import FP4_BLOCK, Array, e8m0, unpack_fp4
from openinfer.tensor import float8_e4m3fn, uint8

FP8_SCALE_MOST, FP4_SCALE_MOST = 134, 128
"""The largest bytes of scales that kernels take."""


@dataclass(frozen=True, slots=True)
class Mx(Coded):
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
