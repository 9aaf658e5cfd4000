"""Qwen3.5 as a straight list of op calls. Written once, run by every pack.
Shapes: T tokens of the step, R rows (sequences) in it, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openinfer import kernels
from openinfer.graph.runner import Batch, Read, StepRows
from openinfer.kernels import Pack
from openinfer.kernels.authoring import KvCache, padded_rows
from openinfer.recipes.engine.decoder import Activations, Decoder, leading
from openinfer.recipes.engine.limits import Limits
from openinfer.recipes.engine.weights import Mixture
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.ops.gated_attention import gated_attention
from openinfer.recipes.qwen3_5.ops.gated_delta_net import gated_delta_net
from openinfer.recipes.qwen3_5.states import States
from openinfer.recipes.qwen3_5.weights import Attention, DeltaNet, Layer, Weights
from openinfer.tensor import Arena, Stream, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers(Activations):
    qkv: Tensor
    heads: Tensor
    mixed: Tensor
    values: Tensor
    ba: Tensor

    @classmethod
    def allocate(cls, c: Config, weights: Weights, arena: Arena, limits: Limits) -> "Buffers":
        mixers = [layer.mixer for layer in weights.layers]
        delta = next(mixer for mixer in mixers if isinstance(mixer, DeltaNet))
        heads, kv_heads, experts = c.part.of(c.num_heads), c.part.of(c.num_kv_heads), c.experts
        return cls.place(
            arena, limits, c, experts, drafts=weights.mtp is not None, qkv=2 * (heads + kv_heads) * c.head_dim,
            heads=heads * c.head_dim, mixed=delta.in_proj.shape[0], values=c.z_size,
            ba=delta.ba.shape[0] if delta.ba else 1, router=padded_rows(experts.count + 1) if experts else 1,
            mlp=c.part.of(experts.shared_size if experts else c.intermediate_size),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model(Decoder[Layer]):
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

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        w, batch, t, r = self.weights, self.batch, num_tokens, num_rows
        x = self.buffers.x[:t]
        kernels.embed(pack, out=x, token_ids=batch.expand(pack, t, r), table=w.embed)
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

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """graph.runner.Proposer: the MTP head's hidden states, from the normed states before it and the embedding of
        the tokens that follow. Its keys and values have the last layer of the pages."""
        layer = self.mtp.layer
        read = self.read_drafts(pack, token_ids, self.weights.norm if first else self.mtp.norm)
        if only_keys:
            self._keys(pack, read, layer, step)
            return
        read = self._attention(pack, read, layer, self.config.num_full, step, max_q_len)
        self._mlp(pack, read, layer, token_ids.shape[0])

    def _keys(self, pack: Pack, read: Read, layer: Layer, step: StepRows) -> None:
        """Keys and values of the MTP head's layer, whose queries no draft needs."""
        c, t, mixer = self.config, step["positions"].shape[0], layer.mixer
        assert isinstance(mixer, Attention)
        own = mixer.qkv.rows(2 * c.part.of(c.num_heads) * c.head_dim)
        pairs = leading(self.buffers.qkv, t, own.shape[0])
        kernels.norm_linear(pack, out=pairs, **read, weight=own)
        kernels.qk_norm_rope_write(
            pack, q=None, **self.kv.layer(c.num_full), qkv=pairs, q_norm=mixer.q_norm, k_norm=mixer.k_norm,
            cos_sin=self.cos_sin, positions=step["positions"], token_slots=step["token_slots"],
            block_tables=self.batch.rows["block_tables"], eps=c.rms_norm_eps,
        )  # fmt: skip

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
        qkv, heads, mixer = b.qkv[:t], b.heads[:t], layer.mixer
        assert isinstance(mixer, Attention)
        kernels.norm_linear(pack, out=qkv, **read, weight=mixer.qkv, lora=batch.adapted(mixer.qkv, t))
        gated_attention(
            pack, out=heads, **self.kv.layer(index), qkv=qkv, q_norm=mixer.q_norm, k_norm=mixer.k_norm,
            cos_sin=self.cos_sin, block_tables=batch.rows["block_tables"], **step, eps=c.rms_norm_eps,
            scale=c.head_dim**-0.5, max_q_len=max_q_len,
        )  # fmt: skip
        return self.add(pack, mixer.o, heads, layer.post_norm)

    def _delta_net(
        self, pack: Pack, read: Read, layer: Layer, index: int, t: int, r: int, max_q_len: int, lags: bool
    ) -> Read:
        """x += the gated delta net of its norm; `index`: of the layer among its kind. Returns the MLP's input. lags:
        states may lag behind by drafts (graph.runner.States)."""
        c, b, rows, most = self.config, self.buffers, self.batch.rows, self.states.max_snapshots
        mixer = layer.mixer
        assert isinstance(mixer, DeltaNet)
        mixed, adapted, into = b.mixed[:t], self.batch.adapted, mixer.in_proj
        kernels.norm_linear(pack, out=mixed, **read, weight=into, lora=adapted(into, t))
        width, ba = c.conv_size + c.z_size, 2 * c.part.of(c.value_heads)
        recent = self.recent[:, index] if lags and self.recent is not None else None
        if mixer.ba is not None:
            ba_weight = mixer.ba.weight
            kernels.norm_linear(pack, out=b.ba[:t], **read, weight=ba_weight, lora=adapted(ba_weight, t))
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
        return self.add(pack, mixer.out, b.values[:t], layer.post_norm)

    def _mlp(self, pack: Pack, read: Read, layer: Layer, t: int) -> Read:
        """x += the MLP of its norm, or the mixture's. Returns the input of the next layer."""
        b, mlp, part, experts = self.buffers, layer.mlp, self.config.part, self.config.experts
        if not isinstance(mlp, Mixture):
            return self.add(pack, mlp.down, self.gate_up(pack, read, mlp.gate_up, t), layer.next_norm)
        assert experts is not None
        count, router = experts.count, b.router[:t]
        hidden = self.gate_up(pack, read, mlp.shared.gate_up, t)
        kernels.norm_linear(pack, out=router, **read, weight=mlp.router)
        # The shared expert's gate scales its hidden layer, which has the same effect as scaling its output.
        kernels.route_topk(
            pack, expert_ids=b.expert_ids[:t], expert_weights=b.expert_weights[:t], logits=router[:, :count],
            token_slots=self.batch.token_slots[:t], first_expert=part.first(count),
            num_experts=part.of(count), shared=hidden, gate=router[:, count : count + 1],
        )  # fmt: skip
        shared = hidden, mlp.shared.down
        return self.add_experts(
            pack, read, mlp.gate_up, mlp.down, layer.next_norm, t=t, count=count, shared=shared
        )
