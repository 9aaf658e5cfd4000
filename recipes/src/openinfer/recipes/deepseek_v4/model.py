"""DeepSeek-V4, as a straight list of op calls: two segments of a step, `forward` and `sample`; `score`, for prompts.

Written once, run by every pack. Shapes: T tokens of the step, R rows (sequences) in it, S slots.

Where ranks deal the tokens of a long step, a rank has the streams of its `own` tokens, and computes all heads for them.
What others need is gathered: vectors and compressors' inputs before they are written, and inputs of experts, each of
which is on one rank. The parts of their sum are scattered. Ops on own tokens run on the pack `mine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from openinfer import kernels
from openinfer.graph.runner import Batch, NoStates, States, StepRows
from openinfer.kernels import Pack
from openinfer.kernels.authoring import SCALE_BLOCK, Coded, DealtPack, Linear, padded_rows
from openinfer.recipes.deepseek_v4.cache import TABLES, Recent, V4Cache
from openinfer.recipes.deepseek_v4.config import CSA, Config
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_post, hc_pre, spread
from openinfer.recipes.deepseek_v4.ops.queries import place_vectors, q_kv_write
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.recipes.deepseek_v4.weights import Attention, Compressor, Heavy, Layer, Mixing, Sparse, Weights
from openinfer.recipes.engine.decoder import leading
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Stream, Tensor, float32, int32

Activations = Coded[Tensor] | Tensor
Carried = tuple[Tensor, Tensor | None]
"""The states of a layer's compressor, and those of drafts."""


