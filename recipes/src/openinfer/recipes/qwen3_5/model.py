"""Qwen3.5, as a straight list of op calls: two segments of a step, `forward` and `sample`; and `score`, for prompts.

Written once, run by every pack. Shapes: T tokens of the step, R rows (sequences) in it, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from openinfer.graph import Rows
from openinfer.kernels import (
    Pack,
    embed,
    expand_rows,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
    route_topk,
    select_rows,
)
from openinfer.recipes.qwen3_5.batch import Buffers
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.ops.gated_attention import gated_attention
from openinfer.recipes.qwen3_5.ops.gated_delta_net import gated_delta_net
from openinfer.recipes.qwen3_5.ops.sigmoid_gate import sigmoid_gate
from openinfer.recipes.qwen3_5.weights import Attention, DeltaNet, Layer, Mixture, Weights
from openinfer.sampler.gpu import advance, sample, score, top_logprobs
from openinfer.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, cache, states and buffers that the two segments run on.

    kv [pages, full layers, 2, G, page_size, d], state float32 [blocks, linear layers, Hv, dk, dv] and conv_state
    [blocks, linear layers, K, C]: page-first, so that a page or a block holds all layers. cos_sin float32
    [max_model_len, 2, rotary_dim / 2]. max_snapshots: of a row in a step.
    """

    config: Config
    weights: Weights
    kv: Tensor
    state: Tensor
    conv_state: Tensor
    cos_sin: Tensor
    rows: Rows
    buffers: Buffers
    max_snapshots: int

    def forward(self, pack: Pack, num_tokens: int, num_rows: int, max_q_len: int) -> None:
        """Tokens of the step to logits of each row's last token; keys and values go to the cache, states move on."""
        c, w, b, rows, t, r = self.config, self.weights, self.buffers, self.rows, num_tokens, num_rows
        x, q_starts = b.x[:t], rows["q_starts"][: r + 1]
        expand_rows(
            pack,
            token_ids=b.token_ids[:t],
            positions=b.positions[:t],
            token_slots=b.token_slots[:t],
            prompt=rows["prompt"][:t],
            slots=rows["slots"][:r],
            q_starts=q_starts,
            seq_lens=rows["seq_lens"],
            last_tokens=rows["last_tokens"],
            alive=rows["alive"],
        )
        embed(pack, out=x, token_ids=b.token_ids[:t], table=w.embed)
        full = linear = 0
        for layer in w.layers:
            if isinstance(layer.mixer, Attention):
                self._attention(pack, layer.input_norm, layer.mixer, self.kv[:, full], t, r, max_q_len)
                full += 1
            else:
                self._delta_net(pack, layer.input_norm, layer.mixer, linear, t, r, max_q_len)
                linear += 1
            self._mlp(pack, layer, t)
        select_rows(pack, out=b.last[:r], x=x, q_starts=q_starts)
        norm_linear(
            pack, out=b.logits[:r], x=b.last[:r], norm_weight=w.norm, weight=w.lm_head, eps=c.rms_norm_eps
        )

    def _attention(
        self, pack: Pack, norm: Tensor, mixer: Attention, kv: Tensor, t: int, r: int, max_q_len: int
    ) -> None:
        """x += the gated full attention of its norm."""
        c, b, rows = self.config, self.buffers, self.rows
        x, qkv, heads = b.x[:t], b.qkv[:t], b.heads[:t]
        norm_linear(
            pack,
            out=qkv,
            x=x,
            norm_weight=norm,
            weight=mixer.qkv.weight,
            scales=mixer.qkv.scales,
            eps=c.rms_norm_eps,
        )
        gated_attention(
            pack,
            out=heads,
            kv=kv,
            qkv=qkv,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            cos_sin=self.cos_sin,
            positions=b.positions[:t],
            token_slots=b.token_slots[:t],
            slots=rows["slots"][:r],
            q_starts=rows["q_starts"][: r + 1],
            seq_lens=rows["seq_lens"],
            alive=rows["alive"],
            block_tables=rows["block_tables"],
            eps=c.rms_norm_eps,
            scale=c.head_dim**-0.5,
            max_q_len=max_q_len,
        )
        linear_add(pack, x=x, h=heads, weight=mixer.o.weight, scales=mixer.o.scales)

    def _delta_net(
        self, pack: Pack, norm: Tensor, mixer: DeltaNet, index: int, t: int, r: int, max_q_len: int
    ) -> None:
        """x += the gated delta net of its norm; `index`: of the layer among its kind."""
        c, b, rows = self.config, self.buffers, self.rows
        x, mixed = b.x[:t], b.mixed[:t]
        into = mixer.in_proj
        norm_linear(
            pack, out=mixed, x=x, norm_weight=norm, weight=into.weight, scales=into.scales, eps=c.rms_norm_eps
        )
        width, ba = c.conv_size + c.z_size, 2 * c.value_heads
        if mixer.ba is not None:
            norm_linear(
                pack,
                out=b.ba[:t],
                x=x,
                norm_weight=norm,
                weight=mixer.ba.weight,
                scales=None,
                eps=c.rms_norm_eps,
            )
        gated_delta_net(
            pack,
            out=b.values[:t],
            qkv=mixed[:, : c.conv_size],
            z=mixed[:, c.conv_size : width],
            ba=mixed[:, width : width + ba] if mixer.ba is None else b.ba[:t, :ba],
            conv_weight=mixer.conv,
            decay=mixer.decay,
            dt_bias=mixer.dt_bias,
            norm_weight=mixer.norm,
            conv_state=self.conv_state[:, index],
            state=self.state[:, index],
            slots=rows["slots"][:r],
            q_starts=rows["q_starts"][: r + 1],
            seq_lens=rows["seq_lens"],
            alive=rows["alive"],
            state_from=rows["state_from"],
            state_to=rows["state_to"],
            snapshot_ends=rows["snapshot_ends"][: r * self.max_snapshots].reshape(r, -1),
            snapshot_blocks=rows["snapshot_blocks"][: r * self.max_snapshots].reshape(r, -1),
            eps=c.rms_norm_eps,
            max_q_len=max_q_len,
        )
        linear_add(pack, x=x, h=b.values[:t], weight=mixer.out.weight, scales=mixer.out.scales)

    def _mlp(self, pack: Pack, layer: Layer, t: int) -> None:
        """x += the MLP of its norm, or the mixture's."""
        b, eps, mlp, norm = self.buffers, self.config.rms_norm_eps, layer.mlp, layer.post_norm
        x, hidden = b.x[:t], b.mlp[:t]
        if not isinstance(mlp, Mixture):
            up, down = mlp.gate_up, mlp.down
            gate_up_silu(pack, out=hidden, x=x, norm_weight=norm, weight=up.weight, scales=up.scales, eps=eps)
            linear_add(pack, x=x, h=hidden, weight=down.weight, scales=down.scales)
            return
        router, up, down = b.router[:t], mlp.shared.gate_up, mlp.shared.down
        count, ids, weights = mlp.down.weight.shape[0], b.expert_ids[:t], b.expert_weights[:t]
        norm_linear(pack, out=router, x=x, norm_weight=norm, weight=mlp.router.weight, scales=None, eps=eps)
        # The shared expert's gate scales its hidden layer, which is the same as scaling what it adds.
        gate_up_silu(pack, out=hidden, x=x, norm_weight=norm, weight=up.weight, scales=up.scales, eps=eps)
        sigmoid_gate(pack, out=hidden.reshape(t, 1, -1), gate=_columns(router, count, (1, 1), (1, 1)))
        route_topk(
            pack,
            expert_ids=ids,
            expert_weights=weights,
            logits=router[:, :count],
            token_slots=b.token_slots[:t],
        )
        experts_add(
            pack,
            x=x,
            norm_weight=norm,
            expert_ids=ids,
            expert_weights=weights,
            gate_up=mlp.gate_up.weight,
            down=mlp.down.weight,
            gate_up_scales=mlp.gate_up.scales,
            down_scales=mlp.down.scales,
            eps=eps,
        )
        linear_add(pack, x=x, h=hidden, weight=down.weight, scales=down.scales)

    def sample(self, pack: Pack, num_rows: int) -> None:
        """Logits to tokens; ends rows; moves the state of live rows past the step."""
        b, rows, r = self.buffers, self.rows, num_rows
        logits, tokens, logprobs = b.logits[:r], b.tokens[:r], b.logprobs[:r]
        slots, q_starts, emits = rows["slots"][:r], rows["q_starts"][: r + 1], rows["emits"][:r]
        seq_lens, alive = rows["seq_lens"], rows["alive"]
        sample(
            pack,
            tokens=tokens,
            logprobs=logprobs,
            logits=logits,
            slots=slots,
            q_starts=q_starts,
            seq_lens=seq_lens,
            alive=alive,
            emits=emits,
            temperatures=rows["temperatures"],
            top_ks=rows["top_ks"],
            top_ps=rows["top_ps"],
            min_ps=rows["min_ps"],
            seeds=rows["seeds"],
            min_lens=rows["min_lens"],
            stop_ids=rows["stop_ids"],
            adjusts=rows["adjusts"],
            prompt_lens=rows["prompt_lens"],
            penalties=rows["penalties"],
            prompt_masks=rows["prompt_masks"],
            output_counts=rows["output_counts"],
            recent_tokens=rows["recent_tokens"],
            allowed_masks=rows["allowed_masks"],
            bias_ids=rows["bias_ids"],
            biases=rows["biases"],
            bad_words=rows["bad_words"],
        )
        top_logprobs(
            pack,
            ids=b.top_ids[:r],
            values=b.top_values[:r],
            logits=logits,
            slots=slots,
            alive=alive,
            emits=emits,
            num_logprobs=rows["num_logprobs"],
        )
        advance(
            pack,
            result=b.result[:r],
            tokens=tokens,
            logprobs=logprobs,
            slots=slots,
            q_starts=q_starts,
            emits=emits,
            alive=alive,
            seq_lens=seq_lens,
            last_tokens=rows["last_tokens"],
            limits=rows["limits"],
            min_lens=rows["min_lens"],
            stop_ids=rows["stop_ids"],
            adjusts=rows["adjusts"],
            output_counts=rows["output_counts"],
            recent_tokens=rows["recent_tokens"],
        )

    def score(self, pack: Pack, offset: int) -> None:
        """Log-probabilities of the prompt tokens from `offset` on that a step is asked about, as many as the buffer of
        logits has rows. After forward and sample of the step: it takes their hidden states and their buffers."""
        b, w, rows = self.buffers, self.weights, self.rows
        size = b.logits.shape[0]
        part, tops = slice(offset, offset + size), rows["score_tops"][offset : offset + size]
        select_rows(pack, out=b.last, x=b.x, q_starts=rows["score_after"][offset : offset + size + 1])
        norm_linear(
            pack, out=b.logits, x=b.last, norm_weight=w.norm, weight=w.lm_head, eps=self.config.rms_norm_eps
        )
        score(
            pack,
            logprobs=b.score_logprobs[part],
            ranks=b.score_ranks[part],
            logits=b.logits,
            targets=rows["score_targets"][part],
        )
        top_logprobs(
            pack,
            ids=b.score_top_ids[part],
            values=b.score_top_values[part],
            logits=b.logits,
            slots=rows["score_rows"],
            alive=tops,
            emits=tops,
            num_logprobs=tops,
        )


def _columns(wide: Tensor, first: int, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """A view [T, *shape] of wide [T, N] that starts at column `first` of each row."""
    start = wide[:, first:]
    return Tensor(
        start.ptr, (wide.shape[0], *shape), wide.dtype, wide.device, (wide.strides[0], *strides), wide.owner
    )
