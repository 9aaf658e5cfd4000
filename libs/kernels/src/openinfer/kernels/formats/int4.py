"""INT4 weights: codes of 4 bits, and one word for each group of columns; and how published checkpoints have them.

codes: uint8 [..., N, K / 2]. Byte 16 i + j of a row holds two columns: 32 i + j in its low half, and 32 i + 16 + j in
its high half. So a kernel that splits bytes finds 16 columns side by side in each half.

words: int32 [..., N, K / G], the bits of a float32. Its lowest 4 bits are the group's zero point, and the rest is the
group's scale. Published scales are bfloat16 or float16, whose values leave these bits zero in float32. A group has 32,
64 or 128 columns.

A value is (code - zero point) * scale, which float32 holds exactly.

A checkpoint packs 8 codes in an int32, the first in the lowest bits:

- compressed-tensors ("pack-quantized"): `weight_packed` [N, K / 8] and `weight_scale` [N, K / G]. Codes are values + 8,
  and zero points, where groups have their own, are `weight_zero_point` [N / 8, K / G], packed along N.
- AWQ: `qweight` [K, N / 8], packed along N in the order 0, 2, 4, 6, 1, 3, 5, 7; `scales` [K / G, N]; the zero
  points `qzeros` [K / G, N / 8], packed in that order too.
- GPTQ: see formats.gptq.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.formats.groups import CodedForm, Grouped, Stored, WeightPart, finite
from openinfer.kernels.op.contract import require
from openinfer.kernels.op.rounding import Array
from openinfer.tensor import Tensor, int32, uint8

GROUPS = (32, 64, 128)
"""Columns that a group may have."""

_RUN = 32  # columns whose codes share 16 bytes
SCALE_BITS, ZERO_BITS = ~15, 15
"""The bits of a word that hold the scale, and the zero point."""
SYMMETRIC = 8
"""The zero point of groups that have none of their own."""
_CODES = 8  # in an int32
_COLUMN_AT = [0, 2, 4, 6, 1, 3, 5, 7]  # the column at each place of an int32 of AWQ


@dataclass(frozen=True, slots=True)
class Int4Groups(CodedForm):
    """INT4 in groups of columns: codes and words as above."""

    group: int

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Int4Groups | None":
        """The form of these tensors or arrays, None for another format's."""
        return cls(2 * weight.shape[-1] // max(1, scales.shape[-1])) if scales.dtype == int32 else None

    def __str__(self) -> str:
        return f"INT4 in groups of {self.group}"

    @property
    def block(self) -> int:
        return self.group

    def code(self) -> tuple[np.dtype[Any], int]:
        return uint8, 2

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return (*shape[:-1], shape[-1] // self.group), int32

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        return int4_values(weight, scales)

    def check(self, name: str, k: int, scales: Tensor) -> None:
        require(
            self.group in GROUPS and k % self.group == 0,
            f"{name} has {scales.shape[-1]} INT4 groups in {k} columns; a group has one of {GROUPS} columns",
        )


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
    bits = finite(scales).view(np.int32)
    if (bits & ZERO_BITS).any():
        raise ValueError(
            "a scale has more digits than bfloat16 and float16 have; convert scales to one of these"
        )
    return bits | np.asarray(zeros, np.int32)


def without_zero_points(form: object, scales: Array) -> Array | None:
    """The words of an INT4 weight with 8 for all zero points; None for another form, and where all are 8 already."""
    if not isinstance(form, Int4Groups) or not ((scales & ZERO_BITS) != 8).any():
        return None
    return np.asarray((scales & ~ZERO_BITS) | 8)


def int4_values(packed: Array, words: Array) -> Array:
    """The float32 values [..., N, K]."""
    codes = unpack(packed).astype(np.int32)
    groups = codes.reshape(*words.shape, -1) - (words & ZERO_BITS)[..., None]
    scales = (words & SCALE_BITS).view(np.float32)
    return np.asarray(groups * scales[..., None], np.float32).reshape(codes.shape)


def int4_packing(style: str, group: int, *, zeros: bool = False) -> Grouped:
    """How checkpoints of the style "compressed-tensors" or "awq" store INT4. zeros: groups of compressed-tensors have
    zero points of their own."""
    if style == "awq":
        awq = Stored(".scales", 1, group, transposed=True), Stored(".qzeros", 8, group, int32, True)
        codes, to_codes, to_scales = Stored(".qweight", 8, 1, int32, True), _of_awq, _words_of_awq
        return Grouped("INT4", Int4Groups(group), codes, awq, to_codes, to_scales)
    points = (Stored(".weight_zero_point", 8, group, int32),) if zeros else ()
    scales = (Stored(".weight_scale", 1, group), *points)
    return Grouped(
        "INT4", Int4Groups(group), Stored(".weight_packed", 1, 8, int32), scales, of_rows, _words,
        ignored=(".weight_shape",),
    )  # fmt: skip


def nibbles(packed: Array) -> Array:
    """Codes [..., 8 n] of int32 [..., n]."""
    pairs = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _reordered(packed: Array) -> Array:
    """Codes [..., 8 n] of AWQ's int32 [..., n]."""
    codes = np.empty((*packed.shape, _CODES), np.uint8)
    for place, column in enumerate(_COLUMN_AT):
        codes[..., column] = packed >> 4 * place & 15
    return codes.reshape(*packed.shape[:-1], -1)


def of_rows(weight_packed: Array) -> Array:
    """int4.pack of the codes [N, K], without taking all of them apart: 16 bytes hold the same 32 columns in both."""
    runs = np.ascontiguousarray(weight_packed).view(np.uint64).reshape(len(weight_packed), -1, 2)
    even, odd = _joined(runs[..., 0], runs[..., 1], np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4))
    pairs = even.view(np.uint8).astype(np.uint16)
    pairs |= odd.view(np.uint8).astype(np.uint16) << 8
    return pairs.view(np.uint8).reshape(len(weight_packed), -1)


def _joined(first: Array, second: Array, low: Any, four: Any) -> tuple[Array, Array]:
    """The low halves of both operands' bytes as bytes, and the high halves. low: a mask of the low halves."""
    return first & low | (second & low) << four, first >> four & low | second & ~low


def _of_awq(qweight: Array) -> Array:
    """int4.pack along the rows of codes [K, N], transposed."""
    runs = np.ascontiguousarray(qweight).view(np.uint8).reshape(len(qweight) // 32, 2, 16, -1)
    low, high = _joined(runs[:, 0], runs[:, 1], np.uint8(15), np.uint8(4))
    packed = np.empty((qweight.shape[1], _CODES, len(qweight) // 2), np.uint8)
    for place, column in enumerate(_COLUMN_AT):
        half = high if place % 2 else low
        packed[:, column] = half.reshape(len(qweight) // 2, -1, 4)[:, :, place // 2].T
    return packed.reshape(-1, len(qweight) // 2)


def _words(part: WeightPart, weight_scale: Array, weight_zero_point: Array | None = None) -> Array:
    return group_words(
        weight_scale, SYMMETRIC if weight_zero_point is None else nibbles(weight_zero_point.T).T
    )


def _words_of_awq(part: WeightPart, scales: Array, qzeros: Array) -> Array:
    return group_words(scales, _reordered(qzeros)).T
