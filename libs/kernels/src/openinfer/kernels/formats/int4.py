"""INT4 weights as ops take them: codes of 4 bits, and one word for each group of columns.

codes: uint8 [..., N, K / 2]. Byte 16 i + j of a row holds two columns: 32 i + j in its low half, and 32 i + 16 + j in
its high half. So a kernel that splits bytes finds 16 columns side by side in each half.

words: int32 [..., N, K / G], the bits of a float32. Its lowest 4 bits are the group's zero point, and the rest is the
group's scale. Published scales are bfloat16 or float16, whose values leave these bits zero in float32. A group has 32,
64 or 128 columns.

A value is (code - zero point) * scale, which float32 holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.op.contract import expect, require
from openinfer.kernels.op.rounding import Array, Coding
from openinfer.tensor import Tensor, int32, uint8

GROUPS = (32, 64, 128)
"""Columns that a group may have."""

_RUN = 32  # columns whose codes share 16 bytes
SCALE_BITS, ZERO_BITS = ~15, 15
"""The bits of a word that hold the scale, and the zero point."""


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """INT4 in groups of columns: codes and words as above."""

    group: int

    @classmethod
    def of(cls, weight: Any, scales: Any) -> Int4Groups | None:
        """The form of these tensors or arrays, None for another format's."""
        return cls(2 * weight.shape[-1] // max(1, scales.shape[-1])) if scales.dtype == int32 else None

    def __str__(self) -> str:
        return f"INT4 in groups of {self.group}"

    def columns(self, weight: Any) -> int:
        return 2 * int(weight.shape[-1])

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        return int4_values(weight, scales)

    def expect(
        self,
        name: str,
        weight: Tensor,
        scales: Tensor,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        parts: int,
    ) -> None:
        k = shape[-1]
        expect(name, weight, (*shape[:-1], k // 2), uint8)
        require(
            self.group in GROUPS and k % self.group == 0,
            f"{name} has {scales.shape[-1]} INT4 groups in {k} columns; a group has one of {GROUPS} columns",
        )
        expect(f"scales of {name}", scales, (*weight.shape[:-1], k // self.group), int32)

    def allows(self, coding: Coding | None) -> bool:
        return coding is None


def pack(codes: Array) -> Array:
    """Codes 0 to 15 [..., K] as bytes [..., K / 2]."""
    runs = codes.astype(np.uint8, copy=False).reshape(*codes.shape[:-1], -1, 2, _RUN // 2)
    return np.asarray(runs[..., 0, :] | runs[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def unpack(packed: Array) -> Array:
    """Bytes [..., K / 2] as codes [..., K]."""
    runs = packed.reshape(*packed.shape[:-1], -1, _RUN // 2)
    return np.stack([runs & 15, runs >> 4], axis=-2).reshape(*packed.shape[:-1], -1)


def group_words(scales: Array, zeros: Array | int) -> Array:
    """Words of scales (bfloat16 or float16) and zero points 0 to 15. Raises ValueError for scales that are not finite,
    and for float32 scales that no word holds."""
    wide = scales.astype(np.float32)
    bits = wide.view(np.int32)
    if not np.isfinite(wide).all():
        raise ValueError("a scale is not finite")
    if (bits & ZERO_BITS).any():
        raise ValueError(
            "a scale has more digits than bfloat16 and float16 have; convert scales to one of these"
        )
    return bits | np.asarray(zeros, np.int32)


def without_zero_points(scales: Array) -> Array | None:
    """The words of an INT4 weight with 8 for all zero points; None for other scales, and where all are 8 already."""
    if scales.dtype != int32 or not ((scales & ZERO_BITS) != 8).any():
        return None
    return np.asarray((scales & ~ZERO_BITS) | 8)


def int4_values(packed: Array, words: Array) -> Array:
    """The float32 values [..., N, K]."""
    codes = unpack(packed).astype(np.int32)
    groups = codes.reshape(*words.shape, -1) - (words & ZERO_BITS)[..., None]
    scales = (words & SCALE_BITS).view(np.float32)
    return np.asarray(groups * scales[..., None], np.float32).reshape(codes.shape)
