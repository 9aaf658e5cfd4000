"""How a checkpoint's weights are packed, as config.json and the command line say."""

import logging

from openinfer.kernels import UnsupportedQuantization
from openinfer.kernels.authoring import AnyPacking, packed_in, packing_of, packing_text, without_coding
from openinfer.recipes.engine.config_fields import Fields
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.tensor import Checkpoint

log = logging.getLogger(__name__)

__all__ = ["AnyPacking", "for_ranks", "packing"]


def packing(
    fields: Fields, quantization: str | None, coded: bool, checkpoint: Checkpoint | None
) -> AnyPacking | None:
    """None for plain weights. `quantization`: the flag --quantization. coded: whether activations may be quantised.
    checkpoint: what says which modules are packed. Raises UnsupportedModel."""
    config = fields.get("quantization_config")
    try:
        found = packing_of(config, quantization)
        found = found if checkpoint is None else packed_in(found, checkpoint, config)
    except UnsupportedQuantization as error:
        raise UnsupportedModel(f"config.json: quantization_config: {error}") from None
    found = found if coded else without_coding(found)
    if found is not None and checkpoint is not None:
        log.info("packed weights: %s", packing_text(found))
    return found


def for_ranks(packing: AnyPacking | None) -> None:
    """Raise UnsupportedModel unless several ranks can share the weights."""
    if packing is not None and not packing.kept:
        raise UnsupportedModel(
            f"config.json: quantization_config: {packing.kind} weights are run on one rank, because their columns "
            "cannot be divided"
        )
