"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Arena, Checkpoint, Load, Tensor, dtypes


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv stacks the q, k and v projections; gate_up the gate's and the up projection's."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(A + 2 G) d, H]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    o: Tensor  # [H, A d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights, in one dtype. `embed` is whole on every rank. With tied embeddings `lm_head` is rows of it."""

    embed: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V of the rank, H]

    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any]) -> Weights:
        """Uninitialised weights in `arena`."""
        hidden, dim, inter = config.hidden_size, config.head_dim, config.intermediate_size

        def new(name: str, *shape: int) -> Tensor:
            return arena.alloc(shape, dtype, name)

        embed = new("embed", config.vocab_size, hidden)
        layers = tuple(
            Layer(
                input_norm=new(f"{n}.input_norm", hidden),
                qkv=new(f"{n}.qkv", config.qkv_size, hidden),
                q_norm=new(f"{n}.q_norm", dim),
                k_norm=new(f"{n}.k_norm", dim),
                o=new(f"{n}.o", hidden, config.num_heads * dim),
                post_norm=new(f"{n}.post_norm", hidden),
                gate_up=new(f"{n}.gate_up", 2 * inter, hidden),
                down=new(f"{n}.down", hidden, inter),
            )
            for n in range(config.num_layers)
        )
        norm, first, count = new("norm", hidden), config.rank * config.local_vocab, config.local_vocab
        tied = config.tie_word_embeddings
        return cls(
            embed, layers, norm, embed[first : first + count] if tied else new("lm_head", count, hidden)
        )

    def loads(self, config: Config) -> Iterator[Load]:
        """Every tensor of the checkpoint, or the rank's part of it, and the place it goes to, by its published name."""
        q, kv, inter = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.intermediate_size,
        )
        first_kv = config.first_kv_head * config.head_dim

        def part(size: int, first: int | None = None) -> slice:
            start = config.rank * size if first is None else first
            return slice(start, start + size)

        every = slice(None)
        yield Load("model.embed_tokens.weight", self.embed)
        for n, layer in enumerate(self.layers):
            at = f"model.layers.{n}."
            yield Load(at + "input_layernorm.weight", layer.input_norm)
            yield Load(at + "self_attn.q_proj.weight", layer.qkv[:q], (part(q),))
            yield Load(at + "self_attn.k_proj.weight", layer.qkv[q : q + kv], (part(kv, first_kv),))
            yield Load(at + "self_attn.v_proj.weight", layer.qkv[q + kv :], (part(kv, first_kv),))
            yield Load(at + "self_attn.q_norm.weight", layer.q_norm)
            yield Load(at + "self_attn.k_norm.weight", layer.k_norm)
            yield Load(at + "self_attn.o_proj.weight", layer.o, (every, part(q)))
            yield Load(at + "post_attention_layernorm.weight", layer.post_norm)
            yield Load(at + "mlp.gate_proj.weight", layer.gate_up[:inter], (part(inter),))
            yield Load(at + "mlp.up_proj.weight", layer.gate_up[inter:], (part(inter),))
            yield Load(at + "mlp.down_proj.weight", layer.down, (every, part(inter)))
        yield Load("model.norm.weight", self.norm)
        if not config.tie_word_embeddings:
            yield Load("lm_head.weight", self.lm_head, (part(config.local_vocab),))

    def adapted(self) -> Iterator[Tensor]:
        """The weights that adapters may change."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


def validate(checkpoint: Checkpoint, config: Config, weights: Weights) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly these tensors, not packed. (Some tied checkpoints carry
    a copy of the embedding as lm_head; it is ignored.)"""
    expected = {load.name: (load.dst.shape, dtypes.WEIGHTS) for load in weights.loads(config)}
    checkpoint.require(expected, ignore=("lm_head.weight",) if config.tie_word_embeddings else ())
