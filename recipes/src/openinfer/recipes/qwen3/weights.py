"""The tensors that the checkpoint must hold, their places, and the fused layout that the model runs on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import Linear, padded_rows
from openinfer.recipes.engine import decoder
from openinfer.recipes.engine.decoder import Projections
from openinfer.recipes.engine.weights import expert_places
from openinfer.recipes.qwen3.config import Config
from openinfer.tensor import Arena, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(decoder.Layer):
    """One decoder layer. qkv stacks the q, k and v projections; gate_up the gate's and the up projection's. Projections
    are plain or packed, as config.packing says. In a mixture gate_up and down are of E experts; a router picks some.
    window: the sliding window in tokens, 0 for full attention."""

    qkv: Linear[Tensor]  # [(A + 2 G) d, H]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    o: Linear[Tensor]  # [H, A d]
    window: int
    gate_up: Linear[Tensor]  # [2 I, H], or [E, 2 I, H]
    down: Linear[Tensor]  # [H, I], or [E, H, I]
    router: Linear[Tensor] | None = None  # [E, padded, H]


class Weights(decoder.Weights[Layer]):
    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any]) -> "Weights":
        """Uninitialised weights in `arena`."""
        p, hidden, before = Projections(arena, dtype, c=config), config.hidden_size, arena.used
        embed = p.table("model.embed_tokens", config.vocab_size, hidden, config.packing)
        layers = [_layer(p, config, f"model.layers.{n}.", window) for n, window in enumerate(config.windows)]
        norm, rows = p.plain("model.norm.weight", hidden), config.part.slice(config.vocab_size)
        count = rows.stop - rows.start
        tied = config.tie_word_embeddings
        head = embed[rows] if tied else p.table("lm_head", count, hidden, config.packing, rows.start)
        return cls(embed, decoder.linked(layers, norm), norm, head, None, arena.used - before, p)

    def adapted(self) -> Iterator[Tensor]:
        """The weights that adapters may change: all linear layers but routers and experts."""
        for layer in self.layers:
            mlp = () if layer.router else (layer.gate_up, layer.down)
            yield from (linear.weight for linear in (layer.qkv, layer.o, *mlp))


def _layer(p: Projections, config: Config, at: str, window: int) -> Layer:
    hidden, dim, part, experts = config.hidden_size, config.head_dim, config.part, config.experts
    q = part.of(config.num_heads) * dim

    def norm(name: str, size: int) -> Tensor:
        return p.plain(f"{at}{name}.weight", size)

    if experts:
        module, unfused = at + "mlp.experts", config.unfused_experts
        gate_up, down = expert_places(p, module, experts, part, hidden, config.packing, unfused=unfused)
        pad = padded_rows(experts.count) - experts.count
        router = p.linear((at + "mlp.gate", experts.count), columns=hidden, pad=pad)
    else:
        mlp = p.mlp(at + "mlp.", config.intermediate_size)
        gate_up, down, router = mlp.gate_up, mlp.down, None
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=p.qkv(at + "self_attn.", q, config.num_kv_heads, dim),
        q_norm=norm("self_attn.q_norm", dim),
        k_norm=norm("self_attn.k_norm", dim),
        o=p.back(at + "self_attn.o_proj", q),
        window=window,
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=gate_up,
        down=down,
        router=router,
    )