def activations(arena: Arena, shape: tuple[int, int], dtype: np.dtype[Any], quantized: bool) -> Activations:
    """Inputs of products: their codes if they are rounded."""
    return Coded.allocate(arena, shape, dtype) if quantized else arena.alloc(shape, dtype)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations, allocated once for the largest step; a smaller step uses their first rows. Inputs of products are
    codes where the model rounds them; elsewhere `rounded` is `normed`."""

    streams: Tensor
    mix: Tensor
    normed: Tensor
    rounded: Activations
    y: Tensor
    qkv: Tensor
    qr: Activations
    q: Tensor
    heads: Tensor
    groups: Activations
    compressing: Tensor
    index_q: Tensor
    selected: Tensor
    router: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    hidden: Activations
    shared: Tensor
    collapsed: Tensor

    @classmethod
    def allocate(cls, config: Config, arena: Arena, limits: Limits, quantized: bool) -> "Buffers":
        """For the largest step. quantized: products round their inputs."""
        c, hidden, n = config, config.hidden_size, config.hc_mult
        compressing = 4 * (c.head_dim + c.index_dim) + c.index_heads

        def by_token(*shape: int, kind: np.dtype[Any] = limits.dtype) -> Tensor:
            return arena.alloc((limits.step_tokens, *shape), kind)

        def read(width: int) -> Activations:
            return activations(arena, (limits.step_tokens, width), limits.dtype, quantized)

        normed = by_token(hidden)
        return cls(
            streams=by_token(n, hidden),
            mix=by_token(n + n * n, kind=float32),
            normed=normed,
            rounded=read(hidden) if quantized else normed,
            y=by_token(hidden),
            qkv=by_token(c.q_lora_rank + c.head_dim),
            qr=read(c.q_lora_rank),
            q=by_token(c.part.of(c.num_heads), c.head_dim),
            heads=by_token(c.part.of(c.num_heads) * c.head_dim),
            groups=read(c.part.of(c.o_groups) * c.o_lora_rank),
            compressing=by_token(compressing, kind=float32),
            index_q=by_token(c.index_heads, c.index_dim),
            selected=by_token(c.index_topk, kind=int32),
            router=by_token(padded_rows(c.num_experts), kind=float32),
            expert_ids=by_token(c.experts_per_token, kind=int32),
            expert_weights=by_token(c.experts_per_token, kind=float32),
            hidden=read(c.part.of(c.moe_intermediate_size)),
            shared=by_token(hidden),
            collapsed=arena.alloc((limits.max_logits, hidden), limits.dtype),
        )


class StepSize(NamedTuple):
    """The bucket of a step: tokens, rows, and no row has more tokens than `longest`. own: the tokens that this rank
    computes, None for all."""

    tokens: int
    rows: int
    longest: int
    own: slice | None = None

    @property
    def mine(self) -> slice:
        """The tokens that this rank computes."""
        return slice(0, self.tokens) if self.own is None else self.own

    def dealt(self, pack: Pack) -> Pack:
        """The pack for ops on the tokens that this rank computes."""
        return pack if self.own is None else DealtPack(pack, self.tokens // (self.own.stop - self.own.start))


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
    def hidden(self) -> Tensor:
        """[T, n D]: what `head` needs of each token."""
        return self.buffers.streams.reshape(self.buffers.streams.shape[0], -1)

    def forward(
        self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int, num_drafts: int = 0
    ) -> None:
        w, b, batch, t, r = self.weights, self.buffers, self.batch, num_tokens, num_rows
        step = StepSize(t, r, max_q_len, self.config.part.deal(t))
        own, mine = step.mine, step.dealt(pack)
        kernels.embed(mine, out=b.y[own], token_ids=batch.expand(pack, t, r)[own], table=w.embed)
        spread(mine, streams=b.streams[own], x=b.y[own], add=False)
        for number, layer in enumerate(w.layers):
            self.before_layer(pack, number, step)
            self.layer(pack, layer, step)
        self.before_layer(pack, len(w.layers), step)
        self.share(pack, b.streams[:t], step)
        self.head(pack, batch.select(pack, b.streams[:t].reshape(t, -1), r, num_drafts))

    def before_layer(self, pack: Pack, number: int, step: StepSize) -> None:
        """Called before each layer, and after the last, for layers that draft."""

    def share(self, pack: Pack, whole: Activations, step: StepSize) -> None:
        """Fill `whole`, by token, of which each rank has its own tokens."""
        if isinstance(whole, Coded):
            self.share(pack, whole.codes, step)
            self.share(pack, whole.scales, step)
        elif step.own is not None:
            kernels.all_gather(pack, out=whole, x=whole[step.own], ranks=self.config.part.ranks)

    def layer(self, pack: Pack, layer: Layer, step: StepSize, vectors: Tensor | None = None) -> None:
        """Each sublayer reads one mixture of the streams, and is mixed into all of them. vectors [T, d]: where the step
        is of blocks of drafts, the memory of their raw vectors, which no page keeps."""
        self.read_streams(pack, layer.attn_mixing, layer.attn_norm, step)
        self._attention(pack, layer, step, vectors)
        self._write_streams(pack, step)
        self.read_streams(pack, layer.ffn_mixing, layer.ffn_norm, step)
        self._mixture(pack, layer, step)
        self._write_streams(pack, step)

    def read_streams(self, pack: Pack, mixing: Mixing, norm: Tensor, step: StepSize) -> None:
        """normed = the norm of a mixture of the streams; rounded = the same for products that round their input."""
        c, b, own = self.config, self.buffers, step.mine
        rounded = b.rounded[own] if isinstance(b.rounded, Coded) else None
        hc_pre(
            step.dealt(pack), out=b.normed[own], rounded_out=rounded, mix=b.mix[own], streams=b.streams[own],
            **mixing._asdict(), norm_weight=norm, eps=c.rms_norm_eps, hc_eps=c.hc_eps,
        )  # fmt: skip

    def _write_streams(self, pack: Pack, step: StepSize) -> None:
        c, b, own = self.config, self.buffers, step.mine
        ranks = c.part.ranks if step.own is None else 1
        hc_post(
            step.dealt(pack), streams=b.streams[own], y=b.y[own], mix=b.mix[own], hc_eps=c.hc_eps,
            iters=c.hc_iters, ranks=ranks,
        )  # fmt: skip

    def write_keys(self, pack: Pack, layer: Layer, step: StepSize, vectors: Tensor | None = None) -> None:
        """The raw vectors of the step's tokens into the window's pages, or `vectors`; and qr = the low-rank vectors of
        own tokens' queries."""
        b, batch, attention = self.buffers, self.batch, layer.attention
        t, own, mine = step.tokens, step.mine, step.dealt(pack)
        pages, tables = self.cache.window[:, layer.index], batch.rows["window_tables"]
        apart = vectors if step.own is None else leading(b.shared, t, self.config.head_dim)
        self._project(mine, b.qkv[own], b.rounded[own], attention.into)
        q_kv_write(
            mine, qr=b.qr[own], kv=pages if apart is None else apart[own], qkv=b.qkv[own],
            q_norm=attention.q_norm, kv_norm=attention.kv_norm, cos_sin=self._angles(attention),
            positions=batch.positions[own], token_slots=batch.token_slots[own],
            block_tables=tables if apart is None else None, eps=self.config.rms_norm_eps,
            quantized=self.quantized,
        )  # fmt: skip
        if step.own is not None and apart is not None:
            self.share(pack, apart, step)
            positions, slots = batch.positions[:t], batch.token_slots[:t]
            place_vectors(
                pack, x=apart, kv=pages, positions=positions, token_slots=slots, block_tables=tables
            )

    def _angles(self, attention: Attention) -> Tensor:
        return self.cos_sin if attention.entries is None else self.compress_cos_sin

    def _attention(self, pack: Pack, layer: Layer, step: StepSize, vectors: Tensor | None) -> None:
        """y = attention over the window's raw vectors and the layer's entries, or the tokens' `vectors`; a rank's part
        of its sum, or of own tokens all. Its calls are in the order in which most may run side by side."""
        c, b, batch, own = self.config, self.buffers, self.batch, step.mine
        attention, place, rows, mine = layer.attention, layer.place, batch.rows, step.dealt(pack)
        w = attention.heads if step.own is None or attention.every is None else attention.every
        heads, tokens = w.sinks.shape[0], own.stop - own.start
        groups = heads * c.o_groups // c.num_heads
        flat = leading(b.q, tokens, heads * c.head_dim)
        sparse, entries = isinstance(attention.entries, Sparse), vectors
        self.write_keys(pack, layer, step, vectors)
        if isinstance(attention.entries, Sparse):
            self._project(mine, b.index_q[own].reshape(tokens, -1), b.qr[own], attention.entries.index_q)
            self._index_keys(pack, attention.entries, place, step)
            self._select(mine, place, step)
            entries = self._sparse_entries(pack, attention.entries, place, step)
        self._project(mine, flat, b.qr[own], w.q)
        if isinstance(attention.entries, Heavy):
            entries = self._heavy_entries(pack, attention.entries, place, step)
        out = leading(b.heads, tokens, heads * c.head_dim)
        sparse_attend(
            mine, out=out, q=flat.reshape(tokens, heads, c.head_dim), kv=self.cache.window[:, layer.index],
            entries=entries, selected=b.selected[own] if sparse else None, sinks=w.sinks,
            cos_sin=self._angles(attention), positions=batch.positions[own],
            token_slots=batch.token_slots[own], kv_tables=rows["window_tables"],
            entry_tables=rows["entry_tables"], scale=c.head_dim**-0.5, eps=c.rms_norm_eps,
            window=c.sliding_window, block=0 if vectors is None else step.longest,
        )  # fmt: skip
        grouped = _flat_read(b.groups, tokens, groups * c.o_lora_rank)
        kernels.project(mine, out=grouped, x=out, weight=w.out_a, groups=groups)
        self._project(mine, b.y[own], grouped, w.out_b)

    def _heavy_entries(self, pack: Pack, heavy: Heavy, place: int, step: StepSize) -> Tensor:
        """The entries of an HCA layer, with those of the step's tokens."""
        b, own, entries = self.buffers, step.mine, self.cache.hca_entries[:, place]
        az = leading(b.compressing, step.tokens, heavy.into.shape[0])
        self._project(step.dealt(pack), az[own], b.normed[own], Linear(heavy.into, None))
        self.share(pack, az, step)
        states = self.cache.hca_state[:, place], self.recent.hca[:, place] if self.recent else None
        self._compress(pack, entries, states, az, heavy.compressor, "q8", step)
        return entries

    def _index_keys(self, pack: Pack, sparse: Sparse, place: int, step: StepSize) -> None:
        """The indexer's keys of a CSA layer, with those of the step's tokens, and what its entries are made of."""
        c, cache, own, wide = self.config, self.cache, step.mine, self._wide(step)
        self._project(step.dealt(pack), wide[own], self.buffers.normed[own], Linear(sparse.into, None))
        self.share(pack, wide, step)
        states = cache.index_state[:, place], self.recent.index[:, place] if self.recent else None
        az = wide[:, 4 * c.head_dim : -c.index_heads]
        keys = cache.index_keys[:, place]
        self._compress(pack, keys, states, az, sparse.index_compressor, "hadamard_q4", step)

    def _sparse_entries(self, pack: Pack, sparse: Sparse, place: int, step: StepSize) -> Tensor:
        """The entries of a CSA layer, with those of the step's tokens."""
        entries, az = self.cache.csa_entries[:, place], self._wide(step)[:, : 4 * self.config.head_dim]
        states = self.cache.csa_state[:, place], self.recent.csa[:, place] if self.recent else None
        self._compress(pack, entries, states, az, sparse.compressor, "q8", step)
        return entries

    def _wide(self, step: StepSize) -> Tensor:
        """What a CSA layer makes of the step's tokens: the compressors' inputs, and weights of the indexer's heads."""
        c = self.config
        return leading(self.buffers.compressing, step.tokens, 4 * (c.head_dim + c.index_dim) + c.index_heads)

    def _select(self, pack: Pack, place: int, step: StepSize) -> None:
        """selected = the entries of a CSA layer that each own token attends to."""
        c, b, batch, own = self.config, self.buffers, self.batch, step.mine
        kernels.index_topk(
            pack, selected=b.selected[own], q=b.index_q[own], weights=self._wide(step)[own, -c.index_heads :],
            keys=self.cache.index_keys[:, place], cos_sin=self.compress_cos_sin,
            positions=batch.positions[own], token_slots=batch.token_slots[own],
            block_tables=batch.rows["entry_tables"], scale=(c.index_dim * c.index_heads) ** -0.5, window=CSA,
            quantized=self.quantized,
        )  # fmt: skip

    def _compress(
        self, pack: Pack, entries: Tensor, states: Carried, az: Tensor, own: Compressor, rounding: str, step: StepSize
    ) -> None:  # fmt: skip
        rows, r, (state, recent) = self.batch.rows, step.rows, states
        compress(
            pack, az=az, entries=entries, state=state, ape=own.ape, norm_weight=own.norm,
            cos_sin=self.compress_cos_sin, slots=rows["slots"][:r], q_starts=rows["q_starts"][: r + 1],
            seq_lens=rows["seq_lens"], alive=rows["alive"], state_tables=rows["window_tables"],
            entry_tables=rows["entry_tables"], eps=self.config.rms_norm_eps,
            rounding=rounding if self.quantized else "none", max_q_len=step.longest, recent=recent,
        )  # fmt: skip

    def _mixture(self, pack: Pack, layer: Layer, step: StepSize) -> None:
        """y = a rank's part of the output of each token's experts plus that of the shared expert; of own tokens all."""
        c, b, batch, m, t, own = self.config, self.buffers, self.batch, layer.mixture, step.tokens, step.mine
        ids, weights, x, y = b.expert_ids[:t], b.expert_weights[:t], b.rounded[:t], b.y[:t]
        self.share(pack, x, step)
        kernels.gate_up_clamped(pack, out=b.hidden[:t], x=x, weight=m.shared_gate_up, limit=c.swiglu_limit)
        self._project(pack, b.shared[:t], b.hidden[:t], m.shared_down)
        self._project(step.dealt(pack), b.router[own], b.normed[own], Linear(m.router, None))
        self.share(pack, b.router[:t], step)
        kernels.route(
            pack, expert_ids=ids, expert_weights=weights, logits=b.router[:t, : c.num_experts], bias=m.bias,
            table=m.table, token_ids=batch.token_ids[:t], token_slots=batch.token_slots[:t],
            scaling=c.routed_scaling_factor, first_expert=c.part.first(c.num_experts),
            num_experts=c.part.of(c.num_experts),
        )  # fmt: skip
        kernels.experts(
            pack, out=y, x=x, shared=b.shared[:t], expert_ids=ids, expert_weights=weights, gate_up=m.gate_up,
            down=m.down, limit=c.swiglu_limit, all_experts=c.num_experts,
        )  # fmt: skip
        if step.own is not None:
            kernels.reduce_scatter(pack, out=y[own], x=y, ranks=c.part.ranks)

    def _project(self, pack: Pack, out: Tensor, x: Activations, linear: Linear[Tensor]) -> None:
        kernels.project(pack, out=out, x=x, weight=linear, groups=1)

    def logits_of(self, pack: Pack, mixing: Mixing, norm: Tensor, streams: Tensor) -> None:
        """The first logits, of streams [r, n D] or [r, n, D]."""
        c, b, r = self.config, self.buffers, streams.shape[0]
        out, eps, streams = b.collapsed[:r], c.rms_norm_eps, streams.reshape(r, c.hc_mult, -1)
        hc_head(pack, out=out, streams=streams, **mixing._asdict(), eps=eps, hc_eps=c.hc_eps)
        self.batch.head(pack, out, norm=norm, eps=eps, weight=self.weights.lm_head)

    def head(self, pack: Pack, num_rows: int) -> None:
        self.logits_of(pack, self.weights.head, self.weights.norm, self.batch.last[:num_rows])

    def clear(self, stream: Stream) -> None:
        self.cache.zero_(stream, pages=1)


