"""Weights of linear layers from a checkpoint: plain or packed, one projection or several stacked in one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.errors import ContractError
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

__all__ = [
    "FP4_E8M0",
    "FP8_E8M0",
    "FP8_FLOAT32",
    "FP8_ROWS",
    "Linear",
    "LinearPlaces",
    "Packing",
    "WeightPart",
    "blocks",
    "padded",
]

Array = np.ndarray[Any, Any]


class Packing(NamedTuple):
    """How a checkpoint stores a packed weight: the ending of its scales' name (the weight's is ".weight"), their dtype,
    and whether values are FP4 pairs (int8) or float8_e4m3fn. by_row: float8 has scales of rows, not of blocks."""

    scales: str
    dtype: np.dtype[Any]
    fp4: bool = False
    by_row: bool = False


class WeightPart(NamedTuple):
    """`rows` rows of a module's weight from row `row` on, in the columns from `column` on: all, or a rank's part."""

    module: str
    rows: int
    row: int = 0
    column: int = 0


AnyPart = WeightPart | tuple[str, int]
"""A module and its rows are enough where the weight is taken whole, or from its first row and column on."""

FP8_FLOAT32 = Packing(".weight_scale_inv", float32)
FP8_ROWS = Packing(".weight_scale", float32, by_row=True)
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

    def linear(self, *parts: AnyPart, columns: int, packing: Packing | None = None, pad: int = 0) -> Linear:
        """Projections stacked in one weight, with `pad` rows of zeros after them. FP8 blocks begin anew at each
        projection, so the rows of all but the last are whole blocks, or all have as many rows."""
        rows = [part[1] for part in parts]
        linear = self.empty((), rows, columns, packing, ", ".join(part[0] for part in parts), pad)
        self.fill(linear, parts, packing)
        if pad:
            self.pads.append(linear.weight[sum(rows) :])
            if packing is not None and packing.by_row and linear.scales is not None:
                self.pads.append(linear.scales[sum(rows) :])
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
            if packing.by_row:
                return Linear(weight, alloc((*count, total, 1), packing.dtype, name))
            scales = alloc((*count, sum(map(blocks, rows)), blocks(columns)), packing.dtype, name)
        return Linear(weight, scales if packing.dtype == float32 else scales.view_as(uint8))

    def fill(self, linear: Linear, parts: Sequence[AnyPart], packing: Packing | None) -> None:
        """Projections one below the other in a weight [N, K]. Raises ContractError where a part of an FP8 weight begins
        within a block and ends in another."""
        start = block = 0
        for part in parts:
            module, rows, row, column = WeightPart(*part)
            dst, weight = linear.weight[start : start + rows], module + ".weight"
            start += rows
            pairs = 2 if packing is not None and packing.fp4 else 1  # columns of a byte
            columns = dst.shape[1] * (pairs if linear.scales is not None else 1)
            source = _range(row, rows), _range(column // pairs, columns // pairs)
            if packing is None:
                self.loads.append(Load(weight, dst, source))
                continue
            of_scales: tuple[slice, ...]
            if packing.by_row:
                of_scales = (_range(row, rows),)
            elif packing.fp4:
                of_scales = _range(row, rows), _range(column // FP4_BLOCK, columns // FP4_BLOCK)
            else:
                of_scales = _blocks_of(module, row, rows), _blocks_of(module, column, columns)
            name = module + packing.scales
            if linear.scales is None:
                whole = Conversion((weight, name), dst, _expanded, (source, of_scales))
                self.conversions.append(whole)
                continue
            height = of_scales[0].stop - of_scales[0].start
            scales = linear.scales[block : block + height]
            block += height
            self.loads.append(Load(weight, dst.view_as(int8) if packing.fp4 else dst, source))
            if packing.dtype == float32:  # checkpoints may hold them in bfloat16
                self.conversions.append(Conversion((name,), scales, _wide, (of_scales,)))
            else:
                self.loads.append(Load(name, scales.view_as(packing.dtype), of_scales))


def _range(start: int, size: int) -> slice:
    return slice(start, start + size)


def _blocks_of(module: str, start: int, size: int) -> slice:
    """The FP8 blocks of rows or columns, which are whole blocks, or lie in one."""
    if start % SCALE_BLOCK and start % SCALE_BLOCK + size > SCALE_BLOCK:
        raise ContractError(
            f"{module}: {size} rows or columns from {start} on do not begin at an FP8 block of {SCALE_BLOCK}"
        )
    return _range(start // SCALE_BLOCK, blocks(size))


def _wide(scales: Array) -> Array:
    return scales.astype(np.float32)


def _expanded(weight: Array, scales: Array) -> Array:
    """A packed weight of a checkpoint in float32."""
    values = weight.view(np.uint8) if weight.dtype == np.int8 else weight
    return dequantized(values, scales.astype(np.float32) if scales.itemsize > 1 else scales.view(np.uint8))
