"""How a checkpoint's weights are packed, as config.json and the command line say."""

from __future__ import annotations

from openinfer.kernels import UnsupportedQuantization
from openinfer.kernels.authoring import AnyPacking, Packing, packed_in, packing_of
from openinfer.recipes.engine.config_fields import Fields
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.tensor import Checkpoint

__all__ = ["AnyPacking", "packing"]


def packing(
    fields: Fields, quantization: str | None, coded: bool, checkpoint: Checkpoint | None
) -> AnyPacking | None:
    """None for plain weights. `quantization`: the flag --quantization. coded: whether activations may be quantised.
    checkpoint: what says which modules are packed. Raises UnsupportedModel."""
    try:
        found = packing_of(fields.get("quantization_config"), quantization)
        found = found if checkpoint is None else packed_in(found, checkpoint)
    except UnsupportedQuantization as error:
        raise UnsupportedModel(f"config.json: quantization_config: {error}") from None
    return found._replace(coding=None) if isinstance(found, Packing) and not coded else found
