"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import SCALE_BLOCK
from openinfer.kernels.weights import blocks
from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Arena, Checkpoint, Load, Tensor, dtypes, float8_e4m3fn, float32


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of FP8 projections, float32, of blocks of 128 x 128 or of rows (contract.expect_weight)."""

    qkv: Tensor | None = None
    o: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None


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
    scales: Scales = Scales()


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

        def projection(name: str, *shape: int) -> Tensor:
            return arena.alloc(shape, float8_e4m3fn if config.fp8 else dtype, name)

        def scales(name: str, rows: int, columns: int) -> Tensor | None:
            shape = (rows, 1) if config.fp8 == "rows" else (blocks(rows), blocks(columns))
            return arena.alloc(shape, float32, name) if config.fp8 else None

        heads = config.num_heads * dim
        embed = new("embed", config.vocab_size, hidden)
        layers = tuple(
            Layer(
                input_norm=new(f"{n}.input_norm", hidden),
                qkv=projection(f"{n}.qkv", config.qkv_size, hidden),
                q_norm=new(f"{n}.q_norm", dim),
                k_norm=new(f"{n}.k_norm", dim),
                o=projection(f"{n}.o", hidden, heads),
                post_norm=new(f"{n}.post_norm", hidden),
                gate_up=projection(f"{n}.gate_up", 2 * inter, hidden),
                down=projection(f"{n}.down", hidden, inter),
                scales=Scales(
                    qkv=scales(f"{n}.qkv scales", config.qkv_size, hidden),
                    o=scales(f"{n}.o scales", hidden, heads),
                    gate_up=scales(f"{n}.gate_up scales", 2 * inter, hidden),
                    down=scales(f"{n}.down scales", hidden, inter),
                ),
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
            at, s = f"model.layers.{n}.", layer.scales
            yield Load(at + "input_layernorm.weight", layer.input_norm)
            yield Load(at + "self_attn.q_norm.weight", layer.q_norm)
            yield Load(at + "self_attn.k_norm.weight", layer.k_norm)
            yield Load(at + "post_attention_layernorm.weight", layer.post_norm)
            for name, weight, scales, first, source in (
                ("self_attn.q_proj", layer.qkv[:q], s.qkv, 0, (part(q),)),
                ("self_attn.k_proj", layer.qkv[q : q + kv], s.qkv, q, (part(kv, first_kv),)),
                ("self_attn.v_proj", layer.qkv[q + kv :], s.qkv, q + kv, (part(kv, first_kv),)),
                ("self_attn.o_proj", layer.o, s.o, 0, (every, part(q))),
                ("mlp.gate_proj", layer.gate_up[:inter], s.gate_up, 0, (part(inter),)),
                ("mlp.up_proj", layer.gate_up[inter:], s.gate_up, inter, (part(inter),)),
                ("mlp.down_proj", layer.down, s.down, 0, (every, part(inter))),
            ):
                yield Load(f"{at}{name}.weight", weight, source)
                if scales is not None and config.fp8 == "rows":
                    rows = slice(first, first + weight.shape[0])
                    yield Load(f"{at}{name}.weight_scale", scales[rows], source[:1])
                elif scales is not None:
                    rows = slice(first // SCALE_BLOCK, first // SCALE_BLOCK + blocks(weight.shape[0]))
                    yield Load(f"{at}{name}.weight_scale_inv", scales[rows], tuple(map(_of_blocks, source)))
        yield Load("model.norm.weight", self.norm)
        if not config.tie_word_embeddings:
            yield Load("lm_head.weight", self.lm_head, (part(config.local_vocab),))

    def adapted(self) -> Iterator[Tensor]:
        """The weights that adapters may change."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


def _of_blocks(part: slice) -> slice:
    """The blocks of a part of whole blocks."""
    return part if part.start is None else slice(part.start // SCALE_BLOCK, blocks(part.stop))


def validate(checkpoint: Checkpoint, config: Config, weights: Weights) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly these tensors, packed where config says so. (Some tied
    checkpoints carry a copy of the embedding as lm_head; it is ignored.)"""
    fp8 = (float8_e4m3fn,)
    expected = {
        load.name: (load.dst.shape, fp8 if load.dst.dtype in fp8 else dtypes.WEIGHTS)
        for load in weights.loads(config)
    }
    checkpoint.require(expected, ignore=("lm_head.weight",) if config.tie_word_embeddings else ())
