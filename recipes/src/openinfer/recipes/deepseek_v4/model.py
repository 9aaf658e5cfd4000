"""DeepSeek-V4, as a straight list of op calls: two segments of a step, `forward` and `sample`; `score`, for prompts.

Written once, run by every pack. Shapes: T tokens of the step, R rows (sequences) in it, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from openinfer.graph.runner import Batch, NoStates, States
from openinfer.kernels import Pack, embed, experts, gate_up_clamped, index_topk, project, route
from openinfer.kernels.authoring import Linear
from openinfer.recipes.deepseek_v4.buffers import Buffers
from openinfer.recipes.deepseek_v4.cache import TABLES, Recent, V4Cache
from openinfer.recipes.deepseek_v4.config import CSA, Config
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_pre
from openinfer.recipes.deepseek_v4.ops.queries import q_kv_write
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.recipes.deepseek_v4.ops.streams import hc_post, spread
from openinfer.recipes.deepseek_v4.places import Mixing
from openinfer.recipes.deepseek_v4.weights import Attention, Compressor, Layer, Sparse, Weights
from openinfer.tensor import Stream, Tensor


class StepSize(NamedTuple):
    """The bucket of a step: tokens, rows, and no row has more tokens than `longest`."""

    tokens: int
    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache and buffers that the two segments run on. cos_sin, compress_cos_sin float32 [max_model_len, 2,
    rope_dim / 2]: of layers without and with compressed entries. `quantized`: values are rounded where the published
    code rounds them while it runs."""

    config: Config
    weights: Weights
    cache: V4Cache
    cos_sin: Tensor
    compress_cos_sin: Tensor
    batch: Batch
    buffers: Buffers
    quantized: bool
    states: States = field(default_factory=NoStates)
    recent: Recent | None = None
    tables: Sequence[str | None] = TABLES

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def hidden(self) -> Tensor:
        """[T, n D]: what `head` needs of each token."""
        return self.buffers.streams.reshape(self.buffers.streams.shape[0], -1)

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        """Turn the tokens of the step into logits of each row's last token, and write the cache."""
        w, b, batch, t, r = self.weights, self.buffers, self.batch, num_tokens, num_rows
        streams = b.streams[:t]
        embed(pack, out=b.y[:t], token_ids=batch.expand(pack, t, r), table=w.embed)
        spread(pack, streams=streams, x=b.y[:t], add=False)
        layers = 0
        for number, layer in enumerate(w.layers):
            layers = number + 1
            self.before_layer(pack, number, streams)
            self.layer(pack, layer, StepSize(t, r, max_q_len))
        self.before_layer(pack, layers, streams)
        self.head(pack, batch.select(pack, streams.reshape(t, -1), r, num_drafts))

    def before_layer(self, pack: Pack, number: int, streams: Tensor) -> None:
        """Called with the streams [T, n, D] before each layer, and after the last, for layers that draft."""

    def layer(self, pack: Pack, layer: Layer, step: StepSize, own: Tensor | None = None) -> None:
        """Each sublayer reads one mixture of the streams, and is mixed into all of them. own [T, d]: where the step is
        of blocks of drafts, the memory of their raw vectors, which no page keeps."""
        b, t = self.buffers, step.tokens
        self.read_streams(pack, layer.attn_mixing, layer.attn_norm, t)
        self._attention(pack, layer, step, own)
        ranks = self.config.part.ranks
        hc_post(pack, streams=b.streams[:t], y=b.y[:t], mix=b.mix[:t], ranks=ranks)
        self.read_streams(pack, layer.ffn_mixing, layer.ffn_norm, t)
        self._mixture(pack, layer, t)
        hc_post(pack, streams=b.streams[:t], y=b.y[:t], mix=b.mix[:t], ranks=ranks)

    def read_streams(self, pack: Pack, mixing: Mixing, norm: Tensor, t: int) -> None:
        """normed = the norm of a mixture of the streams; rounded = the same for products that round their input."""
        c, b = self.config, self.buffers
        hc_pre(
            pack,
            out=b.normed[:t],
            rounded_out=b.rounded[:t] if self.quantized else None,
            mix=b.mix[:t],
            streams=b.streams[:t],
            fn=mixing.fn,
            base=mixing.base,
            scale=mixing.scale,
            norm_weight=norm,
            eps=c.rms_norm_eps,
            hc_eps=c.hc_eps,
            iters=c.hc_iters,
        )

    def write_keys(self, pack: Pack, layer: Layer, t: int, own: Tensor | None = None) -> None:
        """The raw vectors of t tokens into the window's pages, or `own`; and qr = the queries' low-rank vectors."""
        b, batch, attention = self.buffers, self.batch, layer.attention
        self._project(pack, b.qkv[:t], b.rounded[:t], attention.into)
        q_kv_write(
            pack,
            qr=b.qr[:t],
            kv=self.cache.window[:, layer.index] if own is None else own,
            qkv=b.qkv[:t],
            q_norm=attention.q_norm,
            kv_norm=attention.kv_norm,
            cos_sin=self._angles(attention),
            positions=batch.positions[:t],
            token_slots=batch.token_slots[:t],
            block_tables=batch.rows["window_tables"] if own is None else None,
            eps=self.config.rms_norm_eps,
            quantized=self.quantized,
        )

    def _angles(self, attention: Attention) -> Tensor:
        return self.cos_sin if attention.entries is None else self.compress_cos_sin

    def _attention(self, pack: Pack, layer: Layer, step: StepSize, own: Tensor | None) -> None:
        """y = attention over the window's raw vectors and the layer's entries, or the tokens' own."""
        c, b, batch, t = self.config, self.buffers, self.batch, step.tokens
        q, rows, positions = b.q[:t], batch.rows, batch.positions[:t]
        attention, place = layer.attention, layer.place
        self.write_keys(pack, layer, t, own)
        self._project(pack, q.reshape(t, -1), b.qr[:t], attention.q)
        entries, selected = own, None
        if isinstance(attention.entries, Sparse):
            entries, selected = self._select(pack, attention.entries, place, step), b.selected[:t]
        elif attention.entries is not None:
            entries, heavy = self.cache.hca_entries[:, place], attention.entries
            az = _flat(b.compressing, t, heavy.into.shape[0])
            self._project(pack, az, b.normed[:t], Linear(heavy.into, None))
            state, recent = self.cache.hca_state[:, place], self.recent.hca[:, place] if self.recent else None
            self._compress(pack, entries, state, recent, az, heavy.compressor, "q8", step)
        sparse_attend(
            pack,
            out=b.heads[:t],
            q=q,
            kv=self.cache.window[:, layer.index],
            entries=entries,
            selected=selected,
            sinks=attention.sinks,
            cos_sin=self._angles(attention),
            positions=positions,
            token_slots=batch.token_slots[:t],
            kv_tables=rows["window_tables"],
            entry_tables=rows["entry_tables"],
            scale=c.head_dim**-0.5,
            eps=c.rms_norm_eps,
            window=c.sliding_window,
            block=0 if own is None else step.longest,
        )
        out_a, out_b, groups = attention.out_a, attention.out_b, b.groups[:t]
        project(
            pack,
            out=groups,
            x=b.heads[:t],
            weight=out_a,
            groups=c.part.of(c.o_groups),
            rounded_x=False,
            quantized=self.quantized,
        )
        self._project(pack, b.y[:t], groups, out_b)

    def _select(self, pack: Pack, sparse: Sparse, place: int, step: StepSize) -> Tensor:
        """The entries of a CSA layer; `selected` = those that each token attends to."""
        c, b, batch, t, cache = self.config, self.buffers, self.batch, step.tokens, self.cache
        entries, keys = cache.csa_entries[:, place], cache.index_keys[:, place]
        wide = _flat(b.compressing, t, sparse.into.shape[0])
        main, index = 4 * c.head_dim, 4 * (c.head_dim + c.index_dim)
        self._project(pack, wide, b.normed[:t], Linear(sparse.into, None))
        state, index_state = cache.csa_state[:, place], cache.index_state[:, place]
        recent = self.recent.csa[:, place] if self.recent else None
        self._compress(pack, entries, state, recent, wide[:, :main], sparse.compressor, "q8", step)
        own = sparse.index_compressor
        recent = self.recent.index[:, place] if self.recent else None
        self._compress(pack, keys, index_state, recent, wide[:, main:index], own, "hadamard_q4", step)
        self._project(pack, b.index_q[:t].reshape(t, -1), b.qr[:t], sparse.index_q)
        index_topk(
            pack,
            selected=b.selected[:t],
            q=b.index_q[:t],
            weights=wide[:, index : index + c.index_heads],
            keys=keys,
            cos_sin=self.compress_cos_sin,
            positions=batch.positions[:t],
            token_slots=batch.token_slots[:t],
            block_tables=batch.rows["entry_tables"],
            scale=(c.index_dim * c.index_heads) ** -0.5,
            window=CSA,
            quantized=self.quantized,
        )
        return entries

    def _compress(
        self,
        pack: Pack,
        entries: Tensor,
        state: Tensor,
        recent: Tensor | None,
        az: Tensor,
        own: Compressor,
        rounding: str,
        step: StepSize,
    ) -> None:
        rows, r = self.batch.rows, step.rows
        compress(
            pack,
            az=az,
            entries=entries,
            state=state,
            ape=own.ape,
            norm_weight=own.norm,
            cos_sin=self.compress_cos_sin,
            slots=rows["slots"][:r],
            q_starts=rows["q_starts"][: r + 1],
            seq_lens=rows["seq_lens"],
            alive=rows["alive"],
            state_tables=rows["window_tables"],
            entry_tables=rows["entry_tables"],
            eps=self.config.rms_norm_eps,
            rounding=rounding if self.quantized else "none",
            max_q_len=step.longest,
            recent=recent,
        )

    def _mixture(self, pack: Pack, layer: Layer, t: int) -> None:
        """y = a rank's part of the output of each token's experts plus that of the shared expert."""
        c, b, batch, m = self.config, self.buffers, self.batch, layer.mixture
        ids, weights = b.expert_ids[:t], b.expert_weights[:t]
        self._project(pack, b.router[:t], b.normed[:t], Linear(m.router, None))
        route(
            pack,
            expert_ids=ids,
            expert_weights=weights,
            logits=b.router[:t, : c.num_experts],
            bias=m.bias,
            table=m.table,
            token_ids=batch.token_ids[:t],
            token_slots=batch.token_slots[:t],
            scaling=c.routed_scaling_factor,
            first_expert=c.part.first(c.num_experts),
            num_experts=c.part.of(c.num_experts),
        )
        gate_up_clamped(
            pack,
            out=b.hidden[:t],
            x=b.rounded[:t],
            weight=m.shared_gate_up,
            limit=c.swiglu_limit,
            quantized=self.quantized,
        )
        self._project(pack, b.shared[:t], b.hidden[:t], m.shared_down)
        experts(
            pack,
            out=b.y[:t],
            x=b.rounded[:t],
            shared=b.shared[:t],
            expert_ids=ids,
            expert_weights=weights,
            gate_up=m.gate_up,
            down=m.down,
            limit=c.swiglu_limit,
            quantized=self.quantized,
            all_experts=c.num_experts,
        )

    def _project(self, pack: Pack, out: Tensor, x: Tensor, linear: Linear[Tensor]) -> None:
        """Packed weights are for inputs that are rounded where the model rounds."""
        rounded = self.quantized and linear.scales is not None
        project(pack, out=out, x=x, weight=linear, groups=1, rounded_x=rounded, quantized=False)

    def logits_of(self, pack: Pack, mixing: Mixing, norm: Tensor, streams: Tensor) -> None:
        """The first logits, of streams [r, n D] or [r, n, D]."""
        c, b, r = self.config, self.buffers, streams.shape[0]
        hc_head(
            pack,
            out=b.collapsed[:r],
            streams=streams.reshape(r, c.hc_mult, -1),
            fn=mixing.fn,
            base=mixing.base,
            scale=mixing.scale,
            eps=c.rms_norm_eps,
            hc_eps=c.hc_eps,
        )
        lm_head, eps = self.weights.lm_head, c.rms_norm_eps
        self.batch.head(pack, b.collapsed[:r], norm=norm, eps=eps, weight=lm_head)

    def head(self, pack: Pack, num_rows: int) -> None:
        """Logits of the streams in `batch.last`."""
        self.logits_of(pack, self.weights.head, self.weights.norm, self.batch.last[:num_rows])

    def clear(self, stream: Stream) -> None:
        """Zero the padding pages."""
        self.cache.zero_(stream, pages=1)


def _flat(buffer: Tensor, tokens: int, columns: int) -> Tensor:
    """The beginning of a buffer's memory as [tokens, columns]."""
    return buffer.reshape(-1)[: tokens * columns].reshape(tokens, columns)
