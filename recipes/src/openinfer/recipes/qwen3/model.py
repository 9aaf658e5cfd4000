"""Qwen3 as a straight list of op calls. Written once, run by every pack.

Shapes: T tokens of the step, R rows (sequences) in it. A Qwen3 layer is attention over a norm of x, then a gated MLP
over another norm; both add to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.graph.runner import Batch, NoStates, Read, States, StepRows
from openinfer.kernels import Pack, embed, gate_up_silu, norm_linear, norm_rope_attend
from openinfer.kernels.authoring import KvCache
from openinfer.recipes.eagle3 import Drafter
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.weights import Weights
from openinfer.tensor import Arena, Stream, Tensor


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows."""

    x: Tensor  # [T, H]
    qkv: Tensor  # [T, (A + 2 G) d]
    heads: Tensor  # [T, A d]
    mlp: Tensor  # [T, I]

    @classmethod
    def allocate(cls, config: Config, arena: Arena, dtype: np.dtype[Any], max_tokens: int) -> Buffers:
        """For steps of at most max_tokens tokens."""
        part, queries = config.part, config.part.of(config.num_heads) * config.head_dim
        qkv = queries + 2 * part.of(config.num_kv_heads) * config.head_dim
        widths = config.hidden_size, qkv, queries, part.of(config.intermediate_size)
        return cls(*(arena.alloc((max_tokens, width), dtype) for width in widths))


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache and buffers. cos_sin float32 [max_model_len, 2, d / 2]."""

    config: Config
    weights: Weights
    kv: KvCache
    cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    states: States = field(default_factory=NoStates)
    tables: Sequence[str | None] = ("block_tables",)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def hidden(self) -> Tensor:
        """[T, H]: what `head` needs of each token."""
        return self.buffers.x

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        """Tokens of the step to logits of each row's last token; keys and values go to the cache."""
        c, w, b, batch, t, r = self.config, self.weights, self.buffers, self.batch, num_tokens, num_rows
        x, qkv, heads, mlp = b.x[:t], b.qkv[:t], b.heads[:t], b.mlp[:t]
        step, block_tables = batch.step(t, r), batch.rows["block_tables"]
        embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
        eps, read = c.rms_norm_eps, Read(x=x, norm_weight=w.layers[0].input_norm, eps=c.rms_norm_eps)
        layers = 0
        for n, layer in enumerate(w.layers):
            layers = n + 1
            self.before_layer(pack, n, x)
            norm_linear(pack, out=qkv, **read, **layer.qkv.args, **batch.adapted(layer.qkv.weight, t))
            norm_rope_attend(
                pack,
                out=heads,
                **self.kv.layer(n),
                qkv=qkv,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                cos_sin=self.cos_sin,
                block_tables=block_tables,
                **step,
                eps=eps,
                scale=c.head_dim**-0.5,
                window=c.windows[n],
                max_q_len=max_q_len,
            )
            o, up, down = layer.o, layer.gate_up, layer.down
            read = batch.add(pack, x, h=heads, **o.args, ranks=c.part.ranks, norm=layer.post_norm, eps=eps)
            gate_up_silu(pack, out=mlp, **read, **up.args, **batch.adapted(up.weight, t))
            read = batch.add(pack, x, h=mlp, **down.args, ranks=c.part.ranks, norm=layer.next_norm, eps=eps)
        self.before_layer(pack, layers, x)
        self.head(pack, batch.select(pack, x, r, num_drafts))

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        """Called with the residual stream x [T, H] before each layer, and after the last, for a head that drafts."""

    def head(self, pack: Pack, num_rows: int) -> None:
        """Logits of the hidden states in `batch.last`."""
        w, last = self.weights, self.batch.last[:num_rows]
        self.batch.head(pack, last, norm=w.norm, eps=self.config.rms_norm_eps, weight=w.lm_head)

    def clear(self, stream: Stream) -> None:
        """Zero the padding page."""
        self.kv.clear(stream, 1)


@dataclass(frozen=True, slots=True)
class DraftingModel(Model):
    """graph.runner.Proposer: a Qwen3 with a head that drafts. The head's keys and values have the last layer of the
    pages."""

    drafter: Drafter = field(kw_only=True)

    @property
    def seen(self) -> Tensor:
        """See Proposer."""
        return self.drafter.buffers.fused

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        self.drafter.before_layer(pack, number, x)

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """See Proposer."""
        x, cache = self.buffers.x[: token_ids.shape[0]], self.kv.layer(self.config.num_layers)
        self.drafter.further(
            pack, token_ids, step, max_q_len, x=x, embeds=self.weights.embed, cache=cache,
            block_tables=self.batch.rows["block_tables"], first=first, only_keys=only_keys,
        )  # fmt: skip

    def draft_head(self, pack: Pack, num_rows: int) -> None:
        """See Proposer."""
        self.drafter.draft_head(pack, self.batch.last[:num_rows], self.batch.logits[:num_rows])
