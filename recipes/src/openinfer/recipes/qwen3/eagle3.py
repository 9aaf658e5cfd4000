"""EAGLE-3: one decoder layer that drafts, from a checkpoint of its own in the published form.

It reads the residual stream at three layers of the model, and the embedding of the token that follows. Its own residual
stream takes their place for the draft after the first. It has a vocabulary of its own: the part of the tokens that is
drawn most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.graph.runner import StepRows
from openinfer.kernels import (
    Pack,
    embed,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rope_attend,
    norm_rows,
    project,
    qk_norm_rope_write,
    rope_table,
    select_rows,
)
from openinfer.kernels.weights import LinearPlaces, WeightPart
from openinfer.recipes.engine.config_fields import Fields, share_evenly
from openinfer.recipes.engine.errors import SetupError, UnsupportedModel
from openinfer.recipes.qwen3.config import Config, frequencies
from openinfer.recipes.qwen3.model import Model
from openinfer.sampler.gpu import widen
from openinfer.tensor import Arena, Checkpoint, CheckpointError, Stream, Tensor, float32, int32

AT = "midlayer."
READ = 3
"""Layers of the model that the head reads."""


@dataclass(frozen=True, slots=True)
class Head:
    """The config of a head, and its folder. layers: the head reads the residual stream before these layers."""

    path: Path
    num_heads: int
    intermediate_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    layers: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, config: Config, ranks: int) -> Head:
        """The head of a folder for a model on this number of GPUs. Raises SetupError, or UnsupportedModel naming the
        key."""
        try:
            raw = json.loads((path / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise SetupError(
                f"--speculative-config: model {path} has no config.json to read: {error}"
            ) from None
        fields = Fields(raw, f"{path}/config.json")
        known = {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_key_value_heads": config.num_kv_heads,
        }
        fields.is_all(known, "a head of this model has")
        heads = fields.size("num_attention_heads")
        dim = fields.size("head_dim", default=config.hidden_size // heads)
        if dim != config.head_dim or heads % config.num_kv_heads:
            raise UnsupportedModel(
                f"{path}/config.json: {heads} heads of {dim}; the head shares the pages of the model, whose heads have "
                f"{config.head_dim} elements and {config.num_kv_heads} keys"
            )
        fields.is_all({"rope_scaling": None, "num_hidden_layers": 1}, "this recipe runs")
        inter = fields.size("intermediate_size")
        share_evenly(ranks, {"num_attention_heads": (heads, 1), "intermediate_size": (inter, 16)})
        return cls(
            path,
            heads,
            inter,
            fields.size("draft_vocab_size", default=config.vocab_size),
            fields.number("rms_norm_eps", default=1e-6, most=1),
            fields.number("rope_theta", default=1e4, most=1e12),
            _layers(raw, config.num_layers),
        )

    def sizes(self, config: Config) -> tuple[int, int, int]:
        """Columns of queries, of keys and of the MLP that a rank has. config: the rank's."""
        dim, ranks = config.head_dim, config.ranks
        return self.num_heads * dim // ranks, config.num_kv_heads * dim, self.intermediate_size // ranks


