"""INT8 weights: int8 [..., N, K], with a float32 scale for each group of columns of a row.

A checkpoint of compressed-tensors has them as int8 (`weight`, "int-quantized"), or with 4 in an int32, the first in the
lowest bits, as values + 128 (`weight_packed`, "pack-quantized"). GPTQ's are in formats.gptq.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.formats.groups import ONE, CodedForm, Grouped, Stored, WeightPart, finite
from openinfer.kernels.op.contract import require
from openinfer.kernels.op.rounding import Array, Coding
from openinfer.tensor import Tensor, float32, int8, int32

_LEAST = 32
"""The fewest columns of a group."""


@dataclass(frozen=True, slots=True)
class Int8(CodedForm):
    """INT8 in groups of columns; ONE: a group has all."""

    group: int

    @classmethod
    def of(cls, weight: Any, scales: Any) -> "Int8 | None":
        """The form of these tensors or arrays, None for another format's."""
        if weight.dtype != int8:
            return None
        count = max(1, scales.shape[-1])
        return cls(ONE if count == 1 else weight.shape[-1] // count)

    def __str__(self) -> str:
        return f"INT8 in groups of {self.group}" if self.group else "INT8 with scales of rows"

    @property
    def block(self) -> int:
        return self.group or 16

    def code(self) -> tuple[np.dtype[Any], int]:
        return int8, 1

    def scales(self, shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return (*shape[:-1], shape[-1] // self.group if self.group else 1), float32

    def values(self, weight: Array, scales: Array, parts: int) -> Array:
        groups = weight.astype(np.float32).reshape(*scales.shape, -1)
        return np.asarray(groups * scales[..., None]).reshape(weight.shape)

    def check(self, name: str, k: int, scales: Tensor) -> None:
        require(
            not self.group or (self.group >= _LEAST and self.group % 16 == 0 and k % self.group == 0),
            f"{name} has {scales.shape[-1]} INT8 groups in {k} columns; a group has 16 n columns, at least {_LEAST}",
        )

    def allows(self, coding: Coding | None) -> bool:
        return coding is None or (coding in ("int8 token", "int8 tensor") and not self.group)


def of_words(packed: Array) -> Array:
    """int8 [N, K] of int32 [N, K / 4] of values + 128."""
    codes = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    return np.asarray(codes ^ np.uint8(128)).view(np.int8)


def int8_packing(group: int, *, packed: bool, whole: bool = False, coding: Coding | None = None) -> Grouped:
    """How compressed-tensors stores INT8: packed in int32 or not, with scales of groups (ONE: of rows), or `whole`,
    with one scale for all rows."""
    codes = Stored(".weight_packed", 1, 4, int32) if packed else Stored(".weight", 1, 1, int8)
    scales = Stored(".weight_scale", None if whole else 1, None if whole else group)
    to_codes, ignored = (of_words, (".weight_shape",)) if packed else (None, ())
    return Grouped("INT8", Int8(group), codes, (scales,), to_codes, _scales, ignored=ignored, coding=coding)


def _scales(part: WeightPart, weight_scale: Array) -> Array:
    wide = finite(weight_scale)
    return np.full((part.rows, 1), wide.item(), np.float32) if wide.size == 1 else wide
