"""DeepSeek-V3 as a straight list of op calls. Written once, run by every pack.

Shapes: T tokens of the step, R rows (sequences) in it; A heads, C numbers of a latent, r rotated ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openinfer import kernels
from openinfer.graph.runner import Batch, NoStates, Read, States, StepRows
from openinfer.kernels import Pack
from openinfer.kernels.authoring import padded_rows
from openinfer.recipes.deepseek_v3.config import Config, Indexing
from openinfer.recipes.deepseek_v3.ops import latent_attend, split_queries, write_latents
from openinfer.recipes.deepseek_v3.weights import Attention, Indexer, Layer, Mixture, Weights
from openinfer.recipes.engine.decoder import Activations, Decoder, leading
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Stream, Tensor, float32, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers(Activations):
    """mlp is of the wider of dense MLPs and shared experts, the router's float32. The last four are of one size where
    nothing chooses tokens."""

    into: Tensor  # [T, D + Q + C + r, padded]
    qr: Tensor  # [T, Q]
    q: Tensor  # [T, A (n + r)]
    plain: Tensor  # [T, A n]
    turned: Tensor  # [T, A r]
    latent_q: Tensor  # [T, A C]
    latent_out: Tensor  # [T, A C]
    heads: Tensor  # [T, A v]
    index_q: Tensor  # [T, I D]
    index_key: Tensor  # [T, D]
    index_weights: Tensor  # float32 [T, I, padded]
    selected: Tensor  # int32 [T, K of tokens]

    @classmethod
    def allocate(cls, c: Config, weights: Weights, arena: Arena, limits: Limits) -> "Buffers":
        heads, layer = c.part.of(c.num_heads), weights.layers[-1]
        into, index = weights.layers[0].attention.into, c.index or Indexing(1, 1, 1, True, ())
        return cls.place(
            arena, limits, c, c.experts, drafts=weights.mtp is not None,
            kinds={"router": float32, "index_weights": float32, "selected": int32},
            into=into.shape[0], qr=c.q_lora_rank, q=heads * (c.nope_dim + c.rope_dim), plain=heads * c.nope_dim,
            turned=heads * c.rope_dim, latent_q=heads * c.kv_lora_rank, latent_out=heads * c.kv_lora_rank,
            heads=heads * c.value_dim, mlp=c.part.of(max(c.intermediate_size, c.experts.shared_size)),
            router=layer.mlp.router.shape[0] if isinstance(layer.mlp, Mixture) else 1,
            index_q=index.heads * index.dim, index_key=index.dim, index_weights=padded_rows(index.heads),
            selected=index.topk,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model(Decoder[Layer]):
    """Weights, cache and buffers. kv [pages, L, page_size, C + r]: latents and rotated keys, the same on all ranks.
    keys [pages, layers that choose, page_size, D]: those of indexers. cos_sin float32 [max_model_len, 2, r / 2]."""

    config: Config
    weights: Weights
    kv: Tensor
    keys: Tensor | None
    cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    states: States = field(default_factory=NoStates)
    tables: Sequence[str | None] = ("block_tables",)

    @property
    def pages(self) -> list[Tensor]:
        """The tensors of the pool's pages."""
        return [self.kv] if self.keys is None else [self.kv, self.keys]

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        w, batch, t, r = self.weights, self.batch, num_tokens, num_rows
        x = self.buffers.x[:t]
        kernels.embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
        read = Read(x=x, norm_weight=w.layers[0].input_norm, eps=self.config.rms_norm_eps)
        for n, layer in enumerate(w.layers):
            read = self._attention(pack, read, layer, n, t)
            if isinstance(layer.mlp, Mixture):
                read = self._mixture(pack, read, layer.mlp, layer.next_norm, t)
            else:
                hidden = self.gate_up(pack, read, layer.mlp.gate_up, t)
                read = self.add(pack, layer.mlp.down, hidden, layer.next_norm)
        self.head(pack, batch.select(pack, x, r, num_drafts))

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """graph.runner.Proposer: the hidden states of the layer that drafts, of the normed ones of the model, or of its
        own, and of the embedding of the tokens that follow. Its latents have the last layer of the pages."""
        layer, last, t = self.mtp.layer, self.config.num_layers, token_ids.shape[0]
        read = self.read_drafts(pack, token_ids, self.weights.norm if first else None)
        if only_keys:
            self._latents(pack, read, layer.attention, last, t)
            return
        read = self._attention(pack, read, layer, last, t)
        assert isinstance(layer.mlp, Mixture)
        self._mixture(pack, read, layer.mlp, None, t)

    def _latents(self, pack: Pack, read: Read, a: Attention, index: int, t: int) -> None:
        """The latents of t tokens, and their indexer's keys, into the pages; qr = the queries' low-rank vectors."""
        c, b, batch, own = self.config, self.buffers, self.batch, a.indexer
        into = leading(b.into, t, a.into.weight.shape[0])
        kernels.norm_linear(pack, out=into, **read, weight=a.into)
        keys: dict[str, Any] = {}
        if own is not None:
            dim = own.norm.shape[1]
            key, into = (into[:, :dim], into[:, dim:]) if own.key is None else (b.index_key[:t], into)
            if own.key is not None:
                kernels.norm_linear(pack, out=key, **read, weight=own.key)
            keys = {"index_key": key, "index_norm": own.norm, "index_pages": self._keys(index)}
        write_latents(
            pack, qr=b.qr[:t], kv=self.kv[:, index], qkv=into, q_norm=a.q_norm, kv_norm=a.kv_norm,
            cos_sin=self.cos_sin, positions=batch.positions[:t], token_slots=batch.token_slots[:t],
            block_tables=batch.rows["block_tables"], eps=c.rms_norm_eps, **keys,
        )  # fmt: skip

    def _keys(self, index: int) -> Tensor:
        assert self.config.index is not None
        assert self.keys is not None
        return self.keys[:, sum(self.config.index.layers[:index])]

    def _select(self, pack: Pack, read: Read, own: Indexer, index: int, t: int) -> None:
        """selected = the tokens that t tokens attend to, by a layer's indexer."""
        b, batch, dim = self.buffers, self.batch, own.norm.shape[1]
        count = own.q.shape[0] // dim
        kernels.norm_linear(pack, out=b.index_q[:t], x=b.qr[:t], weight=own.q)
        kernels.norm_linear(pack, out=b.index_weights[:t], **read, weight=own.weights)
        kernels.index_topk(
            pack, selected=b.selected[:t], q=b.index_q[:t].reshape(t, count, dim), weights=b.index_weights[:t, :count],
            keys=self._keys(index), cos_sin=self.cos_sin, positions=batch.positions[:t],
            token_slots=batch.token_slots[:t], block_tables=batch.rows["block_tables"], scale=(count * dim) ** -0.5,
            window=1,
        )  # fmt: skip

    def _attention(self, pack: Pack, read: Read, layer: Layer, index: int, t: int) -> Read:
        """x += latent attention of its norm. Returns the MLP's input. Queries become latents, and so do the results of
        attention leave it: no key and no value is ever made of a latent."""
        c, b, a = self.config, self.buffers, layer.attention
        heads, positions = c.part.of(c.num_heads), self.batch.positions[:t]
        self._latents(pack, read, a, index, t)
        if a.indexer is not None:
            self._select(pack, read, a.indexer, index, t)
        kernels.norm_linear(pack, out=b.q[:t], x=b.qr[:t], weight=a.q)
        plain, turned, latent_q, out = b.plain[:t], b.turned[:t], b.latent_q[:t], b.latent_out[:t]
        split_queries(pack, plain=plain, turned=turned, q=b.q[:t], cos_sin=self.cos_sin, positions=positions)
        apart: dict[str, Any] = {"groups": heads}
        kernels.project(pack, out=latent_q, x=plain, weight=a.keys, **apart)
        latent_attend(
            pack, out=out, q=latent_q, turned=turned, kv=self.kv[:, index], positions=positions,
            token_slots=self.batch.token_slots[:t], block_tables=self.batch.rows["block_tables"], scale=c.scale,
            selected=b.selected[:t] if c.index is not None else None,
        )  # fmt: skip
        kernels.project(pack, out=b.heads[:t], x=out, weight=a.values, **apart)
        return self.add(pack, a.o, b.heads[:t], layer.post_norm)

    def _mixture(self, pack: Pack, read: Read, m: Mixture, norm: Tensor | None, t: int) -> Read:
        """x += the experts of its norm, the shared one among them. Returns the input of the next layer."""
        c, b, batch = self.config, self.buffers, self.batch
        count = m.bias.shape[0]
        kernels.norm_linear(pack, out=b.router[:t], **read, weight=m.router)
        kernels.route(
            pack, expert_ids=b.expert_ids[:t], expert_weights=b.expert_weights[:t], logits=b.router[:t, :count],
            bias=m.bias, table=None, token_ids=batch.token_ids[:t], token_slots=batch.token_slots[:t],
            scaling=c.routed_scaling_factor, first_expert=c.part.first(count), num_experts=c.part.of(count),
            sigmoid=True, groups=c.groups, top_groups=c.top_groups,
        )  # fmt: skip
        shared = self.gate_up(pack, read, m.shared.gate_up, t), m.shared.down
        return self.add_experts(pack, read, m.gate_up, m.down, norm, t=t, count=count, shared=shared)

    def clear(self, stream: Stream) -> None:
        for pages in self.pages:
            pages[:1].zero_(stream)
