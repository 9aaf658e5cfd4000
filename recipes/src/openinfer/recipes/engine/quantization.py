"""How a checkpoint's weights are packed, as config.json and the command line say."""

from __future__ import annotations

from openinfer.kernels import UnsupportedQuantization
from openinfer.kernels.quantization import AnyPacking, packing_of
from openinfer.kernels.weights import Packing
from openinfer.recipes.engine.config_fields import Fields
from openinfer.recipes.engine.errors import UnsupportedModel

__all__ = ["AnyPacking", "packing"]


def packing(fields: Fields, quantization: str | None = None, coded: bool = True) -> AnyPacking | None:
    """None for plain weights. `quantization`: the flag --quantization. coded: whether activations may be quantised.
    Raises UnsupportedModel."""
    try:
        found = packing_of(fields.get("quantization_config"), quantization)
    except UnsupportedQuantization as error:
        raise UnsupportedModel(f"config.json: quantization_config: {error}") from None
    return found._replace(coding=None) if isinstance(found, Packing) and not coded else found