def _flat_read(buffer: Activations, tokens: int, columns: int) -> Activations:
    """leading, of the codes too. A step has no more blocks of columns than the buffer."""
    if not isinstance(buffer, Coded):
        return leading(buffer, tokens, columns)
    blocks = -(-columns // SCALE_BLOCK)
    return Coded(leading(buffer.codes, tokens, columns), leading(buffer.scales, tokens, blocks), buffer.dtype)


@dataclass(frozen=True, slots=True)
class DraftingModel(Model):
    """graph.runner.Proposer: a Model whose MTP layer drafts. It reads the buffers that a step of the main model has
    filled. Its raw vectors have the last layer of the window's pages.

    work [T n, D]: scratch.
    """

    work: Activations = field(kw_only=True)

    seen = Model.hidden

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """Turn the streams of the main model's last layer, or of this layer, into those of this layer, in place. It
        takes positions and slots of tokens from the batch, as every layer does."""
        mtp, b, t, rows = self.weights.mtp, self.buffers, token_ids.shape[0], step["slots"].shape[0]
        assert mtp is not None
        streams, width = b.streams[:t], b.streams.shape[2]
        flat, scratch = streams.reshape(-1, width), self.work[: t * streams.shape[1]]
        kernels.embed(pack, out=b.shared[:t], token_ids=token_ids, table=self.weights.embed)
        eps = self.config.rms_norm_eps
        kernels.norm_rows(pack, out=b.rounded[:t], x=b.shared[:t], norm_weight=mtp.e_norm, eps=eps)
        self._project(pack, b.y[:t], b.rounded[:t], mtp.e_proj)
        kernels.norm_rows(pack, out=scratch, x=flat, norm_weight=mtp.h_norm, eps=eps)
        self._project(pack, flat, scratch, mtp.h_proj)
        spread(pack, streams=streams, x=b.y[:t], add=True)
        layer, size = mtp.layer, StepSize(t, rows, max_q_len)
        if only_keys:
            self.read_streams(pack, layer.attn_mixing, layer.attn_norm, size)
            self.write_keys(pack, layer, size)
        else:
            self.layer(pack, layer, size)

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        mtp = self.weights.mtp
        assert mtp is not None
        self.logits_of(pack, mtp.head, mtp.norm, self.batch.last[:num_rows])
