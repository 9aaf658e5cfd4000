"""Qwen3 as a straight list of op calls. Written once, run by every pack.

Shapes: T tokens of the step, R rows (sequences) in it. A Qwen3 layer is attention over a norm of x, then a gated MLP
over another norm, or experts that a router chooses; both add to x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer import kernels
from openinfer.graph.runner import Batch, NoStates, Read, States, StepRows
from openinfer.kernels import Pack
from openinfer.kernels.authoring import KvCache, Linear, joined, padded_rows
from openinfer.recipes.eagle3 import Drafter
from openinfer.recipes.engine.decoder import Activations, Decoder
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.qwen3.config import Config
from openinfer.recipes.qwen3.weights import Layer, Weights
from openinfer.tensor import Arena, Stream, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers(Activations):
    qkv: Tensor  # [T, (A + 2 G) d]
    heads: Tensor  # [T, A d]

    @classmethod
    def allocate(cls, c: Config, arena: Arena, limits: Limits) -> "Buffers":
        queries = c.part.of(c.num_heads) * c.head_dim
        return cls.place(
            arena, limits, c, c.experts, qkv=queries + 2 * c.part.of(c.num_kv_heads) * c.head_dim, heads=queries,
            mlp=c.part.of(c.intermediate_size), router=padded_rows(c.experts.count) if c.experts else 1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model(Decoder[Layer]):
    """graph.runner.Model: weights, cache and buffers. cos_sin float32 [max_model_len, 2, d / 2]."""

    config: Config
    weights: Weights
    kv: KvCache
    cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    states: States = field(default_factory=NoStates)
    tables: Sequence[str | None] = ("block_tables",)

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        c, w, b, batch, t, r = self.config, self.weights, self.buffers, self.batch, num_tokens, num_rows
        x, qkv, heads = b.x[:t], b.qkv[:t], b.heads[:t]
        step, block_tables = batch.step(t, r), batch.rows["block_tables"]
        kernels.embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
        eps, read = c.rms_norm_eps, Read(x=x, norm_weight=w.layers[0].input_norm, eps=c.rms_norm_eps)
        for n, layer in enumerate(w.layers):
            self.before_layer(pack, n, x)
            with joined(pack, kernels.attention_sublayer) as one:
                kernels.norm_linear(one, out=qkv, **read, weight=layer.qkv, lora=batch.adapted(layer.qkv, t))
                kernels.norm_rope_attend(
                    one, out=heads, **self.kv.layer(n), qkv=qkv, q_norm=layer.q_norm, k_norm=layer.k_norm,
                    cos_sin=self.cos_sin, block_tables=block_tables, **step, eps=eps, scale=c.head_dim**-0.5,
                    window=layer.window, max_q_len=max_q_len,
                )  # fmt: skip
                read = self.add(one, layer.o, heads, layer.post_norm)
            if layer.router is not None:
                read = self._mixture(pack, read, layer, layer.router, t)
            else:
                hidden = self.gate_up(pack, read, layer.gate_up, t)
                read = self.add(pack, layer.down, hidden, layer.next_norm)
        self.before_layer(pack, len(w.layers), x)
        self.head(pack, batch.select(pack, x, r, num_drafts))

    def _mixture(self, pack: Pack, read: Read, layer: Layer, router: Linear[Tensor], t: int) -> Read:
        """x += the experts of its norm. Returns the input of the next layer."""
        b, part, experts = self.buffers, self.config.part, self.config.experts
        assert experts is not None
        count, logits = experts.count, b.router[:t]
        kernels.norm_linear(pack, out=logits, **read, weight=router)
        kernels.route_topk(
            pack, expert_ids=b.expert_ids[:t], expert_weights=b.expert_weights[:t], logits=logits[:, :count],
            token_slots=self.batch.token_slots[:t], first_expert=part.first(count), num_experts=part.of(count),
        )  # fmt: skip
        return self.add_experts(pack, read, layer.gate_up, layer.down, layer.next_norm, t=t, count=count)

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        """Called with the residual stream x [T, H] before each layer, and after the last, for a head that drafts."""

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
