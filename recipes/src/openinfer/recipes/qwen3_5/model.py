"""Qwen3.5 as a straight list of op calls. Written once, run by every pack.
Shapes: T tokens of the step, R rows (sequences) in it, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.graph.runner import Batch, Read, StepRows
from openinfer.kernels import (
    Pack,
    embed,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rows,
    qk_norm_rope_write,
    route_topk,
)
from openinfer.kernels.authoring import KvCache, Linear, fork
from openinfer.recipes.engine.weights import Mlp
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.ops.gated_attention import gated_attention
from openinfer.recipes.qwen3_5.ops.gated_delta_net import gated_delta_net
from openinfer.recipes.qwen3_5.states import States
from openinfer.recipes.qwen3_5.weights import Attention, DeltaNet, Layer, Mixture, Weights
from openinfer.tensor import Arena, Stream, Tensor, int32


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows. `ba`, `router` and the
    experts' are one element wide where the model has no use for them, and so is `y`: a rank's part of a mixture's sum.
    """

    x: Tensor
    qkv: Tensor
    heads: Tensor
    mixed: Tensor
    values: Tensor
    mlp: Tensor
    ba: Tensor
    router: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    y: Tensor
    drafting: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, config: Config, weights: Weights, arena: Arena, dtype: np.dtype[Any], max_tokens: int
    ) -> "Buffers":
        mixers = [layer.mixer for layer in weights.layers]
        delta = next(mixer for mixer in mixers if isinstance(mixer, DeltaNet))
        mlp, experts, part = weights.layers[0].mlp, config.experts, config.part
        router = mlp.router.weight.shape[0] if isinstance(mlp, Mixture) else 1
        chosen = experts.chosen if experts else 1

        def by_token(width: int, kind: np.dtype[Any] = dtype) -> Tensor:
            return arena.alloc((max_tokens, width), kind)

        return cls(
            x=by_token(config.hidden_size),
            qkv=by_token(2 * (part.of(config.num_heads) + part.of(config.num_kv_heads)) * config.head_dim),
            heads=by_token(part.of(config.num_heads) * config.head_dim),
            mixed=by_token(delta.in_proj.weight.shape[0]),
            values=by_token(config.z_size),
            mlp=by_token(part.of(experts.shared_size if experts else config.intermediate_size)),
            ba=by_token(delta.ba.weight.shape[0] if delta.ba else 1),
            router=by_token(router),
            expert_ids=by_token(chosen, int32),
            expert_weights=by_token(chosen),
            y=by_token(config.hidden_size if experts and part.ranks > 1 else 1),
            drafting=tuple(by_token(config.hidden_size) for _ in range(2 if weights.mtp else 0)),
        )


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache, states and buffers that the two segments run on.

    kv: of the full-attention layers. state [blocks, linear layers, Hv, dk, dv] and conv_state [blocks, linear
    layers, K, C]: page-first, so that a block holds all layers. cos_sin float32
    [max_model_len, 2, rotary_dim / 2]. recent [slots, linear layers, tokens, C + 2 Hv]: inputs of drafts, from which
    the accepted ones move the states on; None without drafts.
    """

    config: Config
    weights: Weights
    kv: KvCache
    state: Tensor
    conv_state: Tensor
    cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    states: States
    recent: Tensor | None = None
    tables: Sequence[str | None] = ("block_tables", None)

    @property
    def hidden(self) -> Tensor:
        return self.buffers.x

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        w, batch, t, r = self.weights, self.batch, num_tokens, num_rows
        x = self.buffers.x[:t]
        embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
        full = linear = 0
        read = Read(x=x, norm_weight=w.layers[0].input_norm, eps=self.config.rms_norm_eps)
        for layer in w.layers:
            if isinstance(layer.mixer, Attention):
                read = self._attention(pack, read, layer, full, batch.step(t, r), max_q_len)
                full += 1
            else:
                lags = max_q_len > 1 or num_drafts > 0
                read = self._delta_net(pack, read, layer, linear, t, r, max_q_len, lags)
                linear += 1
            read = self._mlp(pack, read, layer, t)
        self.head(pack, batch.select(pack, x, r, num_drafts))

    seen = hidden
    """See graph.runner.Proposer."""

    def head(self, pack: Pack, num_rows: int) -> None:
        self._logits(pack, num_rows, self.weights.norm, Linear(self.weights.lm_head, None))

    def _logits(self, pack: Pack, r: int, norm: Tensor, head: Linear[Tensor]) -> None:
        self.batch.head(pack, self.batch.last[:r], norm=norm, eps=self.config.rms_norm_eps, weight=head)

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """graph.runner.Proposer: the MTP head's hidden states, from the normed states before it and the embedding of
        the tokens that follow. Its keys and values have the last layer of the pages."""
        b, eps, mtp, t = self.buffers, self.config.rms_norm_eps, self.weights.mtp, token_ids.shape[0]
        assert mtp is not None
        x, states, other = b.x[:t], b.drafting[0][:t], b.drafting[1][:t]
        norm = self.weights.norm if first else mtp.norm
        norm_rows(pack, out=other, x=x, norm_weight=norm, eps=eps)
        norm_rows(pack, out=states, x=other, norm_weight=mtp.hidden_norm, eps=eps)
        embed(pack, out=other, token_ids=token_ids, table=self.weights.embed)
        norm_linear(pack, out=x, x=other, norm_weight=mtp.embed_norm, weight=mtp.of_embedding, eps=eps)
        linear_add(pack, x=x, h=states, weight=mtp.of_hidden)
        layer, read = mtp.layer, Read(x=x, norm_weight=mtp.layer.input_norm, eps=eps)
        if only_keys:
            self._keys(pack, read, layer, step)
            return
        read = self._attention(pack, read, layer, self.config.num_full, step, max_q_len)
        self._mlp(pack, read, layer, t)

    def _keys(self, pack: Pack, read: Read, layer: Layer, step: StepRows) -> None:
        """Keys and values of the MTP head's layer, whose queries no draft needs."""
        c, t, mixer = self.config, step["positions"].shape[0], layer.mixer
        assert isinstance(mixer, Attention)
        own = mixer.qkv.rows(2 * c.part.of(c.num_heads) * c.head_dim)
        pairs = self.buffers.qkv.reshape(-1)[: t * own.weight.shape[0]].reshape(t, -1)
        norm_linear(pack, out=pairs, **read, weight=own)
        qk_norm_rope_write(
            pack, q=None, **self.kv.layer(c.num_full), qkv=pairs, q_norm=mixer.q_norm, k_norm=mixer.k_norm,
            cos_sin=self.cos_sin, positions=step["positions"], token_slots=step["token_slots"],
            block_tables=self.batch.rows["block_tables"], eps=c.rms_norm_eps,
        )  # fmt: skip

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        mtp = self.weights.mtp
        assert mtp is not None
        self._logits(pack, num_rows, mtp.norm, mtp.head)

    def clear(self, stream: Stream) -> None:
        """Zero the padding page and the padding block of state."""
        self.kv.clear(stream, 1)
        for memory in (self.state, self.conv_state):
            memory[0].zero_(stream)

    def _attention(
        self, pack: Pack, read: Read, layer: Layer, index: int, step: StepRows, max_q_len: int
    ) -> Read:
        """x += the gated full attention of its norm; `index`: of the layer among its kind. Returns the MLP's input."""
        c, b, batch, t = self.config, self.buffers, self.batch, step["positions"].shape[0]
        x, qkv, heads, mixer = b.x[:t], b.qkv[:t], b.heads[:t], layer.mixer
        assert isinstance(mixer, Attention)
        norm_linear(pack, out=qkv, **read, weight=mixer.qkv, lora=batch.adapted(mixer.qkv, t))
        gated_attention(
            pack, out=heads, **self.kv.layer(index), qkv=qkv, q_norm=mixer.q_norm, k_norm=mixer.k_norm,
            cos_sin=self.cos_sin, block_tables=batch.rows["block_tables"], **step, eps=c.rms_norm_eps,
            scale=c.head_dim**-0.5, max_q_len=max_q_len,
        )  # fmt: skip
        return self._add(pack, mixer.o, x, heads, layer.post_norm)

    def _delta_net(
        self, pack: Pack, read: Read, layer: Layer, index: int, t: int, r: int, max_q_len: int, lags: bool
    ) -> Read:
        """x += the gated delta net of its norm; `index`: of the layer among its kind. Returns the MLP's input. lags:
        states may lag behind by drafts (graph.runner.States)."""
        c, b, rows, most = self.config, self.buffers, self.batch.rows, self.states.max_snapshots
        mixer = layer.mixer
        assert isinstance(mixer, DeltaNet)
        x, mixed, adapted, into = b.x[:t], b.mixed[:t], self.batch.adapted, mixer.in_proj
        norm_linear(pack, out=mixed, **read, weight=into, lora=adapted(into, t))
        width, ba = c.conv_size + c.z_size, 2 * c.part.of(c.value_heads)
        recent = self.recent[:, index] if lags and self.recent is not None else None
        if mixer.ba is not None:
            ba_weight = mixer.ba.weight
            norm_linear(pack, out=b.ba[:t], **read, weight=ba_weight, lora=adapted(ba_weight, t))
        gated_delta_net(
            pack, out=b.values[:t], qkv=mixed[:, : c.conv_size], z=mixed[:, c.conv_size : width],
            ba=mixed[:, width : width + ba] if mixer.ba is None else b.ba[:t, :ba], conv_weight=mixer.conv,
            decay=mixer.decay, dt_bias=mixer.dt_bias, norm_weight=mixer.norm,
            conv_state=self.conv_state[:, index], state=self.state[:, index], slots=rows["slots"][:r],
            q_starts=rows["q_starts"][: r + 1],
            **{name: rows[name] for name in ("seq_lens", "alive", "state_from", "state_to")},
            snapshot_ends=rows["snapshot_ends"][: r * most].reshape(r, -1),
            snapshot_blocks=rows["snapshot_blocks"][: r * most].reshape(r, -1), eps=c.rms_norm_eps,
            max_q_len=max_q_len, recent=recent, accepted=None if recent is None else rows["accepted"],
            num_drafts=None if recent is None else rows["num_drafts"][:r],
        )  # fmt: skip
        return self._add(pack, mixer.out, x, b.values[:t], layer.post_norm)

    def _mlp(self, pack: Pack, read: Read, layer: Layer, t: int) -> Read:
        """x += the MLP of its norm, or the mixture's. Returns the input of the next layer."""
        c, b, mlp = self.config, self.buffers, layer.mlp
        experts, ranks = c.experts, c.part.ranks
        x, hidden = b.x[:t], b.mlp[:t]
        if not isinstance(mlp, Mixture):
            self._gate_up(pack, mlp, read, t)
            return self._add(pack, mlp.down, x, hidden, layer.next_norm)
        assert experts is not None
        router, y = b.router[:t], x if ranks == 1 else b.y[:t]
        count, ids, weights = experts.count, b.expert_ids[:t], b.expert_weights[:t]
        with fork(pack, t) as (main, side):
            self._gate_up(main, mlp.shared, read, t)
            norm_linear(side, out=router, **read, weight=mlp.router)
        # The shared expert's gate scales its hidden layer, which has the same effect as scaling its output.
        route_topk(
            pack, expert_ids=ids, expert_weights=weights, logits=router[:, :count],
            token_slots=self.batch.token_slots[:t], first_expert=c.part.first(count),
            num_experts=c.part.of(count), shared=hidden, gate=router[:, count : count + 1],
        )  # fmt: skip
        experts_add(
            pack, **read, expert_ids=ids, expert_weights=weights, gate_up=mlp.gate_up, down=mlp.down, out=y,
            adds=ranks == 1, all_experts=count,
        )  # fmt: skip
        self.batch.add(pack, y, h=hidden, weight=mlp.shared.down)
        return self.batch.add_sum(pack, x, y=y, ranks=ranks, norm=layer.next_norm, eps=c.rms_norm_eps)

    def _gate_up(self, pack: Pack, mlp: Mlp, read: Read, t: int) -> None:
        out, up = self.buffers.mlp[:t], mlp.gate_up
        gate_up_silu(pack, out=out, **read, weight=up, lora=self.batch.adapted(up, t))

    def _add(self, pack: Pack, linear: Linear[Tensor], x: Tensor, h: Tensor, norm: Tensor | None) -> Read:
        ranks, eps, add = self.config.part.ranks, self.config.rms_norm_eps, self.batch.add
        return add(pack, x, h=h, weight=linear, ranks=ranks, norm=norm, eps=eps)
