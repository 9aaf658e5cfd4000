"""An EAGLE-3 head as a list of op calls, beside the model that it drafts for.

T tokens of the step, R rows of logits, H the hidden size of head and model, D the head's vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer import kernels
from openinfer.graph.runner import StepRows
from openinfer.kernels import Pack
from openinfer.kernels.authoring import LinearPlaces, WeightPart
from openinfer.recipes.eagle3.config import READ, Head, TargetConfig
from openinfer.recipes.engine.decoder import leading
from openinfer.recipes.engine.limits import Limits
from openinfer.sampler.gpu import widen
from openinfer.tensor import Arena, Checkpoint, Device, Stream, Tensor, float32, int32, int64, nbytes_of

AT = "midlayer."


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights of a head: its heads, its part of the MLP, and all else whole. qkv and fc take two and three
    hidden states; each has its own columns. sources int32 [V]: the row of lm_head of a token, -1 where it has none."""

    fc: tuple[Tensor, ...]  # [H, H] each
    input_norm: Tensor  # [H], of the embedding
    hidden_norm: Tensor  # float32 [H]
    of_embedding: Tensor  # [(A + 2 G) d, H]
    of_hidden: Tensor  # [(A + 2 G) d, H]
    o: Tensor  # [H, A d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    norm: Tensor  # [H]
    lm_head: Tensor  # [D, H]
    sources: Tensor
    places: LinearPlaces

    @classmethod
    def allocate(cls, head: Head, target: TargetConfig, arena: Arena, dtype: np.dtype[Any]) -> "Weights":
        """Uninitialised weights in `arena`."""
        p, h, vocab = LinearPlaces(arena, dtype), target.hidden_size, target.vocab_size
        rank = target.part.rank
        q, kv, inter = head.sizes(target)
        first = target.part.first(target.num_kv_heads) * target.head_dim
        sizes = (("q_proj", q, rank * q), ("k_proj", kv, first), ("v_proj", kv, first))

        def qkv(column: int) -> Tensor:
            parts = (WeightPart(f"{AT}self_attn.{name}", rows, row, column) for name, rows, row in sizes)
            return p.linear(*parts, columns=h).weight

        def sources(offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found, rows = np.full(vocab, -1, np.int32), np.arange(head.draft_vocab_size)
            ids = rows + offsets
            if len(set(ids.tolist())) != len(rows) or ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"its ids must be distinct and below {vocab}")
            found[ids] = rows
            return found

        gate_up = (WeightPart(f"{AT}mlp.{name}_proj", inter, rank * inter) for name in ("gate", "up"))
        return cls(
            fc=tuple(p.linear(WeightPart("fc", h, 0, n * h), columns=h).weight for n in range(READ)),
            input_norm=p.plain(f"{AT}input_layernorm.weight", h),
            hidden_norm=p.plain(f"{AT}hidden_norm.weight", h, dtype=float32),
            of_embedding=qkv(0),
            of_hidden=qkv(h),
            o=p.linear(WeightPart(f"{AT}self_attn.o_proj", h, 0, rank * q), columns=q).weight,
            post_norm=p.plain(f"{AT}post_attention_layernorm.weight", h),
            gate_up=p.linear(*gate_up, columns=h).weight,
            down=p.linear(WeightPart(f"{AT}mlp.down_proj", h, 0, rank * inter), columns=inter).weight,
            norm=p.plain("norm.weight", h),
            lm_head=p.plain("lm_head.weight", head.draft_vocab_size, h),
            sources=p.converted("d2t", vocab, convert=sources, dtype=int32),
            places=p,
        )

    def load(self, head: Head, target: TargetConfig, stream: Stream) -> None:
        """Fill the weights from the head's folder. target: the whole model's. Raises CheckpointError."""
        whole = Weights.allocate(head, target, Arena(Device("null"), None), self.norm.dtype)
        expected = whole.places.expected() | {"d2t": ((head.draft_vocab_size,), (int32, int64))}
        with Checkpoint(head.path) as checkpoint:
            checkpoint.require(expected, ignore=("*",))  # a head may have tensors that other servers use
            self.places.load(checkpoint, stream)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations of a head, for T tokens and N rows of logits."""

    fused: Tensor  # [T, H]: what the head reads of the model
    embeds: Tensor  # [T, H]
    normed: Tensor  # [T, H]
    qkv: Tensor
    heads: Tensor
    mlp: Tensor
    logits: Tensor  # float32 [N, D]
    counts: Tensor  # int32 [T + 1]: 0, 1, 2, ...
    cos_sin: Tensor

    @classmethod
    def allocate(
        cls, head: Head, target: TargetConfig, arena: Arena, stream: Stream, limits: Limits
    ) -> "Buffers":
        """For the largest step, and the longest sequence."""
        h, max_tokens = target.hidden_size, limits.step_tokens
        q, kv, inter = head.sizes(target)
        widths = (h, h, h, q + 2 * kv, q, inter)
        fused, embeds, normed, qkv, heads, mlp = (arena.alloc((max_tokens, n), limits.dtype) for n in widths)
        logits = arena.alloc((limits.max_logits, head.draft_vocab_size), float32)
        counts = arena.alloc((max_tokens + 1,), int32)
        if arena.device.kind != "null":
            counts.copy_from(np.arange(max_tokens + 1, dtype=np.int32), stream)
        inv_freq, scale = head.rope.inv_freq, head.rope.rope_scale
        cos_sin = kernels.place_rope_table(arena, stream, inv_freq, limits.max_model_len, scale)
        return cls(fused, embeds, normed, qkv, heads, mlp, logits, counts, cos_sin)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A head in memory. target: the model."""

    head: Head
    target: TargetConfig
    weights: Weights
    buffers: Buffers

    @classmethod
    def allocate(
        cls, head: Head, target: TargetConfig, arena: Arena, stream: Stream, limits: Limits
    ) -> "Drafter":
        """Its memory, for the largest step and the longest sequence; the weights have no values yet."""
        weights = Weights.allocate(head, target, arena, limits.dtype)
        return cls(head, target, weights, Buffers.allocate(head, target, arena, stream, limits))

    @property
    def nbytes(self) -> int:
        """Bytes of weights and activations."""
        return nbytes_of(self.weights) + nbytes_of(self.buffers)

    def traced(self, layers: int) -> "Drafter":
        """The drafter of a traced model of few layers: it reads what follows the last, so that no product is counted
        for each layer that the last one stands for."""
        return dataclasses.replace(self, head=dataclasses.replace(self.head, layers=(layers,) * READ))

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        """Take from the residual stream x [T, H] before a layer of the model what the head reads of it."""
        fused = self.buffers.fused[: x.shape[0]]
        for place, layer in enumerate(self.head.layers):
            if layer == number and place:
                kernels.linear_add(pack, x=fused, h=x, weight=self.weights.fc[place])
            elif layer == number:
                kernels.project(pack, out=fused, x=x, weight=self.weights.fc[0], groups=1)

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int, *, x: Tensor, embeds: Tensor,
        cache: Mapping[str, Any], block_tables: Tensor, first: bool, only_keys: bool,
    ) -> None:  # fmt: skip
        """graph.runner.Proposer.further, on the hidden states x [T, H]. embeds [V, H]: the model's embedding. cache: a
        layer of its pages, for the head's keys and values."""
        w, b, eps, t = self.weights, self.buffers, self.head.rms_norm_eps, token_ids.shape[0]
        heads, mlp, ranks = b.heads[:t], b.mlp[:t], self.target.part.ranks
        if first:
            kernels.select_rows(pack, out=x, x=b.fused[:t], q_starts=b.counts[: t + 1])
        kernels.embed(pack, out=b.embeds[:t], token_ids=token_ids, table=embeds)
        kernels.norm_rows(pack, out=b.normed[:t], x=x, norm_weight=w.hidden_norm, eps=eps)
        queries = b.heads.shape[1] if only_keys else 0  # no draft needs them
        qkv = leading(b.qkv, t, b.qkv.shape[1] - queries)
        own, other = w.of_embedding[queries:], w.of_hidden[queries:]
        kernels.norm_linear(pack, out=qkv, x=b.embeds[:t], norm_weight=w.input_norm, weight=own, eps=eps)
        kernels.linear_add(pack, x=qkv, h=b.normed[:t], weight=other)
        if only_keys:
            kernels.qk_norm_rope_write(
                pack, q=None, **cache, qkv=qkv, cos_sin=b.cos_sin, positions=step["positions"],
                token_slots=step["token_slots"], block_tables=block_tables, eps=eps,
            )  # fmt: skip
            return
        kernels.norm_rope_attend(
            pack, out=heads, **cache, qkv=qkv, cos_sin=b.cos_sin, block_tables=block_tables, **step, eps=eps,
            scale=self.target.head_dim**-0.5, window=0, max_q_len=max_q_len,
        )  # fmt: skip
        kernels.linear_add(pack, x=x, h=heads, weight=w.o, ranks=ranks)
        kernels.gate_up_silu(pack, out=mlp, x=x, norm_weight=w.post_norm, weight=w.gate_up, eps=eps)
        kernels.linear_add(pack, x=x, h=mlp, weight=w.down, ranks=ranks)

    def draft_head(self, pack: Pack, last: Tensor, logits: Tensor) -> None:
        """Logits [R, V] of the head's hidden states last [R, H], in the model's vocabulary."""
        w, own = self.weights, self.buffers.logits[: last.shape[0]]
        kernels.norm_linear(
            pack, out=own, x=last, norm_weight=w.norm, weight=w.lm_head, eps=self.head.rms_norm_eps
        )
        widen(pack, out=logits, logits=own, sources=w.sources)
