"""How a checkpoint's weights are packed, as config.json and the command line say; and mixtures of experts: their sizes,
and the places of their weights among a checkpoint's tensors."""

import logging
from dataclasses import dataclass

from openinfer.kernels import UnsupportedQuantization
from openinfer.kernels.authoring import (
    AnyPacking,
    Linear,
    LinearPlaces,
    Packing,
    module_packing,
    packed_in,
    packing_of,
    packing_text,
    without_coding,
)
from openinfer.recipes.engine.config_fields import Fields, Part
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.tensor import Checkpoint, Tensor, TensorLoad

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP; gate_up stacks the gate's and the up projection's."""

    gate_up: Linear[Tensor]  # [2 I, H]
    down: Linear[Tensor]  # [H, I]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts, and the shared expert."""

    router: Linear[Tensor]  # [E, padded, H]
    gate_up: Linear[Tensor]  # [E, 2 I, H]
    down: Linear[Tensor]  # [E, H, I]
    shared: Mlp


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts: `count` experts, `chosen` of them a token.

    intermediate_size: hidden width of a routed expert. shared_size: that of the shared expert; 0: there is none.
    """

    count: int
    chosen: int
    intermediate_size: int
    shared_size: int = 0

    @classmethod
    def of(cls, fields: Fields, *, shared: bool) -> "Experts":
        """As config.json says. Raises UnsupportedModel naming the key."""
        key = "num_experts" if "num_experts" in fields else "num_local_experts"
        count, chosen = fields.size(key), fields.size("num_experts_per_tok")
        if chosen > count:
            raise UnsupportedModel(f"config.json: num_experts_per_tok is {chosen}; there are {count} experts")
        width = fields.size("moe_intermediate_size")
        return cls(count, chosen, width, fields.size("shared_expert_intermediate_size") if shared else 0)


def expert_places(
    p: LinearPlaces, at: str, experts: Experts, part: Part, hidden: int, packing: AnyPacking | None, *, unfused: bool
) -> tuple[Linear[Tensor], Linear[Tensor]]:  # fmt: skip
    """The weights [E, 2 I, H] and [E, H, I] of a rank's experts, whose modules begin with `at`. unfused: the checkpoint
    has tensors for each expert, else one for all. Raises UnsupportedModel."""
    own, width = part.slice(experts.count), experts.intermediate_size
    form = module_packing(packing, at + ".0.gate_proj")
    if isinstance(form, Packing) and form.by_row:
        if not form.made:
            raise UnsupportedModel(
                f"{at}: FP8 by row is for dense models; experts take blocks of 128 x 128, or INT4"
            )
        form = form._replace(by_row=False)
    count = own.stop - own.start
    gate_up = p.empty((count,), [width, width], hidden, form, at)
    down = p.empty((count,), [hidden], width, form, at)

    def fill() -> None:
        for index in range(count):
            name = f"{at}.{own.start + index}."
            if unfused:
                p.fill(gate_up[index], [(name + "gate_proj", width), (name + "up_proj", width)], form)
                p.fill(down[index], [(name + "down_proj", hidden)], form)
            else:
                _expert(p, gate_up[index], at + ".gate_up_proj", own.start + index, parts=2)
                _expert(p, down[index], at + ".down_proj", own.start + index)

    if unfused or (form is not None and form.made):
        p.later(fill)
    else:
        for name, linear in ((".gate_up_proj", gate_up), (".down_proj", down)):
            p.loads.append(TensorLoad(at + name, linear.weight, (own,)))
    return gate_up, down


def _expert(p: LinearPlaces, linear: Linear[Tensor], name: str, expert: int, parts: int = 1) -> None:
    """Make FP8 of an expert among plain ones in one tensor."""
    (rows, columns), scales = linear.weight.shape, linear.scales
    assert scales is not None
    for part in range(parts):
        own = slice(part * rows // parts, (part + 1) * rows // parts)
        source = slice(expert, expert + 1), own, slice(0, columns)
        scales = scales[p.quantise(linear.weight[own], scales, name, source) :]
