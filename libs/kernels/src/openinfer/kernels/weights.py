"""Weights of linear layers from a checkpoint: plain or packed, one projection or several stacked in one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.formats import FP4_BLOCK, SCALE_BLOCK, dequantized
from openinfer.tensor import (
    Conversion,
    Load,
    Places,
    Tensor,
    float8_e4m3fn,
    float8_e8m0fnu,
    float32,
    int8,
    uint8,
)

__all__ = ["FP4_E8M0", "FP8_E8M0", "FP8_FLOAT32", "Linear", "LinearPlaces", "Packing", "blocks", "padded"]

Array = np.ndarray[Any, Any]


class Packing(NamedTuple):
    """How a checkpoint stores a packed weight: the ending of its scales' name (the weight's is ".weight"), their dtype,
    and whether values are FP4 pairs (int8) or float8_e4m3fn."""

    scales: str
    dtype: np.dtype[Any]
    fp4: bool = False


FP8_FLOAT32 = Packing(".weight_scale_inv", float32)
FP8_E8M0 = Packing(".scale", float8_e8m0fnu)
FP4_E8M0 = Packing(".scale", float8_e8m0fnu, fp4=True)


def blocks(size: int) -> int:
    """Scale blocks of an FP8 weight along an axis."""
    return -(-size // SCALE_BLOCK)


def padded(rows: int) -> int:
    """Rows of a weight that products take: a multiple of 16."""
    return -(-rows // 16) * 16


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [N, K] (of experts [E, N, K]) of the model's dtype, or packed with scales: contract.expect_weight for
    float32 scales, contract.expect_packed for E8M0 ones, which are uint8 here."""

    weight: Tensor
    scales: Tensor | None

    def __getitem__(self, expert: int) -> Linear:
        """One expert's."""
        return Linear(self.weight[expert], None if self.scales is None else self.scales[expert])


@dataclass(slots=True)
class LinearPlaces(Places):
    """Places for linear layers. `expand`: packed weights become the model's dtype while they are loaded, which a model
    on a CPU does once instead of at every step."""

    expand: bool = False

    def linear(
        self, *parts: tuple[str, int], columns: int, packing: Packing | None = None, pad: int = 0
    ) -> Linear:
        """Projections (module, rows) stacked in one weight, with `pad` rows of zeros after them. FP8 blocks begin anew
        at each projection, so the rows of all but the last are whole blocks, or all have as many rows."""
        modules, rows = [module for module, _ in parts], [size for _, size in parts]
        linear = self.empty((), rows, columns, packing, ", ".join(modules), pad)
        self.fill(linear, modules, rows, packing)
        if pad:
            self.pads.append(linear.weight[sum(rows) :])
        return linear

    def empty(
        self,
        count: tuple[int, ...],
        rows: Sequence[int],
        columns: int,
        packing: Packing | None,
        name: str,
        pad: int = 0,
    ) -> Linear:
        """A weight [*count, sum of rows + pad, columns] that nothing fills yet."""
        alloc, total = self.arena.alloc, sum(rows) + pad
        if packing is None or self.expand:
            return Linear(alloc((*count, total, columns), self.dtype, name), None)
        if packing.fp4:
            weight = alloc((*count, total, columns // 2), int8, name).view_as(uint8)
            scales = alloc((*count, total, columns // FP4_BLOCK), packing.dtype, name)
        else:
            weight = alloc((*count, total, columns), float8_e4m3fn, name)
            scales = alloc((*count, sum(map(blocks, rows)), blocks(columns)), packing.dtype, name)
        return Linear(weight, scales if packing.dtype == float32 else scales.view_as(uint8))

    def fill(
        self, linear: Linear, modules: Sequence[str], rows: Sequence[int], packing: Packing | None
    ) -> None:
        """Modules one below the other in a weight [N, K]."""
        start = block = 0
        for module, size in zip(modules, rows, strict=True):
            weight, part = module + ".weight", linear.weight[start : start + size]
            start += size
            if packing is None:
                self.loads.append(Load(weight, part))
            elif linear.scales is None:
                self.conversions.append(Conversion((weight, module + packing.scales), part, _expanded))
            else:
                height = size if packing.fp4 else blocks(size)
                scales = linear.scales[block : block + height]
                block += height
                self.loads.append(Load(weight, part.view_as(int8) if packing.fp4 else part))
                if packing.dtype == float32:  # checkpoints may hold them in bfloat16
                    self.conversions.append(Conversion((module + packing.scales,), scales, _wide))
                else:
                    self.loads.append(Load(module + packing.scales, scales.view_as(packing.dtype)))


def _wide(scales: Array) -> Array:
    return scales.astype(np.float32)


def _expanded(weight: Array, scales: Array) -> Array:
    """A packed weight of a checkpoint in float32."""
    values = weight.view(np.uint8) if weight.dtype == np.int8 else weight
    return dequantized(values, scales.astype(np.float32) if scales.itemsize > 1 else scales.view(np.uint8))
