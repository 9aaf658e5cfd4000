"""Activations of a step."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import Coded, padded_rows
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Tensor, float32, int32

Activations = Coded[Tensor] | Tensor


def activations(arena: Arena, shape: tuple[int, int], dtype: np.dtype[Any], quantized: bool) -> Activations:
    """Inputs of products: their codes if they are rounded."""
    return Coded.allocate(arena, shape, dtype) if quantized else arena.alloc(shape, dtype)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows. Inputs of products are
    codes where the model rounds them; elsewhere `rounded` is `normed`."""

    streams: Tensor
    mix: Tensor
    normed: Tensor
    rounded: Activations
    y: Tensor
    qkv: Tensor
    qr: Activations
    q: Tensor
    heads: Tensor
    groups: Activations
    compressing: Tensor
    index_q: Tensor
    selected: Tensor
    router: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    hidden: Activations
    shared: Tensor
    collapsed: Tensor

    @classmethod
    def allocate(cls, config: Config, arena: Arena, limits: Limits, quantized: bool) -> "Buffers":
        """For the largest step. quantized: products round their inputs."""
        c, hidden, n = config, config.hidden_size, config.hc_mult
        compressing = 4 * (c.head_dim + c.index_dim) + c.index_heads

        def by_token(*shape: int, kind: np.dtype[Any] = limits.dtype) -> Tensor:
            return arena.alloc((limits.step_tokens, *shape), kind)

        def read(width: int) -> Activations:
            return activations(arena, (limits.step_tokens, width), limits.dtype, quantized)

        normed = by_token(hidden)
        return cls(
            streams=by_token(n, hidden),
            mix=by_token(n + n * n, kind=float32),
            normed=normed,
            rounded=read(hidden) if quantized else normed,
            y=by_token(hidden),
            qkv=by_token(c.q_lora_rank + c.head_dim),
            qr=read(c.q_lora_rank),
            q=by_token(c.part.of(c.num_heads), c.head_dim),
            heads=by_token(c.part.of(c.num_heads) * c.head_dim),
            groups=read(c.part.of(c.o_groups) * c.o_lora_rank),
            compressing=by_token(compressing, kind=float32),
            index_q=by_token(c.index_heads, c.index_dim),
            selected=by_token(c.index_topk, kind=int32),
            router=by_token(padded_rows(c.num_experts), kind=float32),
            expert_ids=by_token(c.experts_per_token, kind=int32),
            expert_weights=by_token(c.experts_per_token, kind=float32),
            hidden=read(c.part.of(c.moe_intermediate_size)),
            shared=by_token(hidden),
            collapsed=arena.alloc((limits.max_logits, hidden), limits.dtype),
        )
