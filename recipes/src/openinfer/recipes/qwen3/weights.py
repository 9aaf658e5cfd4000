"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openinfer.kernels.authoring import PUBLISHED_SCALES, Linear, LinearPlaces, WeightPart, padded_rows
from openinfer.recipes.engine.weights import expert_places
from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Arena, Checkpoint, Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv stacks the q, k and v projections; gate_up the gate's and the up projection's. Projections
    are plain or packed, as config.packing says. In a mixture gate_up and down are of E experts; a router picks some."""

    input_norm: Tensor  # [H]
    qkv: Linear[Tensor]  # [(A + 2 G) d, H]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    o: Linear[Tensor]  # [H, A d]
    post_norm: Tensor  # [H]
    gate_up: Linear[Tensor]  # [2 I, H], or [E, 2 I, H]
    down: Linear[Tensor]  # [H, I], or [E, H, I]
    router: Linear[Tensor] | None = None  # [E, padded, H]
    next_norm: Tensor | None = None  # [H]: of the layer after, at the end the model's


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights, and where each comes from. `embed` is whole on every rank; a tied `lm_head` is rows of it."""

    embed: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V of the rank, H]
    nbytes: int
    places: LinearPlaces

    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any]) -> "Weights":
        """Uninitialised weights in `arena`."""
        p, hidden, before = LinearPlaces(arena, dtype), config.hidden_size, arena.used
        embed = p.table("model.embed_tokens", config.vocab_size, hidden, config.packing)
        layers = [_layer(p, config, f"model.layers.{n}.") for n in range(config.num_layers)]
        norm, rows = p.plain("model.norm.weight", hidden), config.part.slice(config.vocab_size)
        count = rows.stop - rows.start
        tied = config.tie_word_embeddings
        head = embed[rows] if tied else p.table("lm_head", count, hidden, config.packing, rows.start)
        norms = [*(layer.input_norm for layer in layers[1:]), norm]
        linked = (replace(own, next_norm=after) for own, after in zip(layers, norms, strict=True))
        return cls(embed, tuple(linked), norm, head, arena.used - before, p)

    def adapted(self) -> Iterator[Tensor]:
        """The weights that adapters may change: all linear layers but routers and experts."""
        for layer in self.layers:
            mlp = () if layer.router else (layer.gate_up, layer.down)
            yield from (linear.weight for linear in (layer.qkv, layer.o, *mlp))


def _layer(p: LinearPlaces, config: Config, at: str) -> Layer:
    hidden, dim, part = config.hidden_size, config.head_dim, config.part
    heads, kv_heads, inter = config.num_heads, config.num_kv_heads, config.intermediate_size
    q, first_q = part.of(heads) * dim, part.first(heads) * dim
    kv, first_kv = part.of(kv_heads) * dim, part.first(kv_heads) * dim
    width, first = part.of(inter), part.first(inter)

    def norm(name: str, size: int) -> Tensor:
        return p.plain(f"{at}{name}.weight", size)

    def linear(columns: int, *parts: tuple[str, int, int], first: int = 0) -> Linear[Tensor]:
        named = (WeightPart(at + name, rows, row, first) for name, rows, row in parts)
        return p.linear(*named, columns=columns, packing=config.packing)

    qkv = (
        ("self_attn.q_proj", q, first_q),
        ("self_attn.k_proj", kv, first_kv),
        ("self_attn.v_proj", kv, first_kv),
    )
    router = None
    if config.experts:
        count, module, unfused = config.experts.count, at + "mlp.experts", config.unfused_experts
        gate_up, down = expert_places(
            p, module, config.experts, part, hidden, config.packing, unfused=unfused
        )
        router = p.linear((at + "mlp.gate", count), columns=hidden, pad=padded_rows(count) - count)
    else:
        gate_up = linear(hidden, ("mlp.gate_proj", width, first), ("mlp.up_proj", width, first))
        down = linear(width, ("mlp.down_proj", hidden, 0), first=first)
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(hidden, *qkv),
        q_norm=norm("self_attn.q_norm", dim),
        k_norm=norm("self_attn.k_norm", dim),
        o=linear(q, ("self_attn.o_proj", hidden, 0), first=first_q),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=gate_up,
        down=down,
        router=router,
    )


def validate(checkpoint: Checkpoint, config: Config, places: LinearPlaces) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly these tensors, packed where config says so. (Some tied
    checkpoints carry a copy of the embedding as lm_head; it is ignored.)"""
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    checkpoint.require(places.expected(), ignore=(*places.ignored, *tied, *PUBLISHED_SCALES))
