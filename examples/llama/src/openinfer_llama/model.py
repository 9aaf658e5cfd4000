"""Weights, and the forward pass as a straight list of ops, which every pack runs.

T tokens of the step, A query heads and G key heads of size d, H the hidden size, I the MLP's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph.runner import Batch, NoStates, States
from openinfer.kernels import (
    Pack,
    attention_sublayer,
    embed,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rope_attend,
)
from openinfer.kernels.authoring import KvCache, joined
from openinfer.tensor import Arena, Stream, Tensor, TensorLoad
from openinfer_llama.bias import add_bias
from openinfer_llama.config import Config


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv stacks three projections, gate_up two."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(A + 2 G) d, H]
    o: Tensor  # [H, A d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    bias: Tensor | None = None  # of qkv, [(A + 2 G) d]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, in one dtype. lm_head is `embed` where they are tied."""

    embed: Tensor  # [V, H]
    layers: Sequence[Layer]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]

    @classmethod
    def allocate(cls, c: Config, arena: Arena, dtype: np.dtype[Any]) -> Weights:
        """Uninitialised weights."""
        h, inter, qkv = c.hidden_size, c.intermediate_size, c.q_size + 2 * c.kv_size
        shapes: list[tuple[int, ...]] = [(h,), (qkv, h), (h, c.q_size), (h,), (2 * inter, h), (h, inter)]
        table = arena.alloc((c.vocab_size, h), dtype, "embed")
        shapes += [(qkv,)] * c.biased
        layers = [Layer(*(arena.alloc(shape, dtype) for shape in shapes)) for _ in range(c.num_layers)]
        norm = arena.alloc((h,), dtype, "norm")
        return cls(table, layers, norm, table if c.tied else arena.alloc((c.vocab_size, h), dtype, "lm_head"))

    def loads(self, c: Config) -> Iterator[TensorLoad]:
        """Every tensor of the checkpoint by its published name, and where it goes."""
        q, kv, inter = c.q_size, c.kv_size, c.intermediate_size
        yield TensorLoad("model.embed_tokens.weight", self.embed)
        for n, layer in enumerate(self.layers):
            places = {
                "input_layernorm": layer.input_norm, "self_attn.q_proj": layer.qkv[:q],
                "self_attn.k_proj": layer.qkv[q : q + kv], "self_attn.v_proj": layer.qkv[q + kv :],
                "self_attn.o_proj": layer.o, "post_attention_layernorm": layer.post_norm,
                "mlp.gate_proj": layer.gate_up[:inter], "mlp.up_proj": layer.gate_up[inter:],
                "mlp.down_proj": layer.down,
            }  # fmt: skip
            yield from (
                TensorLoad(f"model.layers.{n}.{name}.weight", place) for name, place in places.items()
            )
            if layer.bias is not None:
                for name, part in zip("qkv", (slice(q), slice(q, q + kv), slice(q + kv, None)), strict=True):
                    yield TensorLoad(f"model.layers.{n}.self_attn.{name}_proj.bias", layer.bias[part])
        yield TensorLoad("model.norm.weight", self.norm)
        if not c.tied:
            yield TensorLoad("lm_head.weight", self.lm_head)


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache, and buffers for the largest step: what openinfer.graph.runner.Model asks for."""

    config: Config
    weights: Weights
    kv: KvCache
    cos_sin: Tensor  # float32 [max_model_len, 2, d / 2]
    batch: Batch
    hidden: Tensor  # [T, H]
    qkv: Tensor  # [T, (A + 2 G) d]
    heads: Tensor  # [T, A d]
    mlp: Tensor  # [T, I]
    states: States = field(default_factory=NoStates)
    tables: Sequence[str | None] = ("block_tables",)

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        """The step's tokens to logits of each row's last token. Keys and values go to the cache."""
        c, w, batch, t, eps = self.config, self.weights, self.batch, num_tokens, self.config.rms_norm_eps
        x, qkv, heads, mlp = self.hidden[:t], self.qkv[:t], self.heads[:t], self.mlp[:t]
        step, tables = batch.step(t, num_rows), batch.rows["block_tables"]
        embed(pack, out=x, token_ids=batch.expand(pack, t, num_rows), table=w.embed)
        for n, layer in enumerate(w.layers):
            with joined(pack, attention_sublayer) as one:
                norm_linear(one, out=qkv, x=x, norm_weight=layer.input_norm, weight=layer.qkv, eps=eps)
                if layer.bias is not None:
                    add_bias(one, x=qkv, bias=layer.bias)
                norm_rope_attend(
                    one, out=heads, **self.kv.layer(n), qkv=qkv, cos_sin=self.cos_sin, block_tables=tables, **step,
                    eps=eps, scale=c.head_dim**-0.5, window=c.window, max_q_len=max_q_len,
                )  # fmt: skip
                linear_add(one, x=x, h=heads, weight=layer.o)
            gate_up_silu(pack, out=mlp, x=x, norm_weight=layer.post_norm, weight=layer.gate_up, eps=eps)
            linear_add(pack, x=x, h=mlp, weight=layer.down)
        self.head(pack, batch.select(pack, x, num_rows, num_drafts))

    def head(self, pack: Pack, num_rows: int) -> None:
        """Logits of the hidden states in `batch.last`."""
        w, last = self.weights, self.batch.last[:num_rows]
        self.batch.head(pack, last, norm=w.norm, eps=self.config.rms_norm_eps, weight=w.lm_head)

    def clear(self, stream: Stream) -> None:
        """Zero the padding page."""
        self.kv.clear(stream, 1)
