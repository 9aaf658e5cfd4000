"""Qwen3 as a straight list of op calls. Written once, run by every pack.

Shapes: T tokens of the step, R rows (sequences) in it. A Qwen3 layer is attention over a norm of x, then a gated MLP
over another norm, or experts that a router chooses; both add to x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph.runner import Batch, NoStates, Read, States, StepRows
from openinfer.kernels import (
    Pack,
    attention_sublayer,
    embed,
    experts_add,
    gate_up_silu,
    norm_linear,
    norm_rope_attend,
    route_topk,
)
from openinfer.kernels.authoring import KvCache, Linear, joined, padded_rows
from openinfer.recipes.eagle3 import Drafter
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.weights import Layer, Weights
from openinfer.tensor import Arena, Stream, Tensor, int32


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows."""

    x: Tensor  # [T, H]
    qkv: Tensor  # [T, (A + 2 G) d]
    heads: Tensor  # [T, A d]
    mlp: Tensor  # [T, I]
    router: Tensor  # [T, E, padded]; this and the next are of mixtures
    expert_ids: Tensor  # int32 [T, K]
    expert_weights: Tensor  # [T, K]
    y: Tensor  # [T, H]: of one of several ranks

    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any], max_tokens: int) -> "Buffers":
        part, queries = config.part, config.part.of(config.num_heads) * config.head_dim
        qkv = queries + 2 * part.of(config.num_kv_heads) * config.head_dim
        experts, hidden = config.experts, config.hidden_size
        chosen = experts.chosen if experts else 1

        def by_token(width: int, kind: np.dtype[Any] = dtype) -> Tensor:
            return arena.alloc((max_tokens, width), kind)

        return cls(
            x=by_token(hidden),
            qkv=by_token(qkv),
            heads=by_token(queries),
            mlp=by_token(part.of(config.intermediate_size)),
            router=by_token(padded_rows(experts.count) if experts else 1),
            expert_ids=by_token(chosen, int32),
            expert_weights=by_token(chosen),
            y=by_token(hidden if experts and part.ranks > 1 else 1),
        )


@dataclass(frozen=True, slots=True)
class Model:
    """graph.runner.Model: weights, cache and buffers. cos_sin float32 [max_model_len, 2, d / 2]."""

    config: Config
    weights: Weights
    kv: KvCache
    cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    states: States = field(default_factory=NoStates)
    tables: Sequence[str | None] = ("block_tables",)

    @property
    def hidden(self) -> Tensor:
        return self.buffers.x

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        c, w, b, batch, t, r = self.config, self.weights, self.buffers, self.batch, num_tokens, num_rows
        x, qkv, heads, mlp = b.x[:t], b.qkv[:t], b.heads[:t], b.mlp[:t]
        step, block_tables = batch.step(t, r), batch.rows["block_tables"]
        embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
        eps, read = c.rms_norm_eps, Read(x=x, norm_weight=w.layers[0].input_norm, eps=c.rms_norm_eps)
        for n, layer in enumerate(w.layers):
            self.before_layer(pack, n, x)
            o, up, down = layer.o, layer.gate_up, layer.down
            with joined(pack, attention_sublayer) as one:
                norm_linear(one, out=qkv, **read, weight=layer.qkv, lora=batch.adapted(layer.qkv, t))
                norm_rope_attend(
                    one, out=heads, **self.kv.layer(n), qkv=qkv, q_norm=layer.q_norm, k_norm=layer.k_norm,
                    cos_sin=self.cos_sin, block_tables=block_tables, **step, eps=eps, scale=c.head_dim**-0.5,
                    window=c.windows[n], max_q_len=max_q_len,
                )  # fmt: skip
                read = batch.add(one, x, h=heads, weight=o, ranks=c.part.ranks, norm=layer.post_norm, eps=eps)
            if layer.router is not None:
                read = self._mixture(pack, read, layer, layer.router, t)
                continue
            gate_up_silu(pack, out=mlp, **read, weight=up, lora=batch.adapted(up, t))
            read = batch.add(pack, x, h=mlp, weight=down, ranks=c.part.ranks, norm=layer.next_norm, eps=eps)
        self.before_layer(pack, len(w.layers), x)
        self.head(pack, batch.select(pack, x, r, num_drafts))

    def _mixture(self, pack: Pack, read: Read, layer: Layer, router: Linear[Tensor], t: int) -> Read:
        """x += the experts of its norm. Returns the input of the next layer."""
        c, b, ranks, experts = self.config, self.buffers, self.config.part.ranks, self.config.experts
        assert experts is not None
        count, ids, weights, logits = experts.count, b.expert_ids[:t], b.expert_weights[:t], b.router[:t]
        x, y = b.x[:t], b.x[:t] if ranks == 1 else b.y[:t]
        norm_linear(pack, out=logits, **read, weight=router)
        route_topk(
            pack, expert_ids=ids, expert_weights=weights, logits=logits[:, :count],
            token_slots=self.batch.token_slots[:t], first_expert=c.part.first(count), num_experts=c.part.of(count),
        )  # fmt: skip
        up, down = layer.gate_up, layer.down
        experts_add(
            pack, **read, expert_ids=ids, expert_weights=weights, gate_up=up, down=down, out=y, adds=ranks == 1,
            all_experts=count,
        )  # fmt: skip
        return self.batch.add_sum(pack, x, y=y, ranks=ranks, norm=layer.next_norm, eps=c.rms_norm_eps)

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        """Called with the residual stream x [T, H] before each layer, and after the last, for a head that drafts."""

    def head(self, pack: Pack, num_rows: int) -> None:
        w, last = self.weights, self.batch.last[:num_rows]
        self.batch.head(pack, last, norm=w.norm, eps=self.config.rms_norm_eps, weight=w.lm_head)

    def clear(self, stream: Stream) -> None:
        self.kv.clear(stream, 1)


@dataclass(frozen=True, slots=True)
class DraftingModel(Model):
    """graph.runner.Proposer: a Qwen3 with a head that drafts, whose keys and values are the pages' last layer."""

    drafter: Drafter = field(kw_only=True)

    @property
    def seen(self) -> Tensor:
        return self.drafter.buffers.fused

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        self.drafter.before_layer(pack, number, x)

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        x, cache = self.buffers.x[: token_ids.shape[0]], self.kv.layer(self.config.num_layers)
        self.drafter.further(
            pack, token_ids, step, max_q_len, x=x, embeds=self.weights.embed, cache=cache,
            block_tables=self.batch.rows["block_tables"], first=first, only_keys=only_keys,
        )  # fmt: skip

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        self.drafter.draft_head(pack, self.batch.last[:num_rows], self.batch.logits[:num_rows])