def _layers(raw: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """eagle_aux_hidden_state_layer_ids, at the top or in eagle_config; else the second, the middle and the third from
    the end, as published heads are trained."""
    key = "eagle_aux_hidden_state_layer_ids"
    found = raw.get(key) or (raw.get("eagle_config") or {}).get(key) or (2, count // 2, count - 3)
    good = isinstance(found, list | tuple) and len(found) == READ and all(type(n) is int for n in found)
    if not good or not 0 <= found[0] <= found[1] <= found[2] <= count:
        raise UnsupportedModel(
            f"config.json: {key} is {found}; give {READ} layers in 0 to {count}, ascending"
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class HeadWeights:
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
    def allocate(cls, head: Head, config: Config, arena: Arena, dtype: np.dtype[Any]) -> HeadWeights:
        """Uninitialised weights in `arena`. config: the rank's."""
        p, h, vocab, rank = LinearPlaces(arena, dtype), config.hidden_size, config.vocab_size, config.rank
        q, kv, inter = head.sizes(config)
        first = config.first_kv_head * config.head_dim
        sizes = (("q_proj", q, rank * q), ("k_proj", kv, first), ("v_proj", kv, first))

        def part(name: str, rows: int, row: int = 0, column: int = 0) -> WeightPart:
            return WeightPart(name, rows, row, column)

        def qkv(column: int) -> Tensor:
            return p.linear(
                *(part(f"{AT}self_attn.{n}", rows, row, column) for n, rows, row in sizes), columns=h
            ).weight

        def sources(offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found, rows = np.full(vocab, -1, np.int32), np.arange(head.draft_vocab_size)
            ids = rows + offsets
            if len(set(ids.tolist())) != len(rows) or ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"its ids must be distinct and below {vocab}")
            found[ids] = rows
            return found

        gate_up = (part(f"{AT}mlp.{name}_proj", inter, rank * inter) for name in ("gate", "up"))
        return cls(
            fc=tuple(p.linear(part("fc", h, 0, n * h), columns=h).weight for n in range(READ)),
            input_norm=p.plain(f"{AT}input_layernorm.weight", h),
            hidden_norm=p.plain(f"{AT}hidden_norm.weight", h, dtype=float32),
            of_embedding=qkv(0),
            of_hidden=qkv(h),
            o=p.linear(part(f"{AT}self_attn.o_proj", h, 0, rank * q), columns=q).weight,
            post_norm=p.plain(f"{AT}post_attention_layernorm.weight", h),
            gate_up=p.linear(*gate_up, columns=h).weight,
            down=p.linear(part(f"{AT}mlp.down_proj", h, 0, rank * inter), columns=inter).weight,
            norm=p.plain("norm.weight", h),
            lm_head=p.plain("lm_head.weight", head.draft_vocab_size, h),
            sources=p.converted("d2t", vocab, convert=sources, dtype=int32),
            places=p,
        )

    def load(self, head: Head, config: Config, stream: Stream) -> None:
        """Fill the weights from the head's folder. config: the whole model's. Raises CheckpointError, SetupError."""
        h, kv, inter = config.hidden_size, config.num_kv_heads * config.head_dim, head.intermediate_size
        q = head.num_heads * config.head_dim
        shapes = {
            "fc.weight": (h, READ * h),
            "lm_head.weight": (head.draft_vocab_size, h),
            "d2t": (head.draft_vocab_size,),
        }
        shapes |= {
            f"{AT}self_attn.{n}.weight": (rows, 2 * h)
            for n, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        }
        shapes |= {f"{AT}mlp.{n}.weight": (inter, h) for n in ("gate_proj", "up_proj")}
        with Checkpoint(head.path) as checkpoint:
            for name in dict.fromkeys(self.places.names()):
                if name not in checkpoint:
                    raise CheckpointError(head.path, name, "an EAGLE-3 head has this tensor")
                shape = checkpoint.info(name).shape
                if shape != shapes.get(name, shape):
                    raise CheckpointError(
                        head.path, name, f"it has shape {shape}; by config.json it is {shapes[name]}"
                    )
            self.places.load(checkpoint, stream)


@dataclass(frozen=True, slots=True)
class HeadBuffers:
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
        cls, head: Head, config: Config, arena: Arena, stream: Stream, dtype: np.dtype[Any],
        *, max_tokens: int, max_logits: int, length: int,
    ) -> HeadBuffers:  # fmt: skip
        """For steps of at most max_tokens tokens, and sequences of at most `length`."""
        h, d = config.hidden_size, config.head_dim
        q, kv, inter = head.sizes(config)
        widths = (h, h, h, q + 2 * kv, q, inter)
        fused, embeds, normed, qkv, heads, mlp = (arena.alloc((max_tokens, width), dtype) for width in widths)
        logits = arena.alloc((max_logits, head.draft_vocab_size), float32)
        counts, cos_sin = arena.alloc((max_tokens + 1,), int32), arena.alloc((length, 2, d // 2), float32)
        if arena.device.kind != "null":
            counts.copy_from(np.arange(max_tokens + 1, dtype=np.int32), stream)
            cos_sin.copy_from(rope_table(frequencies(head.rope_theta, d), length), stream)
        return cls(fused, embeds, normed, qkv, heads, mlp, logits, counts, cos_sin)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A head in memory."""

    head: Head
    weights: HeadWeights
    buffers: HeadBuffers


@dataclass(frozen=True, slots=True)
class DraftingModel(Model):
    """graph.runner.Proposer: a Qwen3 whose head drafts. The head's keys and values have the last layer of the pages."""

    drafter: Drafter | None = None

    @property
    def _drafter(self) -> Drafter:
        if self.drafter is None:
            raise TypeError("the head is not laid out")
        return self.drafter

    @property
    def seen(self) -> Tensor:
        """See Proposer."""
        return self._drafter.buffers.fused

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        """Take what the head reads of the residual stream."""
        d = self._drafter
        fused = d.buffers.fused[: x.shape[0]]
        for place, layer in enumerate(d.head.layers):
            if layer == number and place:
                linear_add(pack, x=fused, h=x, weight=d.weights.fc[place])
            elif layer == number:
                project(
                    pack, out=fused, x=x, weight=d.weights.fc[0], scales=None, groups=1, rounded_x=False,
                    quantized=False,
                )  # fmt: skip

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """See Proposer."""
        d, t = self._drafter, token_ids.shape[0]
        w, b, eps, x = d.weights, d.buffers, d.head.rms_norm_eps, self.buffers.x[:t]
        heads, mlp = b.heads[:t], b.mlp[:t]
        if first:
            select_rows(pack, out=x, x=b.fused[:t], q_starts=b.counts[: t + 1])
        embed(pack, out=b.embeds[:t], token_ids=token_ids, table=self.weights.embed)
        norm_rows(pack, out=b.normed[:t], x=x, norm_weight=w.hidden_norm, eps=eps, quantized=False)
        queries = b.heads.shape[1] if only_keys else 0  # no draft needs them
        qkv = b.qkv.reshape(-1)[: t * (b.qkv.shape[1] - queries)].reshape(t, -1)
        own, other = w.of_embedding[queries:], w.of_hidden[queries:]
        norm_linear(pack, out=qkv, x=b.embeds[:t], norm_weight=w.input_norm, weight=own, eps=eps)
        linear_add(pack, x=qkv, h=b.normed[:t], weight=other)
        cache, table = self.kv.layer(self.config.num_layers), self.batch.rows["block_tables"]
        if only_keys:
            qk_norm_rope_write(
                pack, q=None, **cache, qkv=qkv, cos_sin=b.cos_sin, positions=step["positions"],
                token_slots=step["token_slots"], block_tables=table, eps=eps,
            )  # fmt: skip
            return
        norm_rope_attend(
            pack, out=heads, **cache, qkv=qkv, cos_sin=b.cos_sin, block_tables=table, **step, eps=eps,
            scale=self.config.head_dim**-0.5, window=0, max_q_len=max_q_len,
        )  # fmt: skip
        linear_add(pack, x=x, h=heads, weight=w.o, ranks=self.config.ranks)
        gate_up_silu(pack, out=mlp, x=x, norm_weight=w.post_norm, weight=w.gate_up, eps=eps)
        linear_add(pack, x=x, h=mlp, weight=w.down, ranks=self.config.ranks)

    def draft_head(self, pack: Pack, num_rows: int) -> None:
        """See Proposer."""
        d, r = self._drafter, num_rows
        logits, eps = d.buffers.logits[:r], d.head.rms_norm_eps
        norm_linear(
            pack,
            out=logits,
            x=self.batch.last[:r],
            norm_weight=d.weights.norm,
            weight=d.weights.lm_head,
            eps=eps,
        )
        widen(pack, out=self.batch.logits[:r], logits=logits, sources=d.weights.sources)


def traced(drafter: Drafter, layers: int) -> Drafter:
    """The drafter of a traced model of few layers: it reads what follows the last, so that no product is counted for
    each layer that the last one stands for."""
    return dataclasses.replace(drafter, head=dataclasses.replace(drafter.head, layers=(layers,) * READ))


def drafter_of(
    head: Head, config: Config, arena: Arena, stream: Stream, dtype: np.dtype[Any], sizes: Sequence[int]
) -> Drafter:
    """A head with its memory. sizes: the most tokens of a step, rows of logits, tokens of a sequence."""
    tokens, logits, length = sizes
    weights = HeadWeights.allocate(head, config, arena, dtype)
    buffers = HeadBuffers.allocate(
        head, config, arena, stream, dtype, max_tokens=tokens, max_logits=logits, length=length
    )
    return Drafter(head, weights, buffers)
