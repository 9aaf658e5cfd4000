"""The places of the checkpoint's tensors: made in an arena, packed or expanded, one by one or stacked.

FP8 and FP4 weights stay packed, and so do their scales. For a float32 model, which only a CPU runs, they are expanded
once while they are loaded. The values are the same, and a step does not expand them again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from openinfer.kernels.authoring import (
    FP4_E8M0,
    FP4_SCALE_MOST,
    FP8_E8M0,
    FP8_SCALE_MOST,
    Linear,
    LinearPlaces,
    Packing,
    WeightPart,
    padded_rows,
)
from openinfer.recipes.deepseek_v4.config import Config, Dspark
from openinfer.recipes.engine.config_fields import Part
from openinfer.tensor import Checkpoint, CheckpointError, Tensor, float32, int8


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint spells the weights: FP4 experts (else FP8); and which layers that draft are loaded."""

    fp4_experts: bool
    mtp: bool = False
    dspark: Dspark | None = None

    @property
    def drafting(self) -> int:
        """Layers that draft."""
        return self.dspark.stages if self.dspark is not None else int(self.mtp)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Format":
        """The format of a checkpoint, by the dtype of the first expert, because config.json may not say it."""
        name = "layers.0.ffn.experts.0.w1.weight"
        return cls(name in checkpoint and checkpoint.info(name).dtype == int8)


@dataclass(frozen=True, slots=True)
class Mixing:
    """The weights of a hyper-connection, float32: fn [numbers, n D], base [numbers], scale [3], or [1] at the head."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(slots=True, kw_only=True)
class ModelPlaces(LinearPlaces):
    """Places of a checkpoint of one format."""

    form: Format

    def gain(self, module: str, size: int) -> Tensor:
        """The weight of a norm in float32: it multiplies before the one rounding."""
        return self.converted(module + ".weight", size, convert=lambda w: w.astype(np.float32))

    def wide(self, name: str, *shape: int, source: tuple[slice, ...] = ()) -> Tensor:
        """A tensor that the checkpoint has in float32, too."""
        self.dtypes[name] = (float32,)
        return self.plain(name, *shape, dtype=float32, source=source)

    def mixing(self, prefix: str, c: Config, numbers: int, scales: int) -> Mixing:
        """A hyper-connection's."""
        return Mixing(
            self.wide(prefix + "_fn", numbers, c.hc_mult * c.hidden_size),
            self.wide(prefix + "_base", numbers),
            self.wide(prefix + "_scale", scales),
        )

    def stack(self, *parts: tuple[str, int], columns: int) -> Tensor:
        """Modules (name, rows) of the model's dtype in one weight, filled up with zeros to what products take."""
        total = sum(rows for _, rows in parts)
        return self.linear(*parts, columns=columns, pad=padded_rows(total) - total).weight

    def packed(self, *parts: tuple[str, int], columns: int) -> Linear[Tensor]:
        """FP8 modules (name, rows) in one weight; the rows of all but the last are whole blocks."""
        return self.linear(*parts, columns=columns, packing=FP8_E8M0)

    def of_rank(self, part: Part, *parts: tuple[str, int], columns: int) -> Linear[Tensor]:
        """A rank's rows of FP8 modules in one weight; (name, rows of a rank)."""
        own = [WeightPart(name, rows, part.rank * rows) for name, rows in parts]
        return self.linear(*own, columns=columns, packing=FP8_E8M0)

    def back(self, part: Part, module: str, rows: int, columns: int) -> Linear[Tensor]:
        """A rank's columns of an FP8 module."""
        own = WeightPart(module, rows, column=part.rank * columns)
        return self.linear(own, columns=columns, packing=FP8_E8M0)

    @property
    def experts(self) -> Packing:
        """The packing of the experts."""
        return FP4_E8M0 if self.form.fp4_experts else FP8_E8M0


def check_scales(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError if a scale is larger than kernels take, or none (byte 255)."""
    for name in names:
        if not name.endswith(".scale") or checkpoint.info(name).dtype == float32:  # _exponents sees to these
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
