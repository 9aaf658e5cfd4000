"""Where tensors of the checkpoint go: made in an arena, packed or expanded, one by one or stacked.

FP8 and FP4 weights stay packed, scales too. For a float32 model, which only a CPU runs, they are expanded once while
they are loaded: the values are the same, and a step does not make them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.authoring import dequantized
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.inventory import BLOCK, FP4_BLOCK
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    Load,
    Tensor,
    float8_e4m3fn,
    float8_e8m0fnu,
    float32,
    int8,
    uint8,
)

Array = np.ndarray[Any, Any]

FP8_SCALE_MOST, FP4_SCALE_MOST = 134, 128
"""The largest exponent bytes of scales that kernels take: 2^7 and 2. Published ones are far below."""


def blocks(size: int) -> int:
    """Scale blocks of an FP8 weight along an axis."""
    return -(-size // BLOCK)


def padded(rows: int) -> int:
    """Rows of a weight that products take: a multiple of 16."""
    return -(-rows // 16) * 16


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint spells the weights: FP4 experts (else FP8); and what is made of them: whether the layer that
    predicts a further token is loaded."""

    fp4_experts: bool
    mtp: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Format:
        """By the dtype of the first expert: config.json may not say it."""
        name = "layers.0.ffn.experts.0.w1.weight"
        return cls(name in checkpoint and checkpoint.info(name).dtype == int8)


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [N, K] (of experts [E, N, K]) of the model's dtype, or packed with E8M0 scales, uint8 both
    (ops.common.expect_packed)."""

    weight: Tensor
    scales: Tensor | None


@dataclass(frozen=True, slots=True)
class Mixing:
    """Of a hyper-connection, float32: fn [numbers, n D], base [numbers], scale [3], or [1] at the head."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Conversion(NamedTuple):
    """The tensors `names` of the checkpoint become `dst`, made on the host by `convert`."""

    names: tuple[str, ...]
    dst: Tensor
    convert: Callable[..., Array]


@dataclass(slots=True)
class Places:
    """Makes tensors in an arena and notes what goes where."""

    arena: Arena
    dtype: np.dtype[Any]
    form: Format
    loads: list[Load] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    pads: list[Tensor] = field(default_factory=list)

    @property
    def expands(self) -> bool:
        """Whether packed weights are expanded."""
        return self.dtype == float32

    def plain(self, name: str, *shape: int, dtype: np.dtype[Any] | None = None) -> Tensor:
        """A tensor as it is in the checkpoint, of the model's dtype or of the one given."""
        tensor = self.arena.alloc(shape, dtype or self.dtype, name)
        self.loads.append(Load(name, tensor))
        return tensor

    def gain(self, module: str, size: int) -> Tensor:
        """The weight of a norm in float32: it multiplies before the one rounding."""
        tensor = self.arena.alloc((size,), float32, module)
        self.conversions.append(Conversion((module + ".weight",), tensor, lambda w: w.astype(np.float32)))
        return tensor

    def mixing(self, prefix: str, c: Config, numbers: int, scales: int) -> Mixing:
        """A hyper-connection's."""
        return Mixing(
            self.plain(prefix + "_fn", numbers, c.hc_mult * c.hidden_size, dtype=float32),
            self.plain(prefix + "_base", numbers, dtype=float32),
            self.plain(prefix + "_scale", scales, dtype=float32),
        )

    def stack(self, *parts: tuple[str, int], columns: int) -> Tensor:
        """Modules (name, rows) of the model's dtype in one weight, filled up with zeros to what products take."""
        total = sum(rows for _, rows in parts)
        weight = self.arena.alloc((padded(total), columns), self.dtype, parts[0][0])
        start = 0
        for module, rows in parts:
            self.loads.append(Load(module + ".weight", weight[start : start + rows]))
            start += rows
        if start < weight.shape[0]:
            self.pads.append(weight[start:])
        return weight

    def linear(self, *parts: tuple[str, int], columns: int) -> Linear:
        """FP8 modules (name, rows) in one weight; the rows of all but the last are whole blocks."""
        sizes = [rows for _, rows in parts]
        linear = self.packed((), sizes, columns, fp4=False, name=parts[0][0])
        self.fill(linear, [module for module, _ in parts], sizes)
        return linear

    def packed(
        self, count: tuple[int, ...], rows: list[int], columns: int, *, fp4: bool, name: str
    ) -> Linear:
        """An empty weight [*count, sum of rows, columns]."""
        total = sum(rows)
        if self.expands:
            return Linear(self.arena.alloc((*count, total, columns), self.dtype, name), None)
        if fp4:
            weight = self.arena.alloc((*count, total, columns // 2), int8, name)
            scales = self.arena.alloc((*count, total, columns // FP4_BLOCK), float8_e8m0fnu, name)
            return Linear(weight.view_as(uint8), scales.view_as(uint8))
        weight = self.arena.alloc((*count, total, columns), float8_e4m3fn, name)
        scales = self.arena.alloc((*count, sum(map(blocks, rows)), blocks(columns)), float8_e8m0fnu, name)
        return Linear(weight, scales.view_as(uint8))

    def fill(self, linear: Linear, modules: list[str], rows: list[int]) -> None:
        """Modules one below the other in a weight [N, K]."""
        start = block = 0
        for module, size in zip(modules, rows, strict=True):
            part = linear.weight[start : start + size]
            names = (module + ".weight", module + ".scale")
            if linear.scales is None:
                self.conversions.append(Conversion(names, part, _expanded))
            else:
                fp4 = linear.weight.dtype == uint8
                height = size if fp4 else blocks(size)
                scales = linear.scales[block : block + height].view_as(float8_e8m0fnu)
                self.loads += [
                    Load(names[0], part.view_as(int8) if fp4 else part),
                    Load(names[1], scales),
                ]
                block += height
            start += size


def _expanded(weight: Array, scales: Array) -> Array:
    """A published weight in float32."""
    packed = weight.view(np.uint8) if weight.dtype == np.int8 else weight
    return dequantized(packed, scales.view(np.uint8))


def check_scales(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError if a scale is larger than kernels take, or none (byte 255)."""
    for name in names:
        if not name.endswith(".scale"):
            continue
        info = checkpoint.info(name.removesuffix("scale") + "weight")
        most = FP4_SCALE_MOST if info.dtype == int8 else FP8_SCALE_MOST
        found = int(checkpoint.array(name).view(np.uint8).max())
        if found > most:
            why = "which is NaN" if found == 255 else f"2^{found - 127}"
            raise CheckpointError(
                checkpoint.info(name).file,
                name,
                f"has a scale of byte {found}, {why}; at most {most} is possible",
            )
